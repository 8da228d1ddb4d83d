"""Batch norm over two processes: outputs, gradients and running statistics of one module over all samples."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from stoker.records import Layout
from stoker.stepping import batch_norm
from stoker.stepping.batch_norm import SyncBatchNorm
from stoker.stepping.world import World
from stoker.testing.gpu_batch_norm import give_the_cpu_batch_norm_kernels
from stoker.testing.ranks import on_ranks

CHANNELS = 3


@dataclass(frozen=True)
class Case:
    """A module, the shape of a sample behind its channels, and how many of 8 samples each process takes."""

    kind: type[nn.Module]
    shape: tuple[int, ...] = ()
    parts: tuple[int, int] = (5, 3)
    settings: dict[str, object] = field(default_factory=dict)

    def module(self) -> nn.Module:
        """With weights that differ by channel."""
        module = self.kind(CHANNELS, dtype=torch.float64, **self.settings)
        for number, parameter in enumerate(module.parameters()):
            parameter.data = torch.linspace(0.5 + number, 1.5, CHANNELS, dtype=torch.float64)
        return module

    def inputs(self) -> torch.Tensor:
        """Eight samples far from zero, where sums of squares would lose digits."""
        generator = torch.Generator().manual_seed(0)
        return 1e4 + torch.randn(8, CHANNELS, *self.shape, generator=generator, dtype=torch.float64)


CASES = {
    "1d": Case(nn.BatchNorm1d),
    "1d of sequences": Case(nn.BatchNorm1d, (4,)),
    "2d": Case(nn.BatchNorm2d, (2, 2)),
    "3d": Case(nn.BatchNorm3d, (2, 2, 2)),
    "cumulative": Case(nn.BatchNorm2d, (2, 2), settings={"momentum": None}),
    "untracked": Case(nn.BatchNorm2d, (2, 2), settings={"track_running_stats": False}),
    "without weights": Case(nn.BatchNorm2d, (2, 2), settings={"affine": False}),
    "none here": Case(nn.BatchNorm2d, (2, 2), parts=(8, 0)),
}


def passed(module: nn.Module, inputs: torch.Tensor, *, counts: bool = True) -> dict[str, torch.Tensor]:
    """Output, gradients and buffers after two passes; the gradient that comes back is not contiguous."""
    x = inputs.clone().requires_grad_()
    module(x)
    output = module(x)
    slopes = torch.linspace(-1, 2, output.shape[1:].numel(), dtype=x.dtype, device=x.device)
    total = (output.movedim(1, -1).square() * slopes.view(*output.shape[2:], CHANNELS)).sum()
    total.backward(torch.full_like(total, float(counts)))
    gradients = {f"gradient of {name}": p.grad for name, p in module.named_parameters()}
    return {"output": output.detach(), "gradient": x.grad, **gradients, **dict(module.named_buffers())}


def everything(world: World) -> dict[str, dict[str, torch.Tensor]]:
    """What each case gives in this process, for its samples or, if it has none, for the first one of all."""
    assert world.data is not None
    found = {}
    for name, case in CASES.items():
        module, first = case.module(), sum(case.parts[: world.rank])
        own = case.inputs()[first : first + case.parts[world.rank]]
        SyncBatchNorm(module, world.data).counts = bool(len(own))
        found[name] = passed(module, own if len(own) else case.inputs()[:1], counts=bool(len(own)))
    return found


def everything_fused(world: World) -> dict[str, dict[str, torch.Tensor]]:
    """The same by the operations that GPUs have kernels for."""
    give_the_cpu_batch_norm_kernels()
    batch_norm._is_fused = lambda x: x.dim() > 0  # no tensor of this test is on a GPU
    return everything(world)


@pytest.fixture(scope="module", params=[everything, everything_fused], ids=["plain", "fused"])
def found(request: pytest.FixtureRequest) -> list[dict[str, dict[str, torch.Tensor]]]:
    """What each of two processes found."""
    return on_ranks(Layout(replicas=2), request.param)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_normalise_as_one(name: str, found: list[dict[str, dict[str, torch.Tensor]]]) -> None:
    """Whatever the dimensions and settings, of parts that differ in size, one of which may be nothing."""
    case = CASES[name]
    expected = passed(case.module(), case.inputs())
    for rank, own in enumerate(one[name] for one in found):
        first, count = sum(case.parts[:rank]), case.parts[rank]
        assert own.keys() == expected.keys()
        for part in ("output", "gradient"):
            torch.testing.assert_close(own[part][:count], expected[part][first : first + count], rtol=1e-8, atol=1e-9)
        for buffer in case.module().state_dict().keys() - dict(case.module().named_parameters()):
            torch.testing.assert_close(own[buffer], expected[buffer], rtol=1e-12, atol=1e-12)
    for parameter in (key for key in expected if key.startswith("gradient of")):
        total = sum(one[name][parameter] for one in found)
        torch.testing.assert_close(total, expected[parameter], rtol=1e-9, atol=1e-9)


def test_a_sample_that_does_not_count_gets_no_gradient(found: list[dict[str, dict[str, torch.Tensor]]]) -> None:
    """Nor does it add to anything."""
    without = found[1]["none here"]
    assert not any(without[key].any() for key in without if key.startswith("gradient"))


def nothing_here(world: World) -> dict[str, torch.Tensor]:
    """The first process passes all samples, the second none at all, which count."""
    assert world.data is not None
    module = CASES["2d"].module()
    SyncBatchNorm(module, world.data)
    return passed(module, CASES["2d"].inputs()[: 0 if world.rank else 8])


def test_a_process_without_values_adds_nothing() -> None:
    """As where a detector proposes no regions: no NaN reaches the others."""
    expected = passed(CASES["2d"].module(), CASES["2d"].inputs())
    first, second = on_ranks(Layout(replicas=2), nothing_here)
    torch.testing.assert_close(first["output"], expected["output"], rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(first["gradient"], expected["gradient"], rtol=1e-8, atol=1e-9)
    assert second["output"].shape[0] == 0
    assert torch.equal(first["running_mean"], second["running_mean"])


def evaluated(world: World) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs in evaluation mode, of the module as it was and of the synchronised one."""
    assert world.data is not None
    plain = CASES["2d"].module().eval()
    synced = copy.deepcopy(plain)
    SyncBatchNorm(synced, world.data)
    inputs = CASES["2d"].inputs()[world.rank :]  # of other sizes in each process
    return plain(inputs), synced(inputs)


def test_evaluation_is_each_process_own() -> None:
    """In evaluation mode running statistics are used, and no process waits."""
    for plain, synced in on_ranks(Layout(replicas=2), evaluated):
        assert torch.equal(plain, synced)

"""Products in fp8: which layers multiply so, how far gradients are from fp32's, and what does not change them."""

from __future__ import annotations

import dataclasses
import functools
import shutil
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from stoker.errors import BadJob
from stoker.jobs import AdamW, Job
from stoker.loading.batches import BatchSource
from stoker.loading.datasets import datasets_of
from stoker.records import LARGEST_GRADIENT_ERROR, Layout, Plan, Position
from stoker.stepping.fp8_linear import fp8_products, prepare_linears
from stoker.stepping.precision import require_precision
from stoker.stepping.step import Step
from stoker.stepping.world import ALONE, World
from stoker.testing.ranks import on_ranks
from stoker.zoo import Llama
from tests.stepping.driving import SEPARABLE, plan_of
from tests.stepping.models import make_job, texts

LAYERS = ["attention.query", "attention.out", "mlp.gate", "mlp.up", "mlp.down"]
"""Layers of a block that are wide enough; those of keys and values have 128 outputs."""


def llama_job(**changed: Any) -> Job:
    """Two blocks wide enough for fp8; a batch is 128 rows of each layer."""
    given = {"data": texts(32), "loss": "token_cross_entropy", "optimizer": AdamW(lr=1e-3), "numerics": ["fp8"]}
    model = functools.partial(Llama, layers=2, width=256, heads=4, kv_heads=2, hidden=512, context=8, vocab=96)
    return make_job(model, **{**given, **changed})


class Counting(TorchDispatchMode):
    """Counts products in fp8."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket is torch.ops.aten._scaled_mm
        return func(*args, **(kwargs or {}))


def gradients(step: Step) -> dict[str, torch.Tensor]:
    """Of the first batch."""
    data = datasets_of(step.job)
    pipeline = step.pipeline(data.train, augmented=True)
    split = step.world.split(step.coupling)
    source = BatchSource(data.train, pipeline, data.extent(step.job), step.job.seed, step.plan, split=split)
    step.forget_gradients()
    step.gradients(next(iter(source.batches(Position(), 1))), 0)
    found = {name: p.grad.clone() for name, p in step.model.named_parameters() if p.grad is not None}
    step.forget_gradients()
    return found


def under(world: World = ALONE, **plan: Any) -> dict[str, torch.Tensor]:
    """The gradients of `llama_job` under a plan of 16 samples at once, if not of fewer."""
    return gradients(Step(llama_job(), plan_of(**{"micro_batch": 16, **plan}), SEPARABLE, world=world))


def error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Relative to all of them together."""
    flat, exact = (torch.cat([one.reshape(-1).double() for one in each.values()]) for each in (found, expected))
    return float((flat - exact).norm() / exact.norm())


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Every bit."""
    assert found.keys() == expected.keys()
    assert all(torch.equal(one, expected[name]) for name, one in found.items())


def test_a_layer_multiplies_rounded_numbers() -> None:
    """Output and gradients are the products of numbers rounded to e4m3 and e5m2, to bf16's own rounding."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Sequential(nn.Linear(256, 512)), nn.Sequential(nn.Linear(256, 512))])
    prepare_linears(model)
    layer = model[0][0]
    x, grad = torch.randn(4, 8, 256, requires_grad=True), torch.randn(4, 8, 512).bfloat16()

    def rounded(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        scale = torch.finfo(dtype).max / tensor.abs().max().float()
        return (tensor.float() * scale).to(dtype).double() / scale

    with torch.autocast("cpu", torch.bfloat16), fp8_products():
        output = layer(x)
    output.backward(grad)
    x8, w8, g8 = (
        rounded(tensor.detach(), dtype)
        for tensor, dtype in (
            (x, torch.float8_e4m3fn),
            (layer.weight, torch.float8_e4m3fn),
            (grad, torch.float8_e5m2),
        )
    )
    expected = {
        "output": (output, x8 @ w8.T + layer.bias.bfloat16().double()),
        "of the input": (x.grad, g8 @ w8),
        "of the weight": (layer.weight.grad, g8.reshape(-1, 512).T @ x8.reshape(-1, 256)),
        "of the bias": (layer.bias.grad, grad.double().sum((0, 1))),
    }
    for name, (found, exact) in expected.items():
        assert found is not None
        difference, size = (float(one.detach().double().norm()) for one in (found - exact, exact))
        assert difference < 2**-8 * size, name
    assert (output.dtype, layer.weight.grad.dtype) == (torch.bfloat16, torch.float32)


def test_wide_layers_of_repeated_blocks_multiply_in_fp8_where_gradients_are_recorded() -> None:
    """Three products each; not the output layer, other rows, evaluation, other precisions, or proofs in float64."""

    def count(job: Job, plan: Plan, dtype: torch.dtype | None = None) -> int:
        step = Step(job, plan, SEPARABLE, dtype=dtype)
        with Counting() as counting:
            gradients(step)
        return counting.count

    job, in_fp8 = llama_job(), plan_of(16, precision="fp8")
    assert count(job, in_fp8) == 2 * len(LAYERS) * 3
    assert count(job, plan_of(4, precision="fp8")) == 4 * 2 * len(LAYERS) * 3
    assert count(job, plan_of(16, precision="bf16")) == 0
    assert count(job, in_fp8, torch.float64) == 0
    assert count(llama_job(batch=15), plan_of(15, precision="fp8")) == 0  # 120 rows
    step = Step(job, in_fp8, SEPARABLE)
    with step.evaluation() as measure, Counting() as counting:
        measure(texts(16), 16)
    assert counting.count == 0


def test_gradients_are_close_to_fp32s_and_recomputation_changes_no_bit() -> None:
    """A tenth of what is refused; further off than bf16's, or nothing was rounded."""
    exact, in_fp8 = under(), under(precision="fp8")
    assert 5 * error(under(precision="bf16"), exact) < error(in_fp8, exact) < LARGEST_GRADIENT_ERROR / 3
    assert_equal(under(precision="fp8", checkpointed_blocks=2), in_fp8)
    assert_equal(under(precision="fp8", checkpointed_blocks=2, checkpointing="selective"), in_fp8)


def test_a_step_changes_between_fp8_and_other_precisions() -> None:
    """With the bits of a step that was made so."""
    step = Step(llama_job(), plan_of(16, precision="bf16"), SEPARABLE)
    first = gradients(step)
    step.change_to(dataclasses.replace(step.plan, precision="fp8"))
    assert_equal(gradients(step), under(precision="fp8"))
    step.change_to(dataclasses.replace(step.plan, precision="bf16"))
    assert_equal(gradients(step), first)


def _over(world: World, layout: Layout) -> tuple[float, float, int]:
    """Errors of a process's gradients in fp8 and in bf16, against one process's in fp32; and products in fp8."""
    exact = under()
    with Counting() as counting:
        in_fp8 = _whole(under(world, precision="fp8", micro_batch=8, layout=layout))
    return error(in_fp8, exact), error(_whole(under(world, precision="bf16", layout=layout)), exact), counting.count


def _whole(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: one.full_tensor() if hasattr(one, "full_tensor") else one for name, one in found.items()}


@pytest.mark.parametrize("layout", [Layout(shards=2), Layout(replicas=2)], ids=["shards", "replicas"])
def test_processes_that_share_a_batch_round_as_one_does(layout: Layout) -> None:
    """Each scales by its own rows: other roundings, as close to fp32 as one process's."""
    alone = error(under(precision="fp8"), under())
    for in_fp8, in_bf16, count in on_ranks(layout, _over, layout):
        assert count == 2 * len(LAYERS) * 3
        assert 3 * in_bf16 < in_fp8 < 1.3 * alone


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++, as a compiled plan does")
def test_a_compiled_pass_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured by the compiler, forward and backward, and run by PyTorch's own kernels; with each checkpointing."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    expected = under(precision="fp8")
    for saving in ({}, {"checkpointed_blocks": 2}, {"checkpointed_blocks": 2, "checkpointing": "selective"}):
        step = Step(llama_job(), plan_of(16, precision="fp8", compile=True, **saving), SEPARABLE)
        assert error(gradients(step), expected) < 1e-2  # norms are computed otherwise
        assert step.compilation is not None
        assert step.compilation.problem is None
    torch._dynamo.reset()


def test_what_fp8_does_not_go_with_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that do not allow it, other layouts, offload, older GPUs, derivatives of gradients."""
    with pytest.raises(BadJob, match=r'precision fp8 is for jobs that allow it: Job\(numerics=\["fp8"\]\)'):
        Step(llama_job(numerics=[]), plan_of(16, precision="fp8"), SEPARABLE)
    for layout in (Layout(tensor=2), Layout(stages=2), Layout(experts=2), Layout(context=2)):
        with pytest.raises(ValueError, match="fp8 is for one process, replicas and shards so far, and the layout is"):
            plan_of(16, precision="fp8", layout=layout)
    with pytest.raises(
        ValueError, match="optimizer_offload is for fp32, tf32, bf16 and fp64, and the precision is fp8"
    ):
        Plan(device="cuda", micro_batch=16, precision="fp8", optimizer_offload="state")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(BadJob, match=r"cuda has compute capability 8\.0; fp8 came with 8\.9"):
        require_precision("fp8", torch.device("cuda"))
    model = nn.ModuleList([nn.Sequential(nn.Linear(256, 256)), nn.Sequential(nn.Linear(256, 256))])
    prepare_linears(model)
    x = torch.randn(16, 256, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16), fp8_products():
        loss = model[0](x).square().sum()
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        first.sum().backward()


def test_code_without_autocast_keeps_its_precision() -> None:
    """A block that computes a layer in fp32 under bf16 does so under fp8."""
    model = nn.ModuleList([nn.Sequential(nn.Linear(256, 256)), nn.Sequential(nn.Linear(256, 256))])
    prepare_linears(model)
    x = torch.randn(16, 256)
    with fp8_products(), Counting() as counting:
        assert model[0](x).dtype == torch.float32
    assert counting.count == 0

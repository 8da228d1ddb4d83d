"""Kernels that PyTorch has for GPUs alone: they compute what plain operations do on a CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from stoker.records import Layout, Plan
from stoker.records.device import Precision
from stoker.stepping.batch_norm import SyncBatchNorm
from stoker.stepping.fp8_linear import FP8_SINCE
from stoker.stepping.layouts.context_attention import _causal
from stoker.stepping.step import Step
from stoker.stepping.world import World
from stoker.testing.ranks import on_ranks
from stoker.testing.simulated_gpu import is_simulated
from tests.stepping.driving import SEPARABLE
from tests.stepping.layouts import test_sync_batch_norm as norms
from tests.stepping.test_fp8_linear import error, gradients, llama_job

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(is_simulated(), reason="its kernels are a CPU's")]


def normalised_on_a_gpu(world: World, dtype: torch.dtype) -> dict[str, dict[str, torch.Tensor]]:
    """What each case gives in this process: both have one GPU, and messages between CPUs."""
    assert world.data is not None
    found = {}
    for name, case in norms.CASES.items():
        module, first = case.module().to("cuda:0", torch.float32), sum(case.parts[: world.rank])
        own = (case.inputs() - 1e4)[first : first + case.parts[world.rank]]
        SyncBatchNorm(module, world.data).counts = bool(len(own))
        inputs = (own if len(own) else case.inputs()[:1] - 1e4).to("cuda:0", dtype)
        if inputs.dim() == 4 and name == "cumulative":
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        passed = norms.passed(module, inputs, counts=bool(len(own)))
        found[name] = {key: value.double().cpu() for key, value in passed.items() if value is not None}
    return found


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-5), (torch.bfloat16, 6e-2)])
def test_batch_norm_of_two_processes_by_fused_kernels(dtype: torch.dtype, limit: float) -> None:
    """Statistics, outputs and gradients, in both memory formats, where samples are few and where one has none."""
    found = on_ranks(Layout(replicas=2), normalised_on_a_gpu, dtype)
    for name, case in norms.CASES.items():
        expected = norms.passed(case.module(), case.inputs() - 1e4)
        for rank, own in enumerate(one[name] for one in found):
            first, count = sum(case.parts[:rank]), case.parts[rank]
            for part in ("output", "gradient"):
                wanted = expected[part][first : first + count]
                torch.testing.assert_close(own[part][:count], wanted, rtol=limit, atol=limit)
            for buffer in {"running_mean", "running_var"} & expected.keys():
                torch.testing.assert_close(own[buffer], expected[buffer], rtol=limit, atol=limit)


@pytest.mark.parametrize(("queries", "keys"), [(64, 64), (64, 256), (32, 96)])
def test_attention_of_the_last_tokens(queries: int, keys: int) -> None:
    """By a kernel that needs no mask: outputs and gradients are those with one."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, queries, 64), (2, 4, keys, 64), (2, 4, keys, 64)]
    exact = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)

    def passed(tensors: list[torch.Tensor], **named: torch.Tensor) -> list[torch.Tensor]:
        leaves = [one.clone().requires_grad_() for one in tensors]
        if named:
            out = F.scaled_dot_product_attention(*leaves, **named)
        else:
            out = _causal(F.scaled_dot_product_attention, *leaves, {})
        out.square().sum().backward()
        return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    wanted = passed(exact, attn_mask=mask)
    for found, one in zip(passed([one.to("cuda:0", torch.bfloat16) for one in exact]), wanted, strict=True):
        assert float((found.double().cpu() - one).norm() / one.norm()) < 2e-2


@pytest.mark.parametrize("compiled", [False, True])
def test_products_in_fp8(compiled: bool) -> None:
    """Gradients are nearer to the CPU's of fp8 than to those of fp32, and further from these than bf16's."""
    if torch.cuda.get_device_capability(0) < FP8_SINCE:
        pytest.skip("this GPU does not multiply in fp8")

    def under(device: str, precision: Precision, *, is_compiled: bool = False) -> dict[str, torch.Tensor]:
        step = Step(
            llama_job(), Plan(device=device, precision=precision, micro_batch=16, compile=is_compiled), SEPARABLE
        )
        return {name: one.cpu() for name, one in gradients(step).items()}

    found, here = under("cuda:0", "fp8", is_compiled=compiled), under("cpu", "fp8")
    bf16, exact = under("cuda:0", "bf16"), under("cpu", "fp32")
    assert 0 < error(found, here) < error(found, exact) < 0.1
    assert error(bf16, exact) < 0.5 * error(found, exact)

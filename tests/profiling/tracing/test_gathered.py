"""Traces of parameters gathered in bf16 from fp32 masters, and of operations that are one kernel on a GPU only."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from stoker.errors import BadJob
from stoker.profiling.tracing.session import trace_step
from stoker.records import Trace, TraceSettings
from tests.profiling.tracing.jobs import traced

CUDA = TraceSettings(target="cuda", capability="9.0", micro_batch=4)


def state_bytes(trace: Trace) -> dict[str, int]:
    """Bytes kept from update to update, by category."""
    kept = ("parameter", "gradient", "optimizer state", "buffer")
    return {what: sum(one.num_bytes for one in trace.storages if one.category == what) for what in kept}


def test_masters_gradients_and_moments_are_fp32_as_under_autocast() -> None:
    """What is kept has the same size; only what a pass uses is bf16."""
    gathered, autocast = (traced("gpt", "cuda", precision="bf16", gathered_in=one) for one in ("bf16", None))
    assert state_bytes(gathered) == state_bytes(autocast)


def test_gathered_weights_are_neither_cast_nor_is_the_residual_stream_fp32() -> None:
    """Autocast casts each weight and keeps its copy; the passes of gathered parameters have products in bf16 alone."""
    gathered, autocast = (traced("gpt", "cuda", precision="bf16", gathered_in=one) for one in ("bf16", None))

    def casts_of_weights(trace: Trace) -> int:
        shapes = {(96, 32), (32, 32), (128, 32), (32, 128)}
        return sum(
            trace.operations[one.operation].name == "_to_copy"
            and trace.operations[one.operation].inputs[0].shape in shapes
            for one in trace.occurrences
            if one.phase == "forward"
        )

    assert casts_of_weights(autocast) > 0 == casts_of_weights(gathered)
    products = [gathered.operations[one.operation] for one in gathered.occurrences if one.phase == "forward"]
    assert {tensor.dtype for one in products if one.name in ("mm", "addmm") for tensor in one.inputs} == {"bf16"}
    norms = [one for one in products if one.name == "native_layer_norm"]
    assert {one.inputs[0].dtype for one in norms} == {"bf16"}

    def activations(trace: Trace) -> int:
        return sum(one.num_bytes for one in trace.storages if one.category == "activation")

    assert activations(gathered) < activations(autocast)


def test_the_optimiser_works_on_fp32() -> None:
    """All its tensors, with as many bytes as under autocast."""
    gathered, autocast = (traced("gpt", "cuda", precision="bf16", gathered_in=one) for one in ("bf16", None))
    steps = [
        {
            one.operation: trace.operations[one.operation] for one in trace.occurrences if one.phase == "optimizer"
        }.values()
        for trace in (gathered, autocast)
    ]
    assert not any(tensor.dtype == "bf16" for one in steps[0] for tensor in (*one.inputs, *one.outputs))
    moved = [sum(one.bytes_read + one.bytes_written for one in found) for found in steps]
    assert moved[0] == pytest.approx(moved[1], rel=0.02)


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (F.silu, ["silu", "silu_backward"]),
        (F.mish, ["mish", "mish_backward"]),
        (lambda x: F.rms_norm(x, (64,)), ["_fused_rms_norm", "_fused_rms_norm_backward"]),
    ],
)
def test_what_is_one_kernel_on_a_gpu_is_one_operation(function, names: list[str]) -> None:
    """Builds for CPUs have no CUDA kernel of them, for which PyTorch would write them as up to ten operations."""
    layer = nn.Linear(64, 64)

    def step(batch: torch.Tensor) -> None:
        layer.zero_grad()
        function(layer(batch)).sum().backward()

    trace = trace_step(step, torch.randn(4, 64), CUDA)
    made = [trace.operations[one.operation].name for one in trace.occurrences]
    assert [name for name in made if name not in ("addmm", "mm", "sum", "ones_like")] == names


def test_rms_norm_of_another_dtype_than_its_weight_is_written_out() -> None:
    """As PyTorch does on a GPU."""
    weight = nn.Parameter(torch.ones(64))

    def step(batch: torch.Tensor) -> None:
        weight.grad = None
        F.rms_norm(batch, (64,), weight).sum().backward()

    trace = trace_step(step, torch.randn(4, 64, dtype=torch.bfloat16), CUDA)
    names = {trace.operations[one.operation].name for one in trace.occurrences}
    assert "_fused_rms_norm" not in names
    assert "rsqrt" in names


@pytest.mark.parametrize("name", ["product", "attention", "convolution"])
def test_operands_of_several_dtypes_are_refused_as_by_kernels(name: str) -> None:
    """Fakes of some do not look at dtypes."""
    functions = {
        "product": lambda x: x @ torch.ones(64, 64, dtype=torch.bfloat16, device=x.device),
        "attention": lambda x: F.scaled_dot_product_attention(*[x[None, None]] * 2, x[None, None].bfloat16()),
        "convolution": lambda x: F.conv1d(x[None], torch.ones(4, 4, 1, dtype=torch.bfloat16, device=x.device)),
    }
    layer = nn.Linear(64, 64)

    def step(batch: torch.Tensor) -> None:
        functions[name](layer(batch)).sum().backward()

    with pytest.raises(BadJob, match="dtype"):
        trace_step(step, torch.randn(4, 64), CUDA)

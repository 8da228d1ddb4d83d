"""What compiling makes of a trace: kernels joined, and storages that are not made."""

from __future__ import annotations

import dataclasses

import pytest

from stoker.planning.model.compiled_graphs import compiled_storages, kernel_shares
from stoker.records import Occurrence, Operation, Storage, TensorShape, Trace, TraceSettings

ROWS = 1000
WIDE = TensorShape(shape=(ROWS, 100), dtype="bf16")
IN_FULL = TensorShape(shape=(ROWS, 100), dtype="fp32")
WEIGHT = TensorShape(shape=(100, 100), dtype="bf16")
BF16, FP32 = 2 * WIDE.numel, 4 * WIDE.numel


def operation(name: str, inputs: tuple[TensorShape, ...], output: TensorShape, *, num_outside: int = 0) -> Operation:
    """One that reads and writes each tensor once."""
    size = {"bf16": 2, "fp32": 4}
    read = sum(size[one.dtype] * one.numel for one in inputs)
    return Operation(
        name=name,
        inputs=inputs,
        outputs=(output,),
        flops=0,
        bytes_read=read,
        bytes_written=size[output.dtype] * output.numel,
        attributes=(("num_outside", num_outside),) if num_outside else (),
    )


PRODUCT = operation("mm", (WIDE, WEIGHT), WIDE)
TO_FULL = operation("_to_copy", (WIDE,), IN_FULL)
NORM = operation("native_layer_norm", (IN_FULL,), IN_FULL)
TO_BF16 = operation("_to_copy", (IN_FULL,), WIDE)
SILU = operation("silu", (WIDE,), WIDE)
GATED = operation("mul", (WIDE, WIDE), WIDE)


def trace_of(*made: tuple[Operation, int, str, int | None], target: str = "cuda") -> Trace:
    """Forward operations, each with the size, category and death of what it makes; a backward product at the end."""
    occurrences = [
        Occurrence(operation=index, phase="forward", part=0, module=0, source=0) for index in range(len(made))
    ]
    occurrences.append(Occurrence(operation=len(made), phase="backward", part=0, module=0, source=0))
    storages = tuple(
        Storage(num_bytes=size, category=category, born=index, died=died)  # type: ignore[arg-type]
        for index, (_, size, category, died) in enumerate(made)
    )
    return Trace(
        settings=TraceSettings(target=target, capability="9.0", micro_batch=1),  # type: ignore[arg-type]
        operations=(*(one for one, *_ in made), PRODUCT),
        occurrences=tuple(occurrences),
        storages=storages,
        events=(),
        modules=("",),
        sources=("",),
    )


NORMED = trace_of(
    (PRODUCT, BF16, "activation", 5),
    (TO_FULL, FP32, "temporary", 2),
    (NORM, FP32, "temporary", 3),
    (TO_BF16, BF16, "activation", 5),
    (PRODUCT, BF16, "activation", 5),
)
EACH_S = [1.0, 6.0, 8.0, 6.0, 1.0, 1.0]


def by_bytes(num_bytes: float) -> float:
    """A second for each element of two bytes."""
    return num_bytes / BF16


def test_a_norm_with_its_casts_is_one_kernel_that_reads_and_writes_once() -> None:
    """Two passes of bf16 in place of ten: what is made in fp32 never leaves the chain. Products stay as they are."""
    shares = kernel_shares(NORMED, EACH_S, by_bytes)
    assert [left for left, _ in shares] == [1.0, *[pytest.approx(2 / 20)] * 3, 1.0, 1.0]
    assert sum(kernels for _, kernels in shares) == pytest.approx(4)


def test_on_a_cpu_only_elementwise_operations_join() -> None:
    """The norm stands between two casts, which are alone then and take as long as before."""
    assert [left for left, _ in kernel_shares(NORMED, EACH_S)] == [1.0] * 6


def test_what_outlives_a_chain_is_written() -> None:
    """The norm's result is kept for the backward pass: four bytes for each element more."""
    (_, (left, _), *_) = kernel_shares(_kept(NORMED, 2), EACH_S, by_bytes)
    assert left == pytest.approx((2 + 2) / 20)


def test_what_is_computed_again_is_not_written() -> None:
    """The norm's result would outlive the chain, but compiled code computes it from what is kept anyway."""
    kept = _kept(NORMED, 2)
    storages = list(kept.storages)
    storages[2] = dataclasses.replace(storages[2], compiled_share=0.0)
    (_, (left, _), *_) = kernel_shares(dataclasses.replace(kept, storages=tuple(storages)), EACH_S, by_bytes)
    assert left == pytest.approx(2 / 20)


def test_what_was_widened_is_kept_in_half_precision() -> None:
    """Two bytes for each element, or none where the original is kept anyway; a kept gradient is written whole."""
    kept = _kept(NORMED, 1)
    (_, (left, _), *_) = kernel_shares(kept, EACH_S, by_bytes)
    assert left == pytest.approx(2 / 20)  # the product's result lives on, too
    lost = _kept(kept, 0, died=1)
    (_, (left, _), *_) = kernel_shares(lost, EACH_S, by_bytes)
    assert left == pytest.approx((2 + 1) / 20)


def _kept(trace: Trace, number: int, died: int = 5) -> Trace:
    """The trace with another death of a storage."""
    storages = list(trace.storages)
    storages[number] = dataclasses.replace(storages[number], died=died)
    return dataclasses.replace(trace, storages=tuple(storages))


def in_modules(trace: Trace, *names: str) -> Trace:
    """The trace with its occurrences in these modules, `layer.experts` of which exchanges messages."""
    occurrences = tuple(
        dataclasses.replace(one, module=number) for number, one in enumerate(trace.occurrences[: len(names)])
    )
    modules = (*names, "")
    rest = tuple(dataclasses.replace(one, module=len(names)) for one in trace.occurrences[len(names) :])
    return dataclasses.replace(
        trace, occurrences=(*occurrences, *rest), modules=modules, exchanging=("layer.experts", "other.experts")
    )


def test_no_chain_goes_through_an_exchange() -> None:
    """Within a part around it or the experts chains are as ever; the block's own code runs as it is."""
    within = in_modules(NORMED, "layer.norm", "layer.norm.cast", "layer.norm.rows", "layer.norm", "layer.gate")
    assert kernel_shares(within, EACH_S, by_bytes) == kernel_shares(NORMED, EACH_S, by_bytes)
    across = in_modules(NORMED, "layer.attention", "layer.attention", "layer.norm", "layer.experts", "layer.gate")
    assert sum(kernels for _, kernels in kernel_shares(across, EACH_S, by_bytes)) == pytest.approx(6)
    between = in_modules(NORMED, "layer", "layer", "layer", "layer", "layer")
    assert kernel_shares(between, EACH_S, by_bytes) == [(1.0, 1.0)] * 6
    loss = in_modules(NORMED, "layer.gate")  # the casts and the norm have no module
    assert kernel_shares(loss, EACH_S, by_bytes) == kernel_shares(NORMED, EACH_S, by_bytes)


def test_what_code_around_an_exchange_makes_is_kept() -> None:
    """It is not compiled, and computes nothing again; a norm before the experts is."""
    storages = tuple(
        dataclasses.replace(one, compiled_share=0.0, category="activation", died=5) for one in NORMED.storages
    )
    trace = in_modules(dataclasses.replace(NORMED, storages=storages), "layer", "layer", "layer.norm")
    assert [one.num_bytes for one in compiled_storages(trace).storages] == [BF16, FP32, 0, 0, 0]


def test_what_compiled_code_computes_again_takes_no_memory() -> None:
    """Nor does what stays within a kernel; what is kept in the stead of another storage takes its share of that one."""
    traced = trace_of(
        (PRODUCT, BF16, "activation", 5),
        (TO_FULL, FP32, "activation", 5),
        (NORM, FP32, "temporary", 3),
        (TO_BF16, BF16, "activation", 5),
        (PRODUCT, BF16, "temporary", 5),
    )
    shares = (1.0, 0.5, 1.0, 0.0, 1.0)
    storages = tuple(
        dataclasses.replace(one, compiled_share=share) for one, share in zip(traced.storages, shares, strict=True)
    )
    compiled = compiled_storages(dataclasses.replace(traced, storages=storages))
    assert [one.num_bytes for one in compiled.storages] == [BF16, FP32 // 2, 0, 0, BF16]


def backward_of(*made: tuple[Operation, int, str, int | None]) -> Trace:
    """The operations of `trace_of` in the backward pass."""
    trace = trace_of(*made)
    return dataclasses.replace(
        trace, occurrences=tuple(dataclasses.replace(one, phase="backward") for one in trace.occurrences)
    )


def test_a_batch_norms_gradient_reads_again_all_that_entered_its_kernel() -> None:
    """Its sums over the batch end one kernel; the next reads gradient, ReLU's result and image again: seven passes."""
    relu = operation("threshold_backward", (WIDE, WIDE), WIDE)
    norm = operation("native_batch_norm_backward", (WIDE, WIDE), WIDE)
    backward = backward_of((PRODUCT, BF16, "temporary", 1), (relu, BF16, "temporary", 2), (norm, BF16, "temporary", 3))
    (_, (left, _), (same, _), _) = kernel_shares(backward, [1.0, 10.0, 10.0, 1.0], by_bytes)
    assert left == same == pytest.approx(7 / 20)


def test_a_residual_of_the_shape_of_what_the_chain_made_comes_from_memory() -> None:
    """The norm's image and the residual are read, the sum is written; the ReLU takes what was just made."""
    norm = operation("native_layer_norm", (WIDE,), WIDE)
    added, relu = operation("add", (WIDE, WIDE), WIDE, num_outside=1), operation("relu", (WIDE,), WIDE)
    trace = trace_of(
        (PRODUCT, BF16, "temporary", 1),
        (norm, BF16, "temporary", 2),
        (added, BF16, "temporary", 3),
        (relu, BF16, "activation", 5),
        (PRODUCT, BF16, "activation", 5),
    )
    (_, (left, _), *_) = kernel_shares(trace, [1.0, 10.0, 10.0, 10.0, 1.0, 1.0], by_bytes)
    assert left == pytest.approx(3 / 30)


def test_what_a_chain_has_read_is_not_read_again() -> None:
    """A written-out GELU takes its input three times."""
    halved, cubed = operation("mul", (WIDE,), WIDE), operation("pow", (WIDE,), WIDE)
    added, both = operation("add", (WIDE, WIDE), WIDE), operation("mul", (WIDE, WIDE), WIDE)
    trace = trace_of(
        (PRODUCT, BF16, "temporary", 3),
        (halved, BF16, "temporary", 4),
        (cubed, BF16, "temporary", 3),
        (added, BF16, "temporary", 4),
        (both, BF16, "activation", 5),
    )
    (_, (left, _), *_) = kernel_shares(trace, [1.0, 10.0, 10.0, 10.0, 10.0, 1.0], by_bytes)
    assert left == pytest.approx(2 / 40)


def test_logarithms_of_a_loss_are_not_written() -> None:
    """The backward pass computes them from the logits again; without the loss next to them they are kept."""
    softmax = operation("_log_softmax", (WIDE,), IN_FULL)
    targets = TensorShape(shape=(ROWS,), dtype="int64")
    loss = Operation(
        name="nll_loss_forward", inputs=(IN_FULL, targets), outputs=(), flops=0, bytes_read=0, bytes_written=4
    )
    whole = trace_of((PRODUCT, BF16, "activation", 3), (softmax, FP32, "activation", 3), (loss, 0, "temporary", 2))
    alone = trace_of((PRODUCT, BF16, "activation", 3), (softmax, FP32, "activation", 3))
    assert kernel_shares(whole, [1.0, 10.0, 0.0, 1.0], by_bytes)[1][0] == pytest.approx(1 / 10)
    assert kernel_shares(alone, [1.0, 10.0, 1.0], by_bytes)[1][0] == pytest.approx(3 / 10)


def test_a_copy_that_a_pass_has_made_before_is_not_made_again() -> None:
    """Of the casts that three layers make of one input under autocast, compiled code makes one, kept once."""
    again = dataclasses.replace(TO_BF16, attributes=(("is_again", True),))
    cast_twice = trace_of(
        (TO_BF16, BF16, "activation", 5),
        (PRODUCT, BF16, "activation", 5),
        (again, BF16, "activation", 5),
        (PRODUCT, BF16, "activation", 5),
    )
    shares = [left for left, _ in kernel_shares(cast_twice, [6.0, 1.0, 6.0, 1.0, 1.0], by_bytes)]
    assert shares == [pytest.approx(3 / 6), 1.0, 0.0, 1.0, 1.0]
    assert [one.num_bytes for one in compiled_storages(cast_twice).storages][2] == 0


def test_gradients_are_widened_by_what_adds_them_unless_they_are_kept() -> None:
    """A cast alone between products costs nothing; of a weight's gradient it is what the optimiser reads."""
    for category, expected in (("temporary", 0.0), ("gradient", 0.5)):
        widened = backward_of((PRODUCT, BF16, "temporary", 1), (TO_FULL, FP32, category, 3))
        (_, (left, _), _) = kernel_shares(widened, [1.0, 6.0, 1.0], by_bytes)
        assert left == pytest.approx(expected)


def test_logits_in_full_precision_are_neither_written_nor_read() -> None:
    """Python holds them after the loss, but the loss and its gradient compute them from the layer's own again."""
    loss = operation("nll_loss_forward", (IN_FULL,), TensorShape(shape=(), dtype="fp32"))
    softmax = operation("_log_softmax", (IN_FULL,), IN_FULL)
    forward = trace_of(
        (PRODUCT, BF16, "activation", 5),
        (TO_FULL, FP32, "activation", None),
        (softmax, FP32, "activation", 5),
        (dataclasses.replace(loss, bytes_read=0), 0, "temporary", 4),
    )
    (_, (left, _), *_) = kernel_shares(forward, [1.0, 10.0, 10.0, 0.0, 1.0], by_bytes)
    assert left == pytest.approx(1 / 20)
    gradient = operation("_log_softmax_backward_data", (IN_FULL, IN_FULL), IN_FULL)
    for last, passes in ((TO_BF16, 2 + 1 + 1), (NORM, 2 + 2 + 2)):  # the gradient given, the logits, the result
        size = 2 * last.outputs[0].numel * (1 if last is TO_BF16 else 2)
        backward = backward_of(
            (PRODUCT, BF16, "temporary", 1), (gradient, FP32, "temporary", 2), (last, size, "temporary", 3)
        )
        (_, (left, _), *_) = kernel_shares(backward, [1.0, 10.0, 10.0, 1.0], by_bytes)
        assert left == pytest.approx(passes / 20)

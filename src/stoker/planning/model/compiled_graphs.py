"""What `torch.compile` makes of a trace: which operations become one kernel, and how much of their time is left.

Inductor writes a chain of operations that go over the same elements, or the same rows, into one kernel: elementwise
operations, casts, norms, softmaxes, losses and reductions. Its time is that of the bytes that enter or leave the chain;
what is made and used within it never crosses memory. Matrix products, convolutions and fused attention end a chain.

A trace has no graph, so that what a chain reads is inferred from shapes and dtypes, and for several inputs of one shape
from what the tracer noted (`_Entering`). A result that outlives the chain is written.

Where modules exchange messages within their pass (`Trace.exchanging`), what is around them is compiled in parts: no
chain goes on from one into another, and the code between them runs as it is.

On a CPU only elementwise operations are joined, and a chain takes as long as the longest of its operations: loops over
rows are not kept in registers there.

Source: J. Ansel et al., "PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode Transformation and Graph
Compilation", ASPLOS 2024, section 4.4 (fusion of pointwise and reduction nodes); the rule by shapes is ours.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence

from stoker.imports import collector_paused
from stoker.records.trace import Operation, Storage, TensorShape, Trace

_CHAINED = frozenset(
    {
        "abs",
        "add",
        "addcdiv",
        "addcmul",
        "bitwise_and",
        "bitwise_not",
        "bitwise_or",
        "ceil",
        "clamp",
        "clamp_max",
        "clamp_min",
        "clone",
        "copy",
        "cos",
        "div",
        "eq",
        "erf",
        "exp",
        "floor",
        "ge",
        "gelu",
        "gelu_backward",
        "gt",
        "hardswish",
        "hardswish_backward",
        "hardtanh",
        "hardtanh_backward",
        "leaky_relu",
        "log",
        "le",
        "logical_and",
        "logical_not",
        "logical_or",
        "lt",
        "masked_fill",
        "maximum",
        "minimum",
        "mul",
        "native_dropout",
        "native_dropout_backward",
        "ne",
        "neg",
        "pow",
        "reciprocal",
        "relu",
        "rsqrt",
        "rsub",
        "sigmoid",
        "sigmoid_backward",
        "silu",
        "silu_backward",
        "sin",
        "sqrt",
        "sub",
        "tanh",
        "tanh_backward",
        "threshold_backward",
        "to_copy",
        "where",
        "fill",
        "zero",
    }
)
"""Operations without a trailing or leading underscore that Inductor writes into the kernel of a neighbour."""

_OVER_ROWS = frozenset(
    {
        "native_layer_norm",
        "native_layer_norm_backward",
        "fused_rms_norm",
        "fused_rms_norm_backward",
        "softmax",
        "log_softmax",
        "softmax_backward_data",
        "log_softmax_backward_data",
        "nll_loss_forward",
        "nll_loss_backward",
        "sum",
        "mean",
        "amax",
        "amin",
        "var_mean",
        "cat",
        "stack",
        "slice_backward",
        "select_backward",
        "arange",
        "new_zeros",
        "zeros_like",
        "zeros",
        "full",
        "ones_like",
        "scalar_tensor",
        "empty_like",
        "empty",
        "new_empty",
        "silu_",
        "new_ones",
        "full_like",
        "native_batch_norm",
        "native_batch_norm_backward",
        "cudnn_batch_norm",
        "cudnn_batch_norm_backward",
    }
)
"""More of them on a GPU: reductions over rows, joins, and tensors that are made of nothing."""

Seconds = Callable[[float], float]
"""Time of a kernel that moves so many bytes [s]."""

_BATCH_NORMS = ("batch_norm",)
"""Reductions over the batch, which end before their results can be used: a second kernel reads all that the first one
did. Source: the decompositions of `native_batch_norm` and its gradient in torch/_decomp/decompositions.py, sums over
batch and pixels before anything that is as large as the tensor."""
_LOSS, _OF_LOGITS = "nll_loss_forward", ("log_softmax", "to_copy")
"""Where a chain has the first, neither logarithms of probabilities are written nor logits in full precision: the
backward pass computes them from the logits as their layer gave them."""
_SCALE_PASSES = 1
"""More passes over a tensor whose largest magnitude scales it to fp8, for the same reason."""


def chains_of(trace: Trace, *, is_on_gpu: bool) -> list[tuple[list[int], float]]:
    """The chains of occurrences that become one kernel each, and on a GPU the bytes that the kernel moves."""
    if not is_on_gpu:
        return [(chain, 0.0) for chain in _chains(trace, _CHAINED)]
    made = _births(trace)
    return [(chain, _bytes_across(trace, chain, made)) for chain in _chains(trace, _CHAINED | _OVER_ROWS)]


def kernel_shares(
    trace: Trace,
    seconds: Sequence[float],
    moving: Seconds | None = None,
    chains: Sequence[tuple[Sequence[int], float]] | None = None,
) -> list[tuple[float, float]]:
    """For each occurrence, the share of its time that compiling leaves, and its share of a kernel launch.

    Args:
        trace: of an update.
        seconds: time of each of `trace.operations` [s].
        moving: time of a kernel by the bytes it moves, on a GPU; None: a CPU.
        chains: those of the trace, which are the same on all GPUs, if they are known.
    """
    shares = [(1.0, 1.0)] * len(trace.occurrences)
    for chain, num_bytes in chains_of(trace, is_on_gpu=moving is not None) if chains is None else chains:
        each = [seconds[trace.occurrences[index].operation] for index in chain]
        total = sum(each)
        if moving is None:
            left = max(each) / total if total > 0 else 1.0
        else:
            left = min(1.0, moving(num_bytes) / total) if total > 0 else 1.0
        for index in chain:
            shares[index] = (left, 1 / len(chain))
    return shares


def _chains(trace: Trace, joined: frozenset[str]) -> Iterator[list[int]]:
    """Runs of such operations that follow each other within a phase of a micro-batch, and a compiled part."""
    chain: list[int] = []
    where, parts = None, _compiled_parts(trace)
    for index, one in enumerate(trace.occurrences):
        is_chained = one.phase != "optimizer" and trace.operations[one.operation].name.strip("_") in joined
        place = one.phase, one.part, parts[one.module]
        if chain and (not is_chained or place != where):
            yield chain
            chain = []
        if is_chained and place[-1] is not None:
            chain.append(index)
            where = place
    if chain:
        yield chain


def _compiled_parts(trace: Trace) -> list[str | None]:
    """For each module of a trace the compiled part it is in; None where it runs as it is.

    What has no module is the loss, a part of its own.
    """
    around = {levels[:depth] for levels in map(_levels, trace.exchanging) for depth in range(len(levels))}

    def part_of(module: str) -> str | None:
        levels = _levels(module)
        outermost = (levels[:depth] for depth in range(len(levels) + 1) if levels[:depth] not in around)
        return ".".join(next(outermost, ())) or (None if module and around else "")

    return list(map(part_of, trace.modules))


def _levels(module: str) -> tuple[str, ...]:
    return tuple(module.split(".")) if module else ()


def _bytes_across(trace: Trace, chain: Sequence[int], births: dict[int, list[int]]) -> float:
    """Bytes that enter or leave a chain of occurrences."""
    if _is_widening(trace, chain, births):
        return 0.0
    entering = _Entering()
    written, again, end = 0.0, 0.0, chain[-1]
    operations = [trace.operations[trace.occurrences[index].operation] for index in chain]
    names = [operation.name.strip("_") for operation in operations]
    for index, name, operation in zip(chain, names, operations, strict=True):
        if operation.attribute("is_again") is True:
            entering.know(operation)
            continue
        entering.note(operation)
        if name not in _OF_LOGITS or _LOSS not in names:
            made = [trace.storages[storage] for storage in births.get(index, ()) if _outlives(trace, storage, end)]
            kept = [one for one in made if one.compiled_share]  # the others are computed again
            size = sum(one.num_bytes for one in kept)
            if _widens(operation) and all(one.category != "gradient" for one in kept):
                # What is kept is the original, if it is not kept anyway.
                size = 0 if any(_outlives(trace, one, end) for one in births.get(index - 1, ())) else size // 2
            written += size
        if name == "log_softmax_backward_data" and _is_narrowed(operation.outputs[0], operations):
            again -= operation.inputs[1].numel * _bytes_each(operation) / 2
        if any(word in name for word in _BATCH_NORMS):
            again += entering.num_bytes
        elif name == "amax" and operation.outputs[0].numel == 1:
            again += _SCALE_PASSES * operation.inputs[0].numel * _bytes_each(operation)
    return entering.num_bytes + again + written


_HALVES = ("bf16", "fp16")


def _is_narrowed(tensor: TensorShape, operations: Sequence[Operation]) -> bool:
    """Whether one of the operations copies a tensor of this shape into half precision."""
    copies = (one.outputs[0] for one in operations if one.name.strip("_") == "to_copy")
    return any(copy.shape == tensor.shape and copy.dtype in _HALVES for copy in copies)


def _is_widening(trace: Trace, chain: Sequence[int], births: dict[int, list[int]]) -> bool:
    """Whether a chain only copies from half to full precision what is used within its pass.

    Whatever reads the copies reads the originals in their place, and widens them in registers.
    """
    return all(
        _widens(trace.operations[trace.occurrences[index].operation])
        and all(trace.storages[storage].category == "temporary" for storage in births.get(index, ()))
        for index in chain
    )


def _widens(operation: Operation) -> bool:
    """Whether an operation copies from half to full precision."""
    is_copy = operation.name.strip("_") == "to_copy"
    return is_copy and operation.inputs[0].dtype in _HALVES and operation.outputs[0].dtype == "fp32"


def _outlives(trace: Trace, storage: int, end: int) -> bool:
    """Whether a storage lives on after an occurrence."""
    died = trace.storages[storage].died
    return died is None or died > end


def _bytes_each(operation: Operation) -> float:
    """Bytes read of each element of the inputs: broadcast tensors count once, whatever their dtype."""
    return operation.bytes_read / (sum(tensor.numel for tensor in operation.inputs) or 1)


class _Entering:
    """Bytes that a chain reads from memory.

    A shape that the chain has read or made comes from there. Of several inputs of one shape the trace says how many do
    not. Of a gradient all inputs but the first were kept by the forward pass.
    """

    def __init__(self) -> None:
        self.num_bytes = 0.0
        self._known: set[TensorShape] = set()

    def note(self, operation: Operation) -> None:
        """Count an operation's inputs, and remember its results."""
        each, num_outside = _bytes_each(operation), operation.attribute("num_outside", 0)
        assert isinstance(num_outside, int), "the tracer counts them"
        is_gradient = operation.name.strip("_").endswith(("backward", "backward_data"))
        for tensor, times in Counter(operation.inputs).items():
            if is_gradient:
                entering = times - (tensor == operation.inputs[0] and tensor in self._known)
            else:
                entering = min(times, num_outside) if times > 1 else tensor not in self._known
            self.num_bytes += entering * tensor.numel * each
        self.know(operation)

    def know(self, operation: Operation) -> None:
        """Remember an operation's inputs and results, which are in registers from here on."""
        self._known.update(operation.inputs, operation.outputs)


@collector_paused()
def compiled_storages(trace: Trace) -> Trace:
    """The trace of a GPU with the storages that compiled code makes: what stays within a kernel takes no memory.

    What the backward pass reads takes its `compiled_share`, which the tracer knows for blocks compiled as one; what is
    made between the parts of a block, by code that runs as it is, is kept.
    """
    made, parts = _births(trace), _compiled_parts(trace)

    def is_compiled(storage: Storage) -> bool:
        return storage.born < 0 or parts[trace.occurrences[storage.born].module] is not None

    sizes = [
        math.ceil(storage.num_bytes * (storage.compiled_share if is_compiled(storage) else 1.0))
        for storage in trace.storages
    ]
    for chain in _chains(trace, _CHAINED | _OVER_ROWS):
        for index in (index for place in chain for index in made.get(place, ())):
            storage = trace.storages[index]
            made_by = trace.operations[trace.occurrences[storage.born].operation]
            is_within = not _outlives(trace, index, chain[-1]) and storage.category == "temporary"
            if is_within or made_by.attribute("is_again") is True:
                sizes[index] = 0
    storages = tuple(
        one if one.num_bytes == size else dataclasses.replace(one, num_bytes=size)
        for one, size in zip(trace.storages, sizes, strict=True)
    )
    return dataclasses.replace(trace, storages=storages)


def _births(trace: Trace) -> dict[int, list[int]]:
    """Storages by the occurrence that makes them."""
    made: defaultdict[int, list[int]] = defaultdict(list)
    for index, storage in enumerate(trace.storages):
        if storage.born >= 0:
            made[storage.born].append(index)
    return made

"""What compiling saves: chains of elementwise operations become one kernel each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stoker.records.trace import Trace

_CHAINED = frozenset({
    "abs", "add", "addcdiv", "addcmul", "bitwise_and", "bitwise_not", "bitwise_or", "ceil", "clamp", "clamp_max",
    "clamp_min", "clone", "copy", "cos", "div", "eq", "erf", "exp", "floor", "ge", "gelu", "gelu_backward", "gt",
    "hardswish", "hardswish_backward", "hardtanh", "hardtanh_backward", "leaky_relu", "log", "le", "logical_and",
    "logical_not", "logical_or", "lt", "masked_fill", "maximum", "minimum", "mul", "native_dropout",
    "native_dropout_backward", "ne", "neg", "pow", "reciprocal", "relu", "rsqrt", "rsub", "sigmoid",
    "sigmoid_backward", "silu", "silu_backward", "sin", "sqrt", "sub", "tanh", "tanh_backward",
    "threshold_backward", "to_copy", "where", "fill", "zero",
})  # fmt: skip
"""Operations without a trailing or leading underscore that Inductor writes into the kernel of a neighbour."""


def kernel_shares(trace: Trace, seconds: Sequence[float]) -> list[tuple[float, float]]:
    """For each occurrence, the share of its own time that is left, and of a kernel that has to be started for it.

    A chain reads its inputs and writes its result once: it takes as long as the longest of its operations.

    Args:
        trace: of an update.
        seconds: time of each of `trace.operations` [s].
    """
    shares = [(1.0, 1.0)] * len(trace.occurrences)
    for chain in _chains(trace):
        each = [seconds[trace.occurrences[index].operation] for index in chain]
        left = max(each) / sum(each) if sum(each) > 0 else 1.0
        for index in chain:
            shares[index] = (left, 1 / len(chain))
    return shares


def _chains(trace: Trace) -> Iterator[list[int]]:
    """Runs of such operations that follow each other within a phase of a micro-batch."""
    chain: list[int] = []
    where = None
    for index, one in enumerate(trace.occurrences):
        is_chained = trace.operations[one.operation].name.strip("_") in _CHAINED
        if chain and (not is_chained or (one.phase, one.part) != where):
            yield chain
            chain = []
        if is_chained:
            chain.append(index)
            where = one.phase, one.part
    if chain:
        yield chain

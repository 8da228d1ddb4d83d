"""Context: processes hold parts of each sample's tokens, and shards of the model.

What a model does to each token by itself is divided; attention gathers keys and values of all tokens, which each
process keeps until their gradients are made (A. Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.2). Queries are
exchanged so that each process computes the same part of causal attention. The state is sharded as over `shards`, over
both together, so that messages of parameters are between all processes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal

from stoker.layouts.base import DividedUpdate, LayoutAxis, Seconds, Traffic
from stoker.layouts.rules import JobTraits
from stoker.layouts.shards import AXIS as SHARDS
from stoker.layouts.shards import shard_dim
from stoker.layouts.trace_division import (
    PRODUCTS,
    bytes_of,
    divided_product,
    scaled,
    with_dim,
    with_operations,
    with_output_shares,
)
from stoker.records import Layout, Occurrence, Operation, Storage, TensorShape, Trace
from stoker.records.profile import ModelParts, Parameter

_ATTENTION = "_scaled_dot_product"
_LONG = 32_768
"""Tokens of a sample from which layouts are tried where others fit, too."""


class Context(LayoutAxis):
    """See `stoker.layouts.base.LayoutAxis`."""

    name = "context"
    explanation = "processes hold parts of each sample's tokens, and shards of the model"
    complexity = 4

    def variants(self, layout: Layout) -> Iterator[Layout]:
        """As `LayoutAxis.variants`: those of shards, which choose them where there are some."""
        yield from SHARDS.variants(layout) if layout.shards == 1 else (layout,)

    def problem_with(self, layout: Layout, job: JobTraits) -> str | None:
        """As `LayoutAxis.problem_with`."""
        if layout.world_size > layout.shards * layout.context:
            return f"tokens of a sample are divided with shards alone, not with other axes, as in {layout.in_words()}"
        if job.tensor_devices is not None and layout.context > job.tensor_devices:
            words = f"{layout.context} processes that exchange keys and values"
            return f"{words} are more than the {job.tensor_devices} devices of a node"
        if job.matrix_optimizer is not None:
            return f"{job.matrix_optimizer} needs whole matrices, and processes hold shards of them"
        if job.has_own_loss:
            return 'loss="own" is computed within the model, where targets are of the tokens after them'
        if job.own_measures:
            return f"{job.own_measures[0]} may do with tokens what it likes: use a loss or metric by its name"
        if job.stateful_metrics:
            return f"metric {job.stateful_metrics[0]} compares whole samples, of which each process has a part"
        if job.skips_blocks:
            return "blocks are skipped for whole samples (stochastic_depth), and each process would choose for itself"
        return None

    def traffic(self, update: DividedUpdate) -> Sequence[Traffic]:
        """As `LayoutAxis.traffic`: keys, values and queries in each attention, and parameters as over shards."""
        forward, again, backward = attentions(update.trace())
        passed = (*forward, *again)
        gathered = tuple(kv for kv, _ in passed)
        exchanged = tuple(
            round(q / update.layout.context) for _, q in (*passed, *backward) if q for _there_and_back in (0, 1)
        )
        traffic = [
            Traffic(
                what="keys and values gathered",
                collective="all-gather",
                axis="context",
                sizes=gathered,
                times=update.passes,
            ),
            Traffic(
                what="gradients of keys and values summed and scattered",
                collective="reduce-scatter",
                axis="context",
                sizes=tuple(kv for kv, _ in backward),
                times=update.passes,
            ),
            Traffic(
                what="queries exchanged, and what they found",
                collective="all-to-all",
                axis="context",
                sizes=exchanged,
                times=update.passes,
            ),
        ]
        return (*traffic, *(SHARDS.traffic(update) if update.layout.shards == 1 else ()))

    def overhead_s(self, parts: ModelParts, layout: Layout, passes: int) -> float:
        """As `LayoutAxis.overhead_s`: that of `fully_shard`, where shards do not count it."""
        return SHARDS.overhead_s(parts, layout, passes) if layout.shards == 1 else 0.0

    def copies_s(self, traffic: Sequence[Traffic], layout: Layout, seconds: Seconds) -> float:
        """As `LayoutAxis.copies_s`: those of `fully_shard`, where shards do not count them."""
        return SHARDS.copies_s(traffic, layout, seconds) if layout.shards == 1 else 0.0

    def local_shape(self, one: Parameter, shape: tuple[int, ...], layout: Layout, rank: int | None) -> tuple[int, ...]:
        """As `LayoutAxis.local_shape`: rows of what shards leave, padded."""
        if not shape:
            return shape
        dim = shard_dim(one.shape, layout.shards * layout.context)
        return *shape[:dim], -(-shape[dim] // layout.context), *shape[dim + 1 :]

    def trace_of(self, trace: Trace, parts: ModelParts, layout: Layout, rank: int) -> Trace:
        """As `LayoutAxis.trace_of`: tokens divided, with gathered keys and values; the state as over shards."""
        trace = _divided(trace, parts, layout.context)
        return SHARDS.trace_of(trace, parts, layout, rank) if layout.shards == 1 else trace

    def message_bytes(self, parts: ModelParts, layout: Layout, *, is_on_cpu: bool, gathered_share: float = 1.0) -> int:
        """As `LayoutAxis.message_bytes`: those of shards; the trace has gathered keys and values."""
        if layout.shards > 1:
            return 0
        return SHARDS.message_bytes(parts, layout, is_on_cpu=is_on_cpu, gathered_share=gathered_share)


AXIS = Context()


Sizes = tuple[tuple[int, int], ...]
"""Of each attention, keys with values, and queries of all tokens if they are exchanged: where it is causal [bytes]."""


def attentions(trace: Trace) -> tuple[Sizes, Sizes, Sizes]:
    """Attentions of a micro-batch: in its forward pass, computed again in its backward pass, and backward."""
    found: tuple[list[tuple[int, int]], ...] = ([], [], [])
    for occurrence in trace.occurrences:
        operation = trace.operations[occurrence.operation]
        if occurrence.part == 0 and operation.name.startswith(_ATTENTION):
            is_backward = operation.name.endswith("_backward")
            q, k, v = operation.inputs[is_backward : 3 + is_backward]
            kind = 2 if is_backward else int(occurrence.phase == "backward")
            found[kind].append((bytes_of(k) + bytes_of(v), bytes_of(q) if operation.attribute("is_causal") else 0))
    forward, again, backward = map(tuple, found)
    settings = trace.settings
    if settings.checkpointing == "selective":  # results of attention are kept, and its messages sent again
        again = forward[: settings.checkpointed_blocks]
    return forward, again, backward


def tokens_of(trace: Trace) -> int:
    """Number of tokens of a sample that attend to each other [1]; 0 without attention."""
    lengths = [operation.inputs[0].shape[-2] for operation in trace.operations if operation.name.startswith(_ATTENTION)]
    return max(lengths, default=0)


def _divided(trace: Trace, parts: ModelParts, size: int) -> Trace:
    """The trace of one of `size` processes that divide the tokens of each sample."""
    tokens = tokens_of(trace)
    division = _DividedTokens(trace, parts, tokens, size)
    shares = [division.share(one) for one in trace.occurrences]
    resized = dataclasses.replace(trace, storages=with_output_shares(trace, shares))
    divided = with_operations(resized, lambda one, _: division.operation(one))
    return _with_gathered(divided, trace, size)


class _DividedTokens:
    """The operations of a trace over a part of each sample's tokens.

    Dimensions of tokens are those of as many elements, or of all samples' together. Matrices of the model, which may be
    as large, are known by the shapes of its parameters.
    """

    def __init__(self, trace: Trace, parts: ModelParts, tokens: int, size: int) -> None:
        self._trace, self._size = trace, size
        shapes = {parameter.shape for parameter in parts.parameters}
        self._matrices = shapes | {shape[::-1] for shape in shapes}
        rows = trace.settings.micro_batch * tokens
        self._rows = {tokens, *(rows // chunks for chunks in (1, max(1, trace.settings.loss_chunks)))} - {0}
        self._known: dict[int, tuple[Operation, float]] = {}

    def share(self, one: Occurrence) -> float:
        """Share of an occurrence's outputs in one process [0 to 1]."""
        return self._part_of(one)[1]

    def operation(self, one: Occurrence) -> Operation:
        """One process's part of an occurrence's operation."""
        return self._part_of(one)[0]

    def _part_of(self, one: Occurrence) -> tuple[Operation, float]:
        operation = self._trace.operations[one.operation]
        if one.phase == "optimizer":
            return operation, 1.0
        if one.operation not in self._known:
            after = self._divided(operation)
            whole = sum(map(bytes_of, operation.outputs))
            self._known[one.operation] = after, sum(map(bytes_of, after.outputs)) / whole if whole else 1.0
        return self._known[one.operation]

    def _divided(self, operation: Operation) -> Operation:
        if operation.name.startswith(_ATTENTION):
            return self._attention(operation)
        if operation.name in PRODUCTS:
            return self._product(operation)
        tensors = (*operation.inputs, *operation.outputs)
        if not any(self._place(shape) is not None for shape in tensors):
            return operation
        before, after = (sum(map(bytes_of, each)) for each in (tensors, map(self._narrowed, tensors)))
        return scaled(operation, after / max(1, before), self._narrowed)

    def _product(self, operation: Operation) -> Operation:
        """The product with m, n or k of [m, k] @ [k, n] divided: where the other two are a matrix of the model."""
        a, b = operation.inputs[-2:]
        m, k, n = *a.shape[-2:], b.shape[-1]
        places: dict[Literal["m", "k", "n"], tuple[int, tuple[int, int]]]
        places = {"m": (m, (k, n)), "n": (n, (m, k)), "k": (k, (m, n))}
        tokens = [name for name, (size, _) in places.items() if size in self._rows]
        if not tokens:
            return operation
        name = next((name for name in tokens if places[name][1] in self._matrices), tokens[0])
        return divided_product(operation, name, 1 / self._size)

    def _attention(self, operation: Operation) -> Operation:
        """Queries of a part, keys and values of all tokens."""
        first = 1 if operation.name.endswith("_backward") else 0
        whole = {first + 1, first + 2}
        inputs = tuple(one if place in whole else self._narrowed(one) for place, one in enumerate(operation.inputs))
        outputs = tuple(
            one if first and place in (1, 2) else self._narrowed(one) for place, one in enumerate(operation.outputs)
        )
        share = 1 / self._size
        return dataclasses.replace(
            operation,
            inputs=inputs,
            outputs=outputs,
            flops=round(operation.flops * share),
            bytes_read=sum(map(bytes_of, inputs)),
            bytes_written=sum(map(bytes_of, outputs)),
        )

    def _place(self, shape: TensorShape) -> int | None:
        """The dimension of tokens; None if there is none."""
        if shape.shape in self._matrices:
            return None
        return next((place for place, size in enumerate(shape.shape) if size in self._rows), None)

    def _narrowed(self, shape: TensorShape) -> TensorShape:
        place = self._place(shape)
        return shape if place is None else with_dim(shape, place, 1 / self._size)


@dataclasses.dataclass(frozen=True)
class GatheredBytes:
    """Memory of one attention of a process that its trace without layout has not, by the steps of `attention_over`.

    `kept` is until the backward pass: keys and values of all tokens, in place of the process's own, and of causal
    attention its results, which are there in the order of the exchange too. `forward` and `backward` are the most that
    either pass needs besides [bytes]; backward in the process that needs the most.
    """

    kept: int
    forward: int
    backward: int

    @classmethod
    def of(cls, operation: Operation, size: int) -> GatheredBytes:
        """Those of an attention of all tokens, divided among `size` processes."""
        queries, keys, values = (bytes_of(one) for one in operation.inputs[:3])
        whole, q = keys + values, queries / size
        own = whole / size
        if not operation.attribute("is_causal"):  # put together, in a message and in their order
            return cls(kept=round(whole - own), forward=round(whole + 3 * own), backward=round(whole + 2 * own))
        # Queries there, and results back. Backward each of two parts of the keys and values has a gradient of its own,
        # of which half are the larger one's, and all of them are added up.
        backward = max(1.5 * whole + q / 2, whole + 2 * own - 2 * q)
        forward = max(whole + 3 * own - q, 3 * q + own)
        return cls(kept=round(whole + q - own), forward=round(forward), backward=round(backward))


def _with_gathered(divided: Trace, trace: Trace, size: int) -> Trace:
    """The trace with keys and values of all tokens: kept from each attention to its backward pass.

    The last attention that was computed is the first to get gradients: those before it, whose blocks are computed
    again, free theirs at once.
    """
    kept: list[tuple[int, GatheredBytes]] = []  # the occurrence, and its bytes
    spans: list[tuple[int, int, GatheredBytes]] = []  # first and last occurrence, and the bytes
    for place, one in enumerate(trace.occurrences):
        operation = trace.operations[one.operation]
        if not operation.name.startswith(_ATTENTION):
            continue
        if not operation.name.endswith("_backward"):
            kept.append((place, GatheredBytes.of(operation, size)))
        elif kept:
            begin, gathered = kept.pop()
            spans.append((begin, place, gathered))
    spans += [(begin, begin, gathered) for begin, gathered in kept]
    storages, before, after = list(divided.storages), dict[int, list[int]](), dict[int, list[int]]()
    blocks = {storage.born: storage.block for storage in trace.storages}

    def temporary(num_bytes: int, place: int) -> list[int]:
        """Events ahead of an occurrence's own."""
        storages.append(
            Storage(num_bytes=num_bytes, category="temporary", born=place, died=place, block=blocks.get(place))
        )
        return [len(storages), -len(storages)]

    for begin, end, gathered in spans:
        storages.append(
            Storage(num_bytes=gathered.kept, category="activation", born=begin, died=end, block=blocks.get(begin))
        )
        number = len(storages)
        before.setdefault(begin, []).extend((number, *temporary(gathered.forward, begin)))
        after.setdefault(end, []).append(-number)
        if end != begin:
            before.setdefault(end, []).extend(temporary(gathered.backward, end))
    events: list[int] = []
    for event in divided.events:
        born = divided.storages[abs(event) - 1].born
        if event > 0 and born in before:
            events += before.pop(born)
        events.append(event)
        if event > 0 and born in after and born not in before:
            events += after.pop(born)
    for left in (*before.values(), *after.values()):
        events += left
    return dataclasses.replace(divided, storages=tuple(storages), events=tuple(events))


def is_worthwhile(tokens: int, batch: int, devices: int) -> bool:
    """Whether layouts along this axis are tried where others fit, too: samples are long, or fewer than devices."""
    return tokens >= _LONG or batch < devices

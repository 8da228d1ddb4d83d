"""Traces that were not made: at another micro-batch size, and of the whole model from a shortened one.

Every size in an update is affine in the micro-batch, if no tensor has the batch in two of its dimensions: two traces
with the same sequence of operations and of allocations determine each dimension, count of bytes and count of FLOPs. The
result is replayed like any other trace, since peaks and fragmentation are not affine.

Of N equal blocks, or time steps, a few are traced: the first and the last ones, which may differ, and two equal ones in
between. The events of the first of the two are repeated for each missing block, between the two, in every sweep through
the blocks; each copy of a storage is freed where its original would be, counted from its own block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TypeVar

from stoker.imports import collector_paused
from stoker.layouts.trace_division import PRODUCTS
from stoker.records.codec import JSON
from stoker.records.trace import (
    BlockRun,
    Occurrence,
    Operation,
    Repetition,
    Storage,
    TensorShape,
    Trace,
    TraceItem,
    TraceTimeline,
    Widened,
    prove,
    renamed,
)

T = TypeVar("T")


class NotDerivable(ValueError):
    """Two traces do not determine the one at a third micro-batch; it has to be made."""


def derived(small: Trace, large: Trace, micro_batch: int) -> Trace:
    """The trace at `micro_batch` samples from those at two other sizes; equal to one made directly.

    Not checked: that the batch does not change the sequence beyond the two sizes (a kernel chosen by its size).

    Raises:
        NotDerivable: the two differ in more than sizes, a tensor has the batch in two dimensions (such as similarities
            of all pairs of samples), or a size at `micro_batch` is not a whole number or negative. Where a product's
            factors have one shape at one of the two sizes, larger ones are derived, smaller ones are not: transposed
            tensors of one sample are contiguous, and need no copy.
    """
    if micro_batch in (small.settings.micro_batch, large.settings.micro_batch):
        return small if micro_batch == small.settings.micro_batch else large
    return Derivation(small, large).at(micro_batch)


class Derivation:
    """What two traces have in common and where they differ, from which traces at other micro-batches are made.

    Raises:
        NotDerivable: as `derived`, if the two differ in more than sizes.
    """

    @collector_paused()
    def __init__(self, small: Trace, large: Trace) -> None:
        _require_same_sequence(small, large)
        self._small, self._large = small, large
        executed = zip(small.occurrences, large.occurrences, strict=True)
        self._executed = [(one.operation, other.operation) for one, other in executed]
        self._operations = list(dict.fromkeys(self._executed))
        self._growing = [
            index
            for index, (one, other) in enumerate(zip(small.storages, large.storages, strict=True))
            if one.num_bytes != other.num_bytes
        ]
        for one, other in zip(small.storages, large.storages, strict=True):
            if (one.born, one.died, one.category, one.block) != (other.born, other.died, other.category, other.block):
                lives = f"from {one.born} to {one.died}, and from {other.born} to {other.died}"
                raise NotDerivable(f"a storage lives {lives}")

    @collector_paused()
    def at(self, micro_batch: int) -> Trace:
        """The trace at `micro_batch` samples.

        Raises:
            NotDerivable: as `derived`.
        """
        small, large = self._small, self._large
        line = _Line(small.settings.micro_batch, large.settings.micro_batch, micro_batch)
        operations: list[Operation] = []
        numbers: dict[tuple[int, int], int] = {}
        for pair in self._operations:
            operation = line.operation(small.operations[pair[0]], large.operations[pair[1]])
            if operation not in operations:  # two operations may be equal at one size only
                operations.append(operation)
            numbers[pair] = operations.index(operation)
        occurrences = small.occurrences
        if any(number != pair[0] for pair, number in numbers.items()):
            occurrences = tuple(
                dataclasses.replace(one, operation=numbers[pair])
                for one, pair in zip(small.occurrences, self._executed, strict=True)
            )
        storages = list(small.storages)
        for index in self._growing:
            one = storages[index]
            storages[index] = Storage(
                num_bytes=line.at(one.num_bytes, large.storages[index].num_bytes),
                category=one.category,
                born=one.born,
                died=one.died,
                block=one.block,
                compiled_share=large.storages[index].compiled_share,
            )
        return dataclasses.replace(
            small,
            settings=dataclasses.replace(small.settings, micro_batch=micro_batch),
            occurrences=occurrences,
            operations=tuple(operations),
            storages=tuple(storages),
            repetition=line.repetition(small.repetition, large.repetition),
            took_s=small.took_s + large.took_s,
        )


@dataclasses.dataclass(frozen=True)
class _Line:
    """The line through values at `small` and at `large` samples, evaluated at `target` samples."""

    small: int
    large: int
    target: int

    def at(self, one: int, other: int) -> int:
        if one == other:
            return one
        more, rest = divmod((other - one) * (self.target - self.small), self.large - self.small)
        if rest or one + more < 0:
            raise NotDerivable(
                f"{one:,} at {self.small} samples and {other:,} at {self.large} make no whole size at {self.target}"
            )
        return one + more

    def shape(self, one: TensorShape, other: TensorShape) -> TensorShape:
        if one == other:
            return one
        if one.dtype != other.dtype or len(one.shape) != len(other.shape):
            raise NotDerivable(f"{one} at {self.small} samples is {other} at {self.large}")
        sizes = tuple(zip(one.shape, other.shape, strict=True))
        if sum(a != b for a, b in sizes) > 1:
            raise NotDerivable(f"more than one dimension of {list(one.shape)} goes with the micro-batch")
        return TensorShape(shape=tuple(self.at(a, b) for a, b in sizes), dtype=one.dtype)

    def operation(self, one: Operation, other: Operation) -> Operation:
        attributes, is_product = one.attributes, one.name in PRODUCTS and one.name == other.name
        if is_product and self.target > self.large and _but_outside(one) == _but_outside(other):
            # Factors of one shape, of which those from outside are counted, may have it at one of the sizes by chance.
            attributes = min(one, other, key=lambda each: each.attribute("num_outside", 0)).attributes
        elif (one.name, one.attributes) != (other.name, other.attributes):
            raise NotDerivable(f"{one.name} at {self.small} samples is not the same at {self.large}")
        if len(one.inputs) != len(other.inputs) or len(one.outputs) != len(other.outputs):
            raise NotDerivable(f"{one.name} takes more tensors at {self.large} samples than at {self.small}")
        return Operation(
            name=one.name,
            inputs=tuple(map(self.shape, one.inputs, other.inputs)),
            outputs=tuple(map(self.shape, one.outputs, other.outputs)),
            flops=self.at(one.flops, other.flops),
            bytes_read=self.at(one.bytes_read, other.bytes_read),
            bytes_written=self.at(one.bytes_written, other.bytes_written),
            attributes=attributes,
        )

    def repetition(self, one: Repetition | None, other: Repetition | None) -> Repetition | None:
        if one is None or other is None:
            if one is not other:
                raise NotDerivable("one of the two traces is of the whole model, the other is not")
            return None
        if dataclasses.replace(one, widened=(), grown=()) != dataclasses.replace(other, widened=(), grown=()):
            raise NotDerivable("the two traces do not repeat in the same way")
        widened = [
            Widened(occurrence=a.occurrence, operation=self.operation(a.operation, b.operation))
            for a, b in _zipped(one.widened, other.widened)
        ]
        grown = [(index, self.at(a, b)) for (index, a), (_, b) in _zipped(one.grown, other.grown)]
        return dataclasses.replace(one, widened=tuple(widened), grown=tuple(grown))


def _but_outside(operation: Operation) -> tuple[tuple[str, JSON], ...]:
    """An operation's attributes without the number of inputs from outside of its chain."""
    return tuple(pair for pair in operation.attributes if pair[0] != "num_outside")


def _require_same_sequence(small: Trace, large: Trace) -> None:
    """Raise NotDerivable unless the traces have the same sequence; sizes are compared later."""
    if dataclasses.replace(large.settings, micro_batch=small.settings.micro_batch) != small.settings:
        raise NotDerivable("the two traces differ in more settings than the micro-batch")
    aspects: dict[str, Callable[[Trace], object]] = {
        "executions": lambda trace: [
            (o.phase, o.part, trace.modules[o.module], trace.sources[o.source]) for o in trace.occurrences
        ],
        "allocations": lambda trace: trace.events,
        "storages": lambda trace: len(trace.storages),
        "modules": lambda trace: (trace.modules, trace.sources),
        "target": lambda trace: trace.is_fallback,
    }
    for what, aspect in aspects.items():
        if aspect(small) != aspect(large):
            raise NotDerivable(
                f"{what} differ between {small.settings.micro_batch} and {large.settings.micro_batch} samples"
            )


def _zipped(one: tuple[T, ...], other: tuple[T, ...]) -> zip[tuple[T, T]]:
    if len(one) != len(other):
        raise NotDerivable("the two traces do not repeat in the same way")
    return zip(one, other, strict=True)


@collector_paused()
def expanded(trace: Trace) -> Trace:
    """The trace of the whole model, equal to one made without shortening it; `trace` itself if it is whole.

    Raises:
        NotPeriodic: the traced blocks differ; a tracer never gives such a `repetition`.
    """
    if trace.repetition is None:
        return trace
    return _Expansion(trace, trace.repetition, prove(trace, trace.repetition)).made()


class _Blocks:
    """Numbers of blocks in the whole model, from numbers among the traced ones, and back."""

    def __init__(self, repetition: Repetition) -> None:
        self._copies = dict(repetition.copies)
        self._origins = [(block, copy) for block in range(repetition.traced) for copy in range(self.copies(block) + 1)]
        self._numbers = {origin: number for number, origin in enumerate(self._origins)}

    def copies(self, block: int) -> int:
        """Number of copies of `block` besides itself."""
        return self._copies.get(block, 0)

    def number(self, block: int, copy: int = 0) -> int:
        """The number in the whole model of a copy of `block` (0: itself)."""
        return self._numbers[block, copy]

    def origin(self, number: int) -> tuple[int, int]:
        """The traced block that block `number` is a copy of, and the copy's number (0: itself)."""
        return self._origins[number]


class _Expansion:
    """The whole model's trace while it is built."""

    def __init__(self, trace: Trace, repetition: Repetition, timeline: TraceTimeline) -> None:
        self._trace, self._repetition, self._timeline = trace, repetition, timeline
        self._blocks = _Blocks(repetition)
        self._born = timeline.births()
        self._storage_at = {place: storage for storage, place in self._born.items()}
        runs = zip(timeline.runs, timeline.sweeps, strict=True)
        self._run_of = {(run.block, sweep): run for run, sweep in runs if sweep >= 0}
        self._widened = {one.occurrence: one.operation for one in repetition.widened}
        self._grown = dict(repetition.grown)
        self._copies: dict[tuple[int, int], int] = {}  # (storage traced, which copy) -> storage written
        self._operations: list[Operation] = []
        self._numbers: dict[int, int] = {}  # of the traced operations, and of widened ones their occurrence, negative
        self._modules: dict[str, int] = {}
        self._renamed: dict[tuple[int, int | None], int] = {}
        self._sources: dict[str, int] = {}
        self._occurrences: list[Occurrence] = []
        self._born_at: list[tuple[int, int, int | None]] = []  # of each storage: the one it copies, when, which block
        self._deaths: dict[int, int] = {}
        self._events: list[int] = []

    def made(self) -> Trace:
        """The whole trace."""
        for run, sweep, copy in self._runs():
            number = None if run.block is None else self._blocks.number(run.block, copy)
            for offset, item in enumerate(self._timeline.items[run.start : run.stop]):
                if item.kind == "execution":
                    self._execute(item.number, run.block, number)
                elif item.kind == "birth":
                    self._copies[item.number, copy] = len(self._born_at)
                    self._born_at.append((item.number, self._now + item.lag, number))
                    self._events.append(len(self._born_at))
                else:
                    self._free(item, run, sweep, copy, offset)
        return dataclasses.replace(
            self._trace,
            operations=tuple(self._operations),
            occurrences=tuple(self._occurrences),
            storages=tuple(map(self._storage, range(len(self._born_at)))),
            events=tuple(self._events),
            modules=tuple(self._modules),
            sources=tuple(self._sources),
            repetition=None,
        )

    def _runs(self) -> Iterator[tuple[BlockRun, int, int]]:
        """Runs in the order of the whole model, each with its sweep and which copy of its block it is for."""
        runs, sweeps = self._timeline.runs, self._timeline.sweeps
        for index, (run, sweep) in enumerate(zip(runs, sweeps, strict=True)):
            copies = 0 if run.block is None or sweep < 0 else self._blocks.copies(run.block)
            if not copies:
                yield run, sweep, 0
            elif runs[index + 1].block == run.block + 1:  # type: ignore[operator]  # a block with copies has a number
                yield from ((run, sweep, copy) for copy in range(copies + 1))
            else:
                yield from ((run, sweep, copy) for copy in range(copies, -1, -1))

    def _execute(self, index: int, block: int | None, number: int | None) -> None:
        one = self._trace.occurrences[index]
        source = self._trace.sources[one.source]
        self._occurrences.append(
            Occurrence(
                operation=self._operation(index, one.operation),
                phase=one.phase,
                part=one.part,
                module=self._module(one.module, block, number),
                source=self._sources.setdefault(source, len(self._sources)),
            )
        )

    def _operation(self, occurrence: int, operation: int) -> int:
        """Index of the operation of a traced occurrence."""
        widened = self._widened.get(occurrence)
        key = operation if widened is None else -1 - occurrence
        if key not in self._numbers:
            here = self._trace.operations[operation] if widened is None else widened
            if widened is None or widened not in self._operations:
                self._operations.append(here)
            self._numbers[key] = self._operations.index(here)
        return self._numbers[key]

    def _module(self, module: int, block: int | None, number: int | None) -> int:
        """Index of a traced module's name, with its block's number changed."""
        if (module, number) not in self._renamed:
            name = self._trace.modules[module]
            if block is not None and number is not None:
                name = renamed(name, self._repetition.module, block, number)
            self._renamed[module, number] = self._modules.setdefault(name, len(self._modules))
        return self._renamed[module, number]

    def _storage(self, index: int) -> Storage:
        """A storage of the whole trace, once its death is known."""
        traced, born, block = self._born_at[index]
        storage = self._trace.storages[traced]
        return Storage(
            num_bytes=self._grown.get(traced, storage.num_bytes),
            category=storage.category,
            born=born,
            died=self._deaths.get(index),
            block=block,
            compiled_share=storage.compiled_share,
        )

    def _free(self, item: TraceItem, run: BlockRun, sweep: int, copy: int, offset: int) -> None:
        """Free a storage that a block made for itself or a neighbour: in a copy, the one as many blocks further on.

        Outside of blocks, and if neither block has copies, a storage is freed at once with all its copies.
        """
        born, own = self._born.get(item.number), run.block
        copies_of = self._blocks.copies
        if born is None or own is None or sweep < 0 or not (copies_of(born.block) or copies_of(own)):
            copies = 0 if born is None else copies_of(born.block)
            for index in sorted(self._copies[item.number, n] for n in range(copies + 1)):  # in the order of births
                self._die(index, item)
            return
        number = self._blocks.number(own, copy)
        if copy and born.block < own:
            # A copy frees of the block before it what the next traced block frees of this one: both have one structure.
            like = self._timeline.items[self._run_of[own + 1, sweep].start + offset]
            born, own = self._born[like.number], own + 1
        block, copy = self._blocks.origin(born.block + number - own)
        self._die(self._copies[self._storage_at[born._replace(block=block)], copy], item)

    def _die(self, index: int, item: TraceItem) -> None:
        assert index not in self._deaths, "a storage was freed twice"
        self._deaths[index] = self._now + item.lag
        self._events.append(-(index + 1))

    @property
    def _now(self) -> int:
        """Index of the last occurrence."""
        return len(self._occurrences) - 1

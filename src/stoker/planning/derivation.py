"""From traces at two micro-batch sizes to that at any other.

Every size in an update is affine in the micro-batch, if no tensor has the batch in two of its dimensions: two traces
with the same sequence of operations and of allocations fix each dimension, count of bytes and count of FLOPs. The
result is replayed like any other trace, since peaks and fragmentation are not affine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

from stoker.records.trace import Occurrence, Operation, Repetition, Storage, TensorShape, Trace, Widened

T = TypeVar("T")


class NotDerivable(ValueError):
    """Two traces do not tell what happens at a third micro-batch; one has to be made."""


def derived(small: Trace, large: Trace, micro_batch: int) -> Trace:
    """The trace at `micro_batch` samples, from those at two other sizes; equal to one made directly.

    Not checked: that the batch does not change the sequence beyond the two sizes (a kernel chosen by its size).

    Raises:
        NotDerivable: the two differ in more than sizes, a tensor has the batch in two dimensions (such as similarities
            of all pairs of samples), or a size at `micro_batch` is not a whole number or negative.
    """
    if micro_batch in (small.settings.micro_batch, large.settings.micro_batch):
        return small if micro_batch == small.settings.micro_batch else large
    _require_same_sequence(small, large)
    line = _Line(small.settings.micro_batch, large.settings.micro_batch, micro_batch)
    operations = _Operations(small, large, line)
    pairs = zip(small.occurrences, large.occurrences, strict=True)
    occurrences = tuple(operations.occurrence(one, other) for one, other in pairs)
    storages = zip(small.storages, large.storages, strict=True)
    return dataclasses.replace(
        small,
        settings=dataclasses.replace(small.settings, micro_batch=micro_batch),
        occurrences=occurrences,
        operations=tuple(operations.made),
        storages=tuple(line.storage(one, other) for one, other in storages),
        repetition=line.repetition(small.repetition, large.repetition),
        took_s=small.took_s + large.took_s,
    )


@dataclasses.dataclass(frozen=True)
class _Line:
    """The line through a value at `small` samples and one at `large` samples, at `wanted` samples."""

    small: int
    large: int
    wanted: int

    def at(self, one: int, other: int) -> int:
        if one == other:
            return one
        more, rest = divmod((other - one) * (self.wanted - self.small), self.large - self.small)
        if rest or one + more < 0:
            raise NotDerivable(
                f"{one:,} at {self.small} samples and {other:,} at {self.large} make no whole size at {self.wanted}"
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
        if (one.name, one.attributes) != (other.name, other.attributes):
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
            attributes=one.attributes,
        )

    def storage(self, one: Storage, other: Storage) -> Storage:
        if one == other:
            return one
        found = dataclasses.replace(one, num_bytes=self.at(one.num_bytes, other.num_bytes))
        if dataclasses.replace(other, num_bytes=found.num_bytes) != found:
            raise NotDerivable(f"a storage lives from {one.born} to {one.died}, and from {other.born} to {other.died}")
        return found

    def repetition(self, one: Repetition | None, other: Repetition | None) -> Repetition | None:
        if one is None or other is None:
            if one is not other:
                raise NotDerivable("one of the two traces is of the whole model, the other is not")
            return None
        if dataclasses.replace(one, widened=(), grown=()) != dataclasses.replace(other, widened=(), grown=()):
            raise NotDerivable("the two traces do not repeat alike")
        widened = [
            Widened(occurrence=a.occurrence, operation=self.operation(a.operation, b.operation))
            for a, b in _zipped(one.widened, other.widened)
        ]
        grown = [(index, self.at(a, b)) for (index, a), (_, b) in _zipped(one.grown, other.grown)]
        return dataclasses.replace(one, widened=tuple(widened), grown=tuple(grown))


class _Operations:
    """The operations of the trace that is made, in the order in which they are first executed."""

    def __init__(self, small: Trace, large: Trace, line: _Line) -> None:
        self._small, self._large, self._line = small, large, line
        self.made: list[Operation] = []
        self._numbers: dict[tuple[int, int], int] = {}

    def occurrence(self, one: Occurrence, other: Occurrence) -> Occurrence:
        key = (one.operation, other.operation)
        if key not in self._numbers:
            here = self._line.operation(self._small.operations[key[0]], self._large.operations[key[1]])
            if here not in self.made:  # two that are alike at one size only were told apart at the other
                self.made.append(here)
            self._numbers[key] = self.made.index(here)
        return dataclasses.replace(one, operation=self._numbers[key])


def _require_same_sequence(small: Trace, large: Trace) -> None:
    """Raise NotDerivable unless the traces do the same in the same order; sizes are looked at later."""
    if dataclasses.replace(large.settings, micro_batch=small.settings.micro_batch) != small.settings:
        raise NotDerivable("the two traces differ in more settings than the micro-batch")
    told: dict[str, Callable[[Trace], object]] = {
        "executions": lambda trace: [
            (o.phase, o.part, trace.modules[o.module], trace.sources[o.source]) for o in trace.occurrences
        ],
        "allocations": lambda trace: trace.events,
        "storages": lambda trace: len(trace.storages),
        "modules": lambda trace: (trace.modules, trace.sources),
        "target": lambda trace: trace.is_fallback,
    }
    for what, part in told.items():
        if part(small) != part(large):
            raise NotDerivable(
                f"{what} differ between {small.settings.micro_batch} and {large.settings.micro_batch} samples"
            )


def _zipped(one: tuple[T, ...], other: tuple[T, ...]) -> zip[tuple[T, T]]:
    if len(one) != len(other):
        raise NotDerivable("the two traces do not repeat alike")
    return zip(one, other, strict=True)

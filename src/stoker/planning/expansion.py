"""From the trace of a shortened model to that of the whole one.

Of N equal blocks, or time steps, a few are traced: the first and the last ones, which may be special, and two in
between that are alike. What happens for the first of the two is written as often more as blocks are missing, between
the two, in every sweep through the blocks; storages come in as many copies, each freed where the one it copies would
be, counted from its own block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from stoker.records.timeline import Item, Place, Run, Timeline, prove, renamed
from stoker.records.trace import Occurrence, Operation, Repetition, Storage, Trace


def expanded(trace: Trace) -> Trace:
    """The trace of the whole model, equal to one made without shortening it; itself where nothing was left out.

    Raises:
        NotPeriodic: the blocks traced do not do the same; a tracer gives no such `repetition`.
    """
    if trace.repetition is None:
        return trace
    return _Expansion(trace, trace.repetition, prove(trace, trace.repetition)).made()


class _Blocks:
    """Numbers of blocks in the whole model, from numbers among those traced, and back."""

    def __init__(self, repetition: Repetition) -> None:
        self._copies = dict(repetition.copies)
        self._origins = [
            (block, copy) for block in range(repetition.traced) for copy in range(self.copies(block) + 1)
        ]  # fmt: skip
        self._numbers = {origin: number for number, origin in enumerate(self._origins)}

    def copies(self, block: int) -> int:
        """How many more like `block` there are."""
        return self._copies.get(block, 0)

    def number(self, block: int, copy: int = 0) -> int:
        """The number in the whole model of a copy of `block` (0: itself)."""
        return self._numbers[block, copy]

    def origin(self, number: int) -> tuple[int, int]:
        """The traced block that stands for block `number`, and which of its copies that is (0: itself)."""
        return self._origins[number]


class _Expansion:
    """The whole model's trace while it is written."""

    def __init__(self, trace: Trace, repetition: Repetition, timeline: Timeline) -> None:
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
            self._write(run, sweep, copy)
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

    def _runs(self) -> Iterator[tuple[Run, int, int]]:
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

    def _write(self, run: Run, sweep: int, copy: int) -> None:
        number = None if run.block is None else self._blocks.number(run.block, copy)
        for offset, item in enumerate(self._timeline.items[run.start : run.stop]):
            if item.kind == "execution":
                self._execute(item.number, run.block, number)
            elif item.kind == "birth":
                self._bear(item, copy, number)
            elif self._is_freed_with_copies(item, run, sweep):
                self._free_with_copies(item)
            else:
                self._free(item, run, sweep, copy, offset)

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
        """The number of the operation of a traced occurrence."""
        widened = self._widened.get(occurrence)
        key = operation if widened is None else -1 - occurrence
        if key not in self._numbers:
            here = self._trace.operations[operation] if widened is None else widened
            if widened is None or widened not in self._operations:
                self._operations.append(here)
            self._numbers[key] = self._operations.index(here)
        return self._numbers[key]

    def _module(self, module: int, block: int | None, number: int | None) -> int:
        """The number of a traced module's name, that of its block changed."""
        if (module, number) not in self._renamed:
            name = self._trace.modules[module]
            if block is not None and number is not None:
                name = renamed(name, self._repetition.module, block, number)
            self._renamed[module, number] = self._modules.setdefault(name, len(self._modules))
        return self._renamed[module, number]

    def _bear(self, item: Item, copy: int, number: int | None) -> None:
        self._copies[item.number, copy] = len(self._born_at)
        self._born_at.append((item.number, self._now + item.lag, number))
        self._events.append(len(self._born_at))

    def _storage(self, index: int) -> Storage:
        """A storage written, whose death is known by now."""
        traced, born, block = self._born_at[index]
        storage = self._trace.storages[traced]
        return Storage(
            num_bytes=self._grown.get(traced, storage.num_bytes),
            category=storage.category,
            born=born,
            died=self._deaths.get(index),
            block=block,
        )

    def _is_freed_with_copies(self, item: Item, run: Run, sweep: int) -> bool:
        """Whether a storage is freed at once with those it stands for: by no block, or where there are no copies.

        What was not born for a block stands for itself alone.
        """
        born = self._born.get(item.number)
        if born is None or run.block is None or sweep < 0:
            return True
        return not self._blocks.copies(born.block) and not self._blocks.copies(run.block)

    def _free_with_copies(self, item: Item) -> None:
        born = self._born.get(item.number)
        copies = 0 if born is None else self._blocks.copies(born.block)
        for index in sorted(self._copies[item.number, copy] for copy in range(copies + 1)):  # in the order of births
            self._die(index, item)

    def _free(self, item: Item, run: Run, sweep: int, copy: int, offset: int) -> None:
        """Free what a block made for itself or a neighbour: in a copy, what lies as many blocks further on."""
        born, own = self._born[item.number], run.block
        assert own is not None
        number = self._blocks.number(own, copy)
        if copy and born.block < own:
            # A copy frees of the block before it what the next block traced frees of this one: they are laid out alike.
            like = self._timeline.items[self._run_of[own + 1, sweep].start + offset]
            born, own = self._born[like.number], own + 1
        self._die(self._copies[self._same_place(born, born.block + number - own)], item)

    def _die(self, index: int, item: Item) -> None:
        assert index not in self._deaths, "a storage was freed twice"
        self._deaths[index] = self._now + item.lag
        self._events.append(-(index + 1))

    def _same_place(self, place: Place, number: int) -> tuple[int, int]:
        """The traced storage that stands for what block `number` makes at `place`, and which copy of it."""
        block, copy = self._blocks.origin(number)
        return self._storage_at[place._replace(block=block)], copy

    @property
    def _now(self) -> int:
        """The number of the last occurrence."""
        return len(self._occurrences) - 1

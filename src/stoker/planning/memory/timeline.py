"""In which order updates allocate and free, hidden temporaries included: the first update, and every later one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stoker.planning.memory.hidden import cublas_workspace_bytes, hidden_bytes, is_product
from stoker.records.trace import Trace

_Timed = tuple[int, int]
"""An occurrence's index, and an event that happens then."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Allocations and frees of a run's updates.

    `sizes` [bytes] are those of the trace's storages, then of hidden ones. `before` are the storages that live before
    the first update. `first` and `later` are events as in a Trace: `i + 1` for the birth of storage `i`, `-(i + 1)` for
    its death; in the first update the optimiser makes its state, and cuBLAS its workspace. Each ends with what it takes
    for the next to begin as it did. `occurrences` are those of the events of `later`.
    """

    sizes: tuple[int, ...]
    before: tuple[int, ...]
    first: tuple[int, ...]
    later: tuple[int, ...]
    occurrences: tuple[int, ...]

    @property
    def persisting(self) -> tuple[int, ...]:
        """Storages that live before a later update."""
        alive = set(self.before)
        for event in self.first:
            (alive.add if event > 0 else alive.discard)(abs(event) - 1)
        return tuple(sorted(alive))


def timeline_of(trace: Trace, *, micro_batches: int | None = None) -> Timeline:
    """The timeline of a trace in which repeated blocks are all there.

    `micro_batches` are those of an update (None: as many as were traced): the batch they are cut from is as large.
    """
    parts = trace.settings.parts
    share = max(micro_batches or parts, parts) / parts
    sizes = [
        round(storage.num_bytes * share) if storage.category == "input" and storage.born < 0 else storage.num_bytes
        for storage in trace.storages
    ]
    kept = {i for i, storage in enumerate(trace.storages) if storage.born < 0}
    made = {i for i in kept if trace.storages[i].category == "optimizer state"}
    during = list(_with_hidden(trace, _hidden(trace, sizes)))
    ends = [(len(trace.occurrences), event) for event in _back_to(kept, during)]
    later = [*during, *ends]
    workspace = _first_product(trace)
    optimizer = _first_optimizer(trace)
    additions = [(optimizer, i + 1) for i in sorted(made)]
    if workspace is not None and trace.settings.target == "cuda":
        sizes.append(cublas_workspace_bytes(trace.settings.capability))
        additions.append((workspace, len(sizes)))
    return Timeline(
        sizes=tuple(sizes),
        before=tuple(sorted(kept - made)),
        # A sort keeps the order of events of one occurrence; what is added comes before them.
        first=tuple(event for _, event in sorted([*additions, *later], key=lambda timed: timed[0])),
        later=tuple(event for _, event in later),
        occurrences=tuple(occurrence for occurrence, _ in later),
    )


def _events(trace: Trace) -> Iterator[_Timed]:
    """The update's own events; a death takes place no earlier than the events before it."""
    now = 0
    for event in trace.events:
        storage = trace.storages[abs(event) - 1]
        if event > 0 and storage.born < 0:
            continue
        when = storage.born if event > 0 else storage.died
        now = max(now, when if when is not None else now)
        yield now, event


def _with_hidden(trace: Trace, hidden: dict[int, list[int]]) -> Iterator[_Timed]:
    """The update's events, and the hidden ones after the births of their occurrence, before its deaths."""
    waiting = sorted(hidden, reverse=True)
    for when, event in _events(trace):
        while waiting and (waiting[-1] < when or (waiting[-1] == when and event < 0)):
            occurrence = waiting.pop()
            yield from ((occurrence, one) for one in hidden[occurrence])
        yield when, event
    while waiting:
        occurrence = waiting.pop()
        yield from ((occurrence, one) for one in hidden[occurrence])


def _hidden(trace: Trace, sizes: list[int]) -> dict[int, list[int]]:
    """Births and deaths of hidden temporaries by occurrence; their sizes are added to `sizes`."""
    target = trace.settings.target
    temporary = [hidden_bytes(operation, target=target) for operation in trace.operations]
    found: dict[int, list[int]] = {}
    for occurrence, one in enumerate(trace.occurrences):
        if temporary[one.operation] > 0:
            sizes.append(temporary[one.operation])
            found[occurrence] = [len(sizes), -len(sizes)]
    return found


def _back_to(kept: set[int], during: list[_Timed]) -> list[int]:
    """Events that leave alive what lived before the update, and nothing else."""
    alive = set(kept)
    for _, event in during:
        (alive.add if event > 0 else alive.discard)(abs(event) - 1)
    return [*(-(i + 1) for i in sorted(alive - kept)), *(i + 1 for i in sorted(kept - alive))]


def _first_product(trace: Trace) -> int | None:
    products = [is_product(operation) for operation in trace.operations]
    return next((i for i, one in enumerate(trace.occurrences) if products[one.operation]), None)


def _first_optimizer(trace: Trace) -> int:
    occurrences = trace.occurrences
    return next((i for i, one in enumerate(occurrences) if one.phase == "optimizer"), len(occurrences))

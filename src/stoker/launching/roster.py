"""Who takes part: the states of the workers, and when the next generation is formed of whom. Decides, does nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any


class State(Enum):
    """Where a worker stands."""

    STARTING = auto()
    """Its process imports and prepares; it has not come to a meeting yet."""
    WAITING = auto()
    """It waits for the next generation."""
    MEMBER = auto()
    """It trains in the present generation."""
    FINISHED = auto()
    """It has done all there was to do."""
    GONE = auto()
    """It is left out for good."""


@dataclass(frozen=True)
class Generation:
    """A generation to be announced: its workers by rank, of which the first `num_veterans` have the weights."""

    number: int
    workers: tuple[int, ...]
    num_veterans: int
    notes: dict[str, Any] = field(default_factory=dict)


class TooFew(Exception):
    """Fewer are left than may go on. `left` are those that could have."""

    def __init__(self, left: int) -> None:
        super().__init__(f"{left} are left")
        self.left = left


class Roster:
    """The workers of a run, by number from 0.

    Args:
        workers: how many.
        least: the fewest that may form a generation.
        usable: how many of so many can take part.
    """

    def __init__(self, workers: int, least: int, usable: Callable[[int], int]) -> None:
        self._least, self._usable = least, usable
        self.states = [State.STARTING] * workers
        self.generation = Generation(0, (), 0)
        self._reported: dict[int, dict[str, Any]] = {}
        self.is_broken = False

    def rank_of(self, worker: int) -> int | None:
        """A worker's rank in the present generation, also if it has reported; None if it was not in it."""
        is_in = worker in self.generation.workers and self.states[worker] is not State.STARTING
        return self.generation.workers.index(worker) if is_in else None

    @property
    def leader(self) -> int:
        """The worker of rank 0: it speaks for all. Worker 0 before there is a generation."""
        return self.generation.workers[0] if self.generation.workers else 0

    @property
    def is_done(self) -> bool:
        """Whether the run is: rank 0 has finished."""
        return self.states[self.leader] is State.FINISHED

    def came(self, worker: int) -> None:
        """A worker has prepared, and waits."""
        self.states[worker] = State.WAITING

    def reported(self, worker: int, notes: dict[str, Any]) -> None:
        """A member says that its generation is over; it has dropped what it was at, and waits."""
        self.states[worker] = State.WAITING
        self._reported[worker] = notes
        self.is_broken = True

    def finished(self, worker: int) -> None:
        """A member has done all there was to do."""
        self.states[worker] = State.FINISHED

    def died(self, worker: int, *, returns: bool) -> None:
        """A worker's process has ended; whether it is started again."""
        self.is_broken |= self.states[worker] is State.MEMBER
        self._reported.pop(worker, None)
        self.states[worker] = State.STARTING if returns else State.GONE

    def those(self, state: State) -> list[int]:
        """The workers in this state."""
        return [worker for worker, one in enumerate(self.states) if one is state]

    @property
    def is_wanted(self) -> bool:
        """Whether members should end their generation for a larger one."""
        if self.is_broken:
            return False
        members, waiting = self.those(State.MEMBER), self.those(State.WAITING)
        return bool(members and waiting) and self._usable(len(members) + len(waiting)) > len(members)

    @property
    def missed(self) -> list[int]:
        """Members for which others wait that have reported already."""
        return self.those(State.MEMBER) if self._reported else []

    def form(self) -> Generation | None:
        """The next generation, from now on the present one; None while somebody has to be waited for.

        Nobody may still be a member of the present one. If nobody has its weights, it is waited for all that start.

        Raises:
            TooFew: fewer can take part than must, and nobody else is starting.
        """
        waiting, is_starting = self.those(State.WAITING), bool(self.those(State.STARTING))
        if self.those(State.MEMBER) or (is_starting and not self._reported):
            return None
        size = self._usable(len(waiting)) if waiting else 0
        if size < max(self._least, 1):
            if is_starting:
                return None
            raise TooFew(len(waiting))
        return self._formed(waiting, size)

    def _formed(self, waiting: list[int], size: int) -> Generation:
        veterans = sorted(self._reported, key=self.generation.workers.index)
        newcomers = [worker for worker in waiting if worker not in self._reported]
        notes: dict[str, Any] = {}
        for worker in reversed(veterans):
            notes |= self._reported[worker]
        workers = tuple((veterans + newcomers)[:size])
        self.generation = Generation(self.generation.number + 1, workers, min(len(veterans), size), notes)
        for worker in workers:
            self.states[worker] = State.MEMBER
        self._reported, self.is_broken = {}, False
        return self.generation

"""Membership of a run: the states of its workers, and when the next generation is formed of which of them.

Decides and performs nothing; the supervisor acts on it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any


class MembershipState(Enum):
    """The state of a worker."""

    STARTING = auto()
    """Its process imports and prepares; it has not come to a rendezvous yet."""
    WAITING = auto()
    """It waits for the next generation."""
    MEMBER = auto()
    """It trains in the present generation."""
    FINISHED = auto()
    """It has completed its work."""
    GONE = auto()
    """It is left out for good."""


@dataclass(frozen=True)
class Generation:
    """A generation: its workers by rank, of which the first `num_veterans` hold the weights."""

    number: int
    workers: tuple[int, ...]
    num_veterans: int
    notes: dict[str, Any] = field(default_factory=dict)


class TooFewWorkers(Exception):
    """Too few workers are left to go on; `left` is their number."""

    def __init__(self, left: int) -> None:
        super().__init__(f"{left} are left")
        self.left = left


class Membership:
    """The workers of a run, by number from 0.

    Args:
        workers: number of workers.
        least: fewest workers of a generation.
        usable: how many of a number of workers the layout can use.
    """

    def __init__(self, workers: int, least: int, usable: Callable[[int], int]) -> None:
        self._least, self._usable = least, usable
        self.states = [MembershipState.STARTING] * workers
        self.generation = Generation(0, (), 0)
        self._reported: dict[int, dict[str, Any]] = {}
        self.is_broken = False

    def rank_of(self, worker: int) -> int | None:
        """A worker's rank in the present generation, also after it has reported; None if it is not in it."""
        is_in = worker in self.generation.workers and self.states[worker] is not MembershipState.STARTING
        return self.generation.workers.index(worker) if is_in else None

    @property
    def leader(self) -> int:
        """Number of the worker of rank 0, whose output is shown [0, 1, …]; 0 before the first generation."""
        return self.generation.workers[0] if self.generation.workers else 0

    @property
    def is_done(self) -> bool:
        """Whether the run is finished, which rank 0 says."""
        return self.states[self.leader] is MembershipState.FINISHED

    def came(self, worker: int) -> None:
        """A worker is ready, and waits."""
        self.states[worker] = MembershipState.WAITING

    def reported(self, worker: int, notes: dict[str, Any]) -> None:
        """A member says that its generation is over; it has rolled its update back, and waits."""
        self.states[worker] = MembershipState.WAITING
        self._reported[worker] = notes
        self.is_broken = True

    def finished(self, worker: int) -> None:
        """A member has completed its work."""
        self.states[worker] = MembershipState.FINISHED

    def died(self, worker: int, *, returns: bool) -> None:
        """A worker's process has ended; with `returns` it is started again."""
        self.is_broken |= self.states[worker] is MembershipState.MEMBER
        self._reported.pop(worker, None)
        self.states[worker] = MembershipState.STARTING if returns else MembershipState.GONE

    def those(self, state: MembershipState) -> list[int]:
        """The workers in this state."""
        return [worker for worker, known in enumerate(self.states) if known is state]

    @property
    def is_wanted(self) -> bool:
        """Whether members should end their generation for a larger one."""
        if self.is_broken:
            return False
        members, waiting = self.those(MembershipState.MEMBER), self.those(MembershipState.WAITING)
        return bool(members and waiting) and self._usable(len(members) + len(waiting)) > len(members)

    @property
    def missed(self) -> list[int]:
        """Members that others, which have reported already, wait for."""
        return self.those(MembershipState.MEMBER) if self._reported else []

    def form(self) -> Generation | None:
        """Form the next generation, which becomes the present one; None while it has to wait for a worker.

        It waits for all members of the present one, and for all starting workers if no worker holds the weights.

        Raises:
            TooFewWorkers: fewer workers than `least` can take part, and none is starting.
        """
        waiting, is_starting = self.those(MembershipState.WAITING), bool(self.those(MembershipState.STARTING))
        if self.those(MembershipState.MEMBER) or (is_starting and not self._reported):
            return None
        size = self._usable(len(waiting)) if waiting else 0
        if size < max(self._least, 1):
            if is_starting:
                return None
            raise TooFewWorkers(len(waiting))
        veterans = sorted(self._reported, key=self.generation.workers.index)
        newcomers = [worker for worker in waiting if worker not in self._reported]
        notes: dict[str, Any] = {}
        for worker in reversed(veterans):
            notes |= self._reported[worker]
        workers = tuple((veterans + newcomers)[:size])
        self.generation = Generation(self.generation.number + 1, workers, min(len(veterans), size), notes)
        for worker in workers:
            self.states[worker] = MembershipState.MEMBER
        self._reported, self.is_broken = {}, False
        return self.generation


RENDEZVOUS_REQUESTED = "called"
"""Why a generation is over that lost no worker, so that another one can join."""


@dataclass
class GenerationFailure:
    """The end of a generation: since when, why, and whether there is an explanation.

    Times are of the monotonic clock [s]; `heard_at` is when the first member reported.
    """

    began_at: float | None = None
    heard_at: float | None = None
    why: str = ""
    is_explained: bool = False

    def explain(self, why: str) -> None:
        """A worker was lost, or is to join: reports of members only follow from that."""
        self._begin(why)
        if not self.is_explained or self.why == RENDEZVOUS_REQUESTED:
            self.why, self.is_explained = why, True

    def report(self, why: str) -> None:
        """A member reports the end."""
        self._begin(why)
        if self.heard_at is None:
            self.heard_at = time.monotonic()

    def heard_s(self) -> float:
        """Time since the first member reported [s]."""
        return 0.0 if self.heard_at is None else time.monotonic() - self.heard_at

    def seconds(self) -> float:
        """Time since it began [s]."""
        return 0.0 if self.began_at is None else time.monotonic() - self.began_at

    def _begin(self, why: str) -> None:
        if self.began_at is None:
            self.began_at, self.why = time.monotonic(), why

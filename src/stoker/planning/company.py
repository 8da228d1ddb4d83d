"""Times of operations where several processes compute on one CPU: they share its memory, and each takes longer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from stoker.planning.time import OperationTimes
from stoker.records import Operation


@runtime_checkable
class Alone(OperationTimes, Protocol):
    """Times of operations on a CPU of which nobody else asks anything."""

    def traffic_seconds(self, operation: Operation) -> float:
        """Time that the operation's bytes take to come and go, at the memory's best rate [s]."""
        ...


@dataclass(frozen=True)
class InCompany:
    """`OperationTimes` of a process among others that do the same.

    `slowdown` is how much longer operations take, by what bounds them, `arithmetic` or `memory`: of an operation's time
    as much counts as memory's as its bytes take to come and go.
    """

    alone: Alone
    slowdown: Mapping[str, float]

    def seconds(self, operation: Operation) -> float:
        """Time of `operation` [s]."""
        seconds = self.alone.seconds(operation)
        traffic = min(seconds, self.alone.traffic_seconds(operation))
        return traffic * self.slowdown.get("memory", 1.0) + (seconds - traffic) * self.slowdown.get("arithmetic", 1.0)

    def relative_error(self, operation: Operation) -> float:
        """One standard deviation of `seconds`, as a fraction of it."""
        return self.alone.relative_error(operation)

"""Times of operations where several processes compute on one CPU: they share its memory, and each takes longer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stoker.planning.time import OperationTimes
from stoker.records import Hardware, Operation

_UNKNOWN_FLOPS_PER_BYTE = 10.0
"""Where a CPU's rates are not known: of those of today."""


@dataclass(frozen=True)
class InCompany:
    """`OperationTimes` of a process among others that do the same.

    `slowdown` is how much longer operations take, by what bounds them, `arithmetic` or `memory`; an operation between
    the two is slowed down by what lies between.
    """

    alone: OperationTimes
    hardware: Hardware
    slowdown: Mapping[str, float]

    def seconds(self, operation: Operation) -> float:
        """Time of `operation` [s]."""
        return self.alone.seconds(operation) * self._factor(operation)

    def relative_error(self, operation: Operation) -> float:
        """One standard deviation of `seconds`, as a fraction of it."""
        return self.alone.relative_error(operation)

    def _factor(self, operation: Operation) -> float:
        arithmetic, memory = self.slowdown.get("arithmetic", 1.0), self.slowdown.get("memory", 1.0)
        num_bytes = operation.bytes_read + operation.bytes_written
        if not operation.flops:
            return memory
        share = operation.flops / (operation.flops + _UNKNOWN_FLOPS_PER_BYTE * num_bytes)
        return memory + (arithmetic - memory) * share

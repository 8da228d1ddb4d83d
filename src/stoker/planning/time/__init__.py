"""How long each operation takes on a device, which need not be here. No torch."""

from __future__ import annotations

from stoker.planning.time.operations import OperationTimes, operation_times

__all__ = ["OperationTimes", "operation_times"]

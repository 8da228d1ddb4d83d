"""The seam between what knows a kind of device and what asks for times: one model of operations per kind."""

from __future__ import annotations

from typing import Protocol

from stoker.records.hardware import Hardware
from stoker.records.trace import Operation


class OperationTimes(Protocol):
    """Times of operations, one after the other on one device."""

    def seconds(self, operation: Operation) -> float:
        """Time on the device [s], queued behind others: on a GPU the host's part in starting it is not in it."""
        ...

    def relative_error(self, operation: Operation) -> float:
        """One standard deviation of `seconds`, as a fraction of it."""
        ...


def operation_times(hardware: Hardware) -> OperationTimes:
    """The model for this device: `cuda` devices by tiles and waves, CPUs by their own.

    Each model is imported when it is asked for: a laptop never loads the GPUs' constants.
    """
    if hardware.device.kind == "cuda":
        from stoker.planning.time.gpu import GpuTimes  # noqa: PLC0415 - loaded only for the kind of device asked for

        return GpuTimes.of(hardware)
    from stoker.planning.time.cpu import CpuTimes  # noqa: PLC0415 - likewise

    return CpuTimes.of(hardware)

"""Moments of a training process: readings of the host's clock, or events in the stream of a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Moments(Protocol):
    """Notes moments, and says later when they were."""

    def now(self) -> Any:
        """This moment."""
        ...

    def seconds(self, moments: list[Any]) -> list[float]:
        """When they were, by the host's monotonic clock [s]; they are not used again."""
        ...


class HostMoments:
    """Moments of the host's monotonic clock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.now = clock

    def seconds(self, moments: list[Any]) -> list[float]:
        """As `Moments.seconds`."""
        return moments


class StreamMoments:
    """Moments at which a GPU comes to what was given to it: events of the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[torch.cuda.Event] = []

    def now(self) -> Any:
        """As `Moments.now`; the GPU is not waited for."""
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, moments: list[Any]) -> list[float]:
        """As `Moments.seconds`; waits for the GPU."""
        anchor = self.now()
        anchor.synchronize()
        at = time.monotonic()
        found = [at - event.elapsed_time(anchor) / 1e3 for event in moments]
        self._free += [*moments, anchor]
        return found


def moments_on(device: torch.device) -> Moments:
    """How moments are noted for work on `device`."""
    return StreamMoments(device) if device.type == "cuda" else HostMoments()

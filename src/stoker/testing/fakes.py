"""A clock that only moves when advanced, and devices that need no hardware."""

from __future__ import annotations

import dataclasses
from typing import Any

from stoker.records import Device
from stoker.units import GIB


class FakeClock:
    """Stands in for `time.monotonic`, `time.time` or `time.perf_counter`: call it for the time [s].

    >>> clock = FakeClock(start_s=100.0, tick_s=0.5)
    >>> clock(), clock()
    (100.0, 100.5)
    >>> clock.advance(60)
    >>> clock()
    161.0
    """

    def __init__(self, start_s: float = 0.0, *, tick_s: float = 0.0) -> None:
        self.now_s = start_s
        self.tick_s = tick_s
        """Time that passes with each call [s], so that a timed block takes a known time."""

    def __call__(self) -> float:
        """The time [s]; the next call comes `tick_s` later."""
        now_s = self.now_s
        self.now_s += self.tick_s
        return now_s

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass; raises ValueError below zero."""
        if seconds < 0:
            raise ValueError(f"time does not go back, got {seconds} s")
        self.now_s += seconds


_LAPTOP = Device(
    name="fake-cpu", kind="cpu", model="Fake CPU", cores=4, memory_bytes=8 * GIB, fast_dtypes=("float32", "bfloat16")
)
_GPU = Device(
    name="fake-gpu",
    kind="cuda",
    model="Fake GPU",
    cores=64,
    memory_bytes=16 * GIB,
    fast_dtypes=("float32", "float16", "bfloat16"),
    driver="fake",
)


def fake_device(**changes: Any) -> Device:
    """A Device with 4 cores and 8 GiB, or with `kind="cuda"` a GPU with 16 GiB; `changes` replace any field.

    >>> fake_device(memory_bytes=2**30, name="tiny").name
    'tiny'
    """
    return dataclasses.replace(_GPU if changes.get("kind") == "cuda" else _LAPTOP, **changes)

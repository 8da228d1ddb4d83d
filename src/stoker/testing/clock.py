"""A clock that stands still until it is told to move."""

from __future__ import annotations


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
        """How much time passes with each call [s]: what is timed then takes a known time."""

    def __call__(self) -> float:
        """The time [s]; the next call comes `tick_s` later."""
        now_s = self.now_s
        self.now_s += self.tick_s
        return now_s

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass; a duration below zero is refused."""
        if seconds < 0:
            raise ValueError(f"time does not go back, got {seconds} s")
        self.now_s += seconds

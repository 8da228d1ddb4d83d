"""Pauses between attempts."""

from __future__ import annotations

from stoker.serving.repository.repository import LONGEST_S, Backoff
from stoker.testing import FakeClock


def test_pauses_grow_to_a_minute() -> None:
    """The first attempt is at once; each failure that follows on its heels doubles the pause, to a minute."""
    backoff, clock = Backoff(), FakeClock()
    pauses = []
    for _ in range(9):
        pauses.append(backoff.pause_s(clock()))
        clock.advance(pauses[-1] + 0.5)
    assert pauses == [0, 1, 2, 4, 8, 16, 32, 60, 60]


def test_what_went_well_for_long_starts_anew() -> None:
    """After more than the longest pause without trouble the next attempt is at once."""
    backoff, clock = Backoff(), FakeClock()
    assert [backoff.pause_s(clock()) for _ in range(3)] == [0, 1, 2]
    clock.advance(2 + LONGEST_S + 1)
    assert backoff.pause_s(clock()) == 0

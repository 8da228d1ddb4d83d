"""How often to save: the published optimum, and the bounds around it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.devices.hardware import (
    CHEAP_SHARE,
    LEAST_INTERVAL_S,
    MTBF_H,
    checkpoint_interval_s,
    daly_interval_s,
    lost_s,
)

HOUR_S = 3600.0


def cost(interval_s: float, blocked_s: float, mtbf_s: float) -> float:
    """The share of the time that checkpoints and failures take, to first order."""
    return blocked_s / interval_s + lost_s(1.0, interval_s, 0.0, mtbf_s)


@given(st.floats(0.1, 100), st.floats(1e5, 1e9))
def test_no_other_interval_loses_less(blocked_s: float, mtbf_s: float) -> None:
    """Where failures are rare relative to saves, half the interval and twice the interval both cost more."""
    interval_s = daly_interval_s(blocked_s, mtbf_s)
    best = cost(interval_s, blocked_s, mtbf_s)
    assert best < cost(interval_s / 2, blocked_s, mtbf_s)
    assert best < cost(2 * interval_s, blocked_s, mtbf_s)


def test_the_rate_of_gpus_is_the_published_one() -> None:
    """512 of them fail once in 99 hours; with a second of waiting that is 14 minutes between checkpoints."""
    each = MTBF_H["cuda"]
    assert each == pytest.approx(50_700, rel=1e-3)
    assert each / 512 == pytest.approx(99, rel=0.01)
    assert daly_interval_s(1.0, each / 512 * HOUR_S) == pytest.approx(14 * 60, rel=0.01)


@given(st.floats(0, 1e3), st.floats(0, 1e4), st.floats(1.0, 1e10))
def test_the_interval_has_its_bounds(blocked_s: float, write_s: float, mtbf_s: float) -> None:
    """Never closer than 30 s or the writing of one; never further than the optimum, where that is further than both."""
    found = checkpoint_interval_s(blocked_s, write_s, mtbf_s)
    assert found >= max(LEAST_INTERVAL_S, write_s) - 0.5
    upper = max(LEAST_INTERVAL_S, write_s, min(daly_interval_s(blocked_s, mtbf_s), blocked_s / CHEAP_SHARE))
    assert found <= upper + 0.5


@given(st.floats(0.01, 100), st.floats(1e3, 1e9), st.integers(2, 10_000))
def test_more_devices_never_save_less_often(blocked_s: float, mtbf_s: float, devices: int) -> None:
    """They fail more often together."""
    assert checkpoint_interval_s(blocked_s, 0.0, mtbf_s / devices) <= checkpoint_interval_s(blocked_s, 0.0, mtbf_s)

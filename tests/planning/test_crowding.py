from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stoker.planning.model.shared_cpu import describe_load, widen_for_load
from tests.planning.trials import forecast_of

FORECAST = forecast_of(10.0)


@given(st.floats(0, 1))
def test_others_widen_every_interval_of_time_and_move_none(share: float) -> None:
    """What was measured is what is known; how it will be is less so."""
    found = widen_for_load(FORECAST, share)
    for name in ("step_s", "samples_per_s", "evaluate_s", "total_s"):
        before, after = getattr(FORECAST, name), getattr(found, name)
        assert after.value == before.value
        assert after.low <= before.low
        assert after.high >= before.high
    assert found.peak_bytes == FORECAST.peak_bytes


def test_the_more_others_use_the_wider() -> None:
    """On four fifths of the CPU: from a fifth of the time to five times."""
    found = widen_for_load(FORECAST, 0.8)
    assert found.total_s.high / FORECAST.total_s.high > 4.9
    assert found.total_s.low / FORECAST.total_s.low < 0.21
    assert widen_for_load(FORECAST, 0.0) == FORECAST


def test_it_is_said_how_much_others_use() -> None:
    """In words for who waits."""
    assert describe_load(0.8).startswith("others use 80% of the CPU: times may be several times as long")
    assert "up to twice as long" in describe_load(0.3)

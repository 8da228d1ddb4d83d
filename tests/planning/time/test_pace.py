from __future__ import annotations

import pytest

from stoker.planning.model.shared_cpu import describe_pace, pace_of, speed_changes
from stoker.records import Pace

THEN = {"product": 1e-3, "sum": 2e-3, "rows": 4e-3}


def test_the_pace_is_how_many_times_as_long_the_same_calls_take() -> None:
    """All anchors a quarter slower: a quarter slower, and no doubt about it."""
    pace = pace_of(THEN, [{name: 1.25 * seconds for name, seconds in THEN.items()}])
    assert pace is not None
    assert pace.factor == pytest.approx(1.25)
    assert pace.deviation == pytest.approx(0.0, abs=1e-9)


def test_a_disturbed_turn_is_outvoted() -> None:
    """One turn of three ten times slower changes no anchor's time."""
    disturbed = [dict(THEN), {name: 10 * seconds for name, seconds in THEN.items()}, dict(THEN)]
    assert speed_changes(THEN, disturbed) == pytest.approx(dict.fromkeys(THEN, 0.0))


def test_less_is_believed_of_what_anchors_disagree_about() -> None:
    """All a fifth slower is believed; about a fifth slower, between nothing and a half, only in part, and doubted."""
    alike = pace_of(THEN, [{name: 1.2 * seconds for name, seconds in THEN.items()}])
    unalike = pace_of(THEN, [{"product": 1e-3, "sum": 2.4e-3, "rows": 6e-3}])
    assert alike is not None
    assert unalike is not None
    assert 1.05 < unalike.factor < alike.factor
    assert alike.factor == pytest.approx(1.2)
    assert unalike.deviation > 0.1 > alike.deviation


def test_without_the_same_calls_there_is_no_pace() -> None:
    """Nothing kept, nothing timed now, or other anchors than those kept."""
    assert pace_of({}, [THEN]) is None
    assert pace_of(THEN, []) is None
    assert pace_of(THEN, [{"something else": 1.0}]) is None


def test_a_change_of_pace_beyond_noise_is_told() -> None:
    """Slower by a quarter, faster by a quarter; a twentieth is not worth a line."""
    for factor in (1.25, 0.75):
        [line] = describe_pace(Pace(factor=factor, deviation=0.0))
        assert f"{factor} times as long" in line
    assert describe_pace(Pace(factor=1.05, deviation=0.0)) == ()

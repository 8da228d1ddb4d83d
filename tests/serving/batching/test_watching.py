"""When an instance counts as hanging, in values."""

from __future__ import annotations

import pytest

from stoker.serving.batching.workers import EngineRun, HangLimits, HangWatch

PATIENCE = HangLimits(least_s=5.0, times=10.0, every_s=1.0)


def _looks(watch: HangWatch, runs: dict[int, EngineRun], start: int, end: int) -> dict[int, float]:
    """The result of the last of several looks, one at each whole second."""
    found: dict[int, float] = {}
    for now in range(start, end):
        found = watch.look(runs, float(now))
    return found


def test_a_run_hangs_once_it_was_seen_for_long_enough() -> None:
    """For five seconds where little was expected, for ten times what was expected where that is more."""
    watch = HangWatch(PATIENCE)
    runs = {0: EngineRun(1, 0.01), 1: EngineRun(1, 0.8)}
    assert _looks(watch, runs, 0, 5) == {}
    assert watch.look(runs, 5.0) == {0: 5.0}
    assert watch.look({1: runs[1]}, 7.0) == {}
    assert watch.look({1: runs[1]}, 8.0) == {1: 8.0}


def test_another_run_begins_anew() -> None:
    """An instance that goes from batch to batch never hangs, nor does one that was idle in between."""
    watch = HangWatch(PATIENCE)
    for now in range(40):
        assert watch.look({0: EngineRun(now // 4, 0.0)}, float(now)) == {}
    watch = HangWatch(PATIENCE)
    assert _looks(watch, {0: EngineRun(1, 0.0)}, 0, 5) == {}
    assert watch.look({}, 5.0) == {}
    assert watch.look({0: EngineRun(1, 0.0)}, 6.0) == {}


def test_time_in_which_nobody_looked_hardly_counts() -> None:
    """A process that was stopped for an hour comes back to engines that were stopped as well."""
    watch = HangWatch(PATIENCE)
    runs = {0: EngineRun(1, 0.0)}
    assert watch.look(runs, 0.0) == {}
    assert watch.look(runs, 3600.0) == {}
    assert watch.look(runs, 3601.0) == {}
    assert watch.look(runs, 3603.0) == {0: pytest.approx(5.0)}

from __future__ import annotations

import pytest

from stoker.loadtesting.serving_limit import batch_rows, delays, instances_and_threads, search
from stoker.records import ServiceSettings
from stoker.records.service import Objective, SettingsTrial

OBJECTIVE = Objective(q=0.99, within_s=0.02)
AXES = (instances_and_threads(4), batch_rows, delays(OBJECTIVE))


def rate_of(settings: ServiceSettings) -> float:
    """Best with 2 instances of 2 threads, batches of 16 and no delay."""
    layout = {(2, 2): 2.0, (4, 1): 1.5, (1, 4): 1.2}.get((settings.instances or 0, settings.threads or 0), 1.0)
    return 100 * layout * {8: 1.5, 16: 2.0, 32: 1.7}.get(settings.max_batch_rows, 1.0) / (1 + settings.max_delay_s)


def attempt(settings: ServiceSettings, must_hold: float) -> SettingsTrial:
    """A trial against that landscape."""
    rate = rate_of(settings)
    return SettingsTrial(settings=settings, rate=rate if rate >= must_hold else 0.0, why="")


def test_the_best_of_all_settings_is_found() -> None:
    """Coordinate by coordinate, each setting tried once, and the search ends by itself."""
    default = SettingsTrial(settings=ServiceSettings(), rate=rate_of(ServiceSettings()), why="")
    trials, is_complete = search(default, AXES, attempt, has_time=lambda: True)
    best = max(trials, key=lambda trial: trial.rate).settings
    assert (best.instances, best.threads, best.max_batch_rows, best.max_delay_s) == (2, 2, 16, 0.0)
    assert is_complete
    assert len({trial.settings for trial in trials}) == len(trials) < 25


@pytest.mark.parametrize("num_trials", [0, 1, 4])
def test_a_search_stops_with_its_time(num_trials: int) -> None:
    """It tries as many as there is time for, and says that it was not complete."""
    left = iter([True] * num_trials)
    default = SettingsTrial(settings=ServiceSettings(), rate=1.0, why="")
    trials, is_complete = search(default, AXES, attempt, has_time=lambda: next(left, False))
    assert len(trials) == num_trials
    assert not is_complete


@pytest.mark.parametrize("cores", [1, 2, 3, 8])
def test_cores_are_never_shared_out_twice(cores: int) -> None:
    """Instances × threads is at most the cores; each way once, one instance with all of them among these."""
    ways = [(one.instances or 0, one.threads or 0) for one in instances_and_threads(cores)(ServiceSettings())]
    assert all(instances * threads <= cores for instances, threads in ways)
    assert (1, cores) in ways
    assert len(set(ways)) == len(ways)

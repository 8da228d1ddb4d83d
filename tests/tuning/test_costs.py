"""The forecast of a study: from a few configurations, with its interval and what is assumed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import optuna
import pytest

from stoker.records import Estimate
from stoker.records.study import PlannedTrial
from stoker.tuning.search_algorithms import pruner_for
from stoker.tuning.study_forecast import START_S, Rungs, expected_share, forecast_study, rungs_of


def seconds(value: float, spread: float = 0.1) -> Estimate:
    """A forecast of a time."""
    return Estimate(value=value, low=value * (1 - spread), high=value * (1 + spread), unit="s", basis="measured here")


PLANNED = [PlannedTrial(parameters={"w": width}, total_s=seconds(value)) for width, value in ((8, 10.0), (64, 90.0))]


def test_a_study_takes_its_trials_one_after_another() -> None:
    """The mean of what was planned, for each trial, between all being the smallest and all the largest."""
    found = forecast_study(PLANNED, trials=10, parallel=1, pruner="none", rungs=rungs_of(100, 2700))
    assert found.total_s is not None
    assert found.total_s.value == pytest.approx(10 * (50 + START_S))
    assert (found.total_s.low, found.total_s.high) == pytest.approx((10 * (9 + START_S), 10 * (99 + START_S)))
    assert found.pruned_s == found.total_s


def test_trials_at_once_take_turns_in_rounds() -> None:
    """Ten trials, four at once: three rounds."""
    found = forecast_study(PLANNED, trials=10, parallel=4, pruner="none", rungs=rungs_of(100, 2700))
    assert found.total_s is not None
    assert found.total_s.value == pytest.approx(3 * (50 + START_S))


def test_trials_that_share_a_gpu_do_not_make_it_faster() -> None:
    """Which is said."""
    found = forecast_study(PLANNED, trials=10, parallel=4, pruner="none", rungs=rungs_of(1, 9), gpus=1)
    assert found.total_s is not None
    assert found.total_s.value == pytest.approx(10 * (50 + START_S))
    assert any("share a GPU" in line for line in found.assumptions)


@pytest.mark.parametrize(("parallel", "rounds", "is_shared"), [(4, 3, False), (8, 3, True), (1, 10, False)])
def test_trials_on_gpus_of_their_own_do_not_wait_for_each_other(parallel: int, rounds: int, is_shared: bool) -> None:
    """Four GPUs take ten trials in three rounds; that they are shared is said where they are."""
    found = forecast_study(PLANNED, trials=10, parallel=parallel, pruner="none", rungs=rungs_of(1, 9), gpus=4)
    assert found.total_s is not None
    assert found.total_s.value == pytest.approx(rounds * (50 + START_S))
    assert any("share a GPU" in line for line in found.assumptions) == is_shared


def test_pruning_saves_what_its_rungs_say_and_it_is_called_an_assumption() -> None:
    """Of ASHA with rungs at 100, 300 and 900 of 2700 samples, a seventh is trained; starting is not saved."""
    found = forecast_study(PLANNED, trials=90, parallel=1, pruner="asha", rungs=rungs_of(100, 2700))
    share = (100 + 200 / 3 + 600 / 9 + 1800 / 27) / 2700
    assert expected_share("asha", rungs_of(100, 2700), 90) == pytest.approx(share)
    assert found.pruned_s is not None
    assert found.pruned_s.value == pytest.approx(90 * (START_S + share * 50))
    assert "asha trains 11% of all samples if one trial in 3 goes on at each rung" in found.assumptions[-1]


@pytest.mark.parametrize("rungs", [rungs_of(100, 2700), rungs_of(1, 10), rungs_of(1, 1000)], ids=str)
def test_hyperband_deals_trials_to_brackets_as_optuna_does(rungs: Rungs) -> None:
    """The share that is trained is that of each bracket, by how many of a thousand trials Optuna puts into it."""
    pruner = pruner_for("hyperband", rungs)
    study = optuna.create_study(pruner=pruner)
    trial = study.ask()
    trial.report(0.0, 0)
    pruner.prune(study, study.trials[0])
    trials = [optuna.trial.create_trial(state=optuna.trial.TrialState.RUNNING) for _ in range(1000)]
    for number, one in enumerate(trials):
        one.number = number
    counts = Counter(pruner._get_bracket_id(study, one) for one in trials)
    found = expected_share("hyperband", rungs, 10**6)
    shares = [expected_share("asha", replace(rungs, first=first), 10**6) for first in (*rungs.places, rungs.total)]
    assert found == pytest.approx(sum(counts[at] * share for at, share in enumerate(shares)) / 1000, abs=0.03)


def test_members_of_a_population_are_trained_to_their_end_and_start_anew_for_each_interval() -> None:
    """Nothing is pruned; a start counts once an interval."""
    alone = forecast_study(PLANNED, trials=8, parallel=1, pruner="none", rungs=rungs_of(1, 9))
    found = forecast_study(PLANNED, trials=8, parallel=1, pruner="none", rungs=rungs_of(1, 9), intervals=4)
    assert alone.total_s is not None
    assert found.total_s is not None
    assert found.total_s.value == pytest.approx(alone.total_s.value + 8 * 3 * START_S)
    assert found.assumptions[-1] == "8 members, each trained to its end in 4 intervals, with a start for each"


def test_what_could_not_be_planned_is_told() -> None:
    """And what the median will prune is not known."""
    planned = [*PLANNED, PlannedTrial(parameters={"w": 4096}, problem="does not fit")]
    found = forecast_study(planned, trials=10, parallel=1, pruner="median", rungs=rungs_of(1, 9))
    assert found.pruned_s is None
    assert any(line.startswith("1 could not be planned") for line in found.assumptions)
    nothing = forecast_study(planned[-1:], trials=10, parallel=1, pruner="asha", rungs=rungs_of(1, 9))
    assert nothing.total_s is None


def test_rungs_are_within_a_trial_and_not_before_its_first_evaluation() -> None:
    """Three rungs below the end where there are evaluations enough; fewer where there are not."""
    assert rungs_of(100, 2700).places == (100, 300, 900)
    assert rungs_of(1000, 2700).places == (1000,)
    assert rungs_of(2700, 2700).places == ()
    assert rungs_of(1, 0).places == ()
    assert expected_share("asha", rungs_of(2700, 2700), 10) == 1.0
    assert expected_share("hyperband", rungs_of(100, 2700), 10) > expected_share("asha", rungs_of(100, 2700), 10)

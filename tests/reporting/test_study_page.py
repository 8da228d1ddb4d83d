"""The page of a study: what is in it, whatever the study has so far; user text is escaped."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest

from stoker.records import Estimate
from stoker.records.study import Parameter, PlannedTrial, StudyForecast, StudyResult, StudySettings, StudyTrial
from stoker.reporting.study_page import best_so_far, render_study, study_charts

SPACE = (
    Parameter(name="lr", kind="log", low=1e-3, high=1.0),
    Parameter(name="kind", kind="choice", choices=("sgd", "<b>")),
)
SETTINGS = StudySettings(
    name="tune-some",
    job="some.py",
    job_digest="0" * 64,
    fixed={"epochs": "3"},
    space=SPACE,
    objective="valid/accuracy",
    higher_is_better=True,
    sampler="tpe",
    pruner="asha",
    seed=0,
    on="here",
    first_samples=100,
    total_samples=300,
)


def trial(number: int, value: float | None, **changes: Any) -> StudyTrial:
    """A trial that is finished, unless something else is said."""
    known: dict[str, Any] = {
        "number": number,
        "state": "finished",
        "parameters": {"lr": 0.01 * (number + 1), "kind": "<b>"},
        "value": value,
        "samples": 300,
        "wall_s": 2.0,
        "began_at": 1.0,
        "ended_at": 10.0 - number,
        "curve": ((100, 0.5), (300, value or 0.4)),
    }
    return StudyTrial(**(known | changes))


TRIALS = (
    trial(0, 0.8),
    trial(1, 0.9),
    trial(2, 0.5, state="pruned", reason="asha at 100 samples", samples=100, curve=((100, 0.5),)),
    trial(3, None, state="failed", reason="no such file <x>", curve=(), samples=0),
    trial(4, None, state="running", ended_at=None),
)
ESTIMATE = Estimate(value=60.0, low=30.0, high=90.0, unit="s", basis="measured here")
FORECAST = StudyForecast(
    trials=5,
    parallel=1,
    planned=(PlannedTrial(parameters={"lr": 0.1}, total_s=ESTIMATE),),
    total_s=ESTIMATE,
    pruned_s=None,
    energy_kwh=None,
    cost_usd=None,
    assumptions=("something is assumed",),
)
RESULT = StudyResult(settings=SETTINGS, trials=TRIALS, importance={"lr": 0.75, "kind": 0.25}, forecast=FORECAST)


def test_trials_are_ranked_best_first() -> None:
    """Finished ones by value, then pruned, running, failed; lower is better where that is so."""
    assert [one.number for one in RESULT.ranked] == [1, 0, 2, 4, 3]
    assert RESULT.best == TRIALS[1]
    assert RESULT.samples == 1000


def test_the_best_so_far_counts_trials_as_they_ended() -> None:
    """With all that was spent on each: failed and pruned ones too; what runs is not counted yet."""
    assert best_so_far(RESULT) == [(400, 6.0, 0.9), (700, 8.0, 0.9)]


def test_the_page_has_it_all_and_loads_nothing() -> None:
    """The best settings, every trial with its reason, figures, forecast; nothing from elsewhere; user text escaped."""
    page = render_study(RESULT)
    for words in (
        "90.00 %",
        "trial 1: lr=0.02",
        "asha at 100 samples",
        "no such file &lt;x&gt;",
        "something is assumed",
        "1 min",
        "the test data was not used",
        "epochs=3",
    ):
        assert words in page, words
    assert "<b>sgd" not in page
    assert "kind=<b>" not in page
    assert not re.search(r'(src|href)="https?:', page.partition("<script")[0])


def test_what_was_expected_of_trials_at_once_is_not_held_against_their_sum() -> None:
    """A forecast of four at once says so with the time of all trials."""
    page = render_study(dataclasses.replace(RESULT, forecast=dataclasses.replace(FORECAST, parallel=4)))
    assert "every trial to its end, 4 at once" in page
    assert "training time of all trials so far, added up" in page


def test_every_figure_is_drawn_and_is_json() -> None:
    """Four of them, each with a title and words."""
    charts = study_charts(RESULT)
    assert [chart.key for chart in charts] == ["study-best", "study-curves", "study-coordinates", "study-importance"]
    for chart in charts:
        assert json.loads(chart.figure)["data"]
        assert chart.words


@pytest.mark.slow
def test_of_many_trials_the_best_are_drawn_and_it_is_said() -> None:
    """The best of 600 is the last one: its curve is there; the table says what it leaves out."""
    many = tuple(trial(number, number / 1000) for number in range(600))
    chart = study_charts(dataclasses.replace(RESULT, trials=many))[1]
    assert chart.words == "200 trials of 600, the best, 0 of them pruned"
    assert "trial 599" in {trace["name"] for trace in json.loads(chart.figure)["data"]}
    assert "Trials, best first: 500 of 600" in render_study(dataclasses.replace(RESULT, trials=many))


def test_an_objective_beyond_one_is_not_drawn_in_per_cent() -> None:
    """A user's own accuracy of up to 100 would be cut off at 1."""
    trials = tuple(trial(number, 80.0 + number, curve=((100, 70.0), (300, 80.0))) for number in range(2))
    for chart in study_charts(dataclasses.replace(RESULT, trials=trials))[:2]:
        assert json.loads(chart.figure)["layout"]["yaxis"]["tickformat"] == ""


@pytest.mark.parametrize("trials", [(), TRIALS[3:], TRIALS[:1]], ids=["none", "none finished", "one"])
def test_a_study_that_has_little_has_a_page(trials: tuple[StudyTrial, ...]) -> None:
    """Figures that would show nothing are left out."""
    page = render_study(StudyResult(settings=SETTINGS, trials=trials))
    assert "tune-some" in page
    assert ("no trial is finished yet" in page) == (not trials or trials[0].number == 3)


def test_a_population_shows_how_its_best_came_about() -> None:
    """A table of what led to it, curves that begin where their parents' end, and its own whole of samples."""
    settings = dataclasses.replace(SETTINGS, sampler="pbt", members=2, intervals=2)
    trials = (
        trial(0, 0.5, state="handed on", member=0, interval=0, samples=150, curve=((150, 0.5),)),
        trial(1, 0.4, state="handed on", member=1, interval=0, samples=150, curve=((150, 0.4),)),
        trial(2, 0.6, member=0, interval=1, parent=0, samples=150, curve=((300, 0.6),)),
        trial(3, 0.7, member=1, interval=1, parent=0, samples=150, curve=((300, 0.7),)),
    )
    result = StudyResult(settings=settings, trials=trials)
    text = render_study(result)
    course = text.partition("How the best came about")[2].partition("Trials, best first")[0]
    assert [number for number in ("0.01", "0.02", "0.03", "0.04") if f">{number}<" in course] == ["0.01", "0.04"]
    assert "2 members, 2 intervals" in text
    assert "100% of training every trial to its end" in text
    (curves,) = (chart for chart in study_charts(result) if chart.key == "study-curves")
    traces = {one["name"]: one for one in json.loads(curves.figure)["data"]}
    assert (list(traces["trial 3"]["x"]), list(traces["trial 3"]["y"])) == ([150.0, 300.0], [0.5, 0.7])
    assert traces["trial 0, handed on"]["line"] == traces["trial 3"]["line"] != traces["trial 2"]["line"]

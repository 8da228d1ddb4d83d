"""The page's figures."""

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.records import Estimate, Event
from stoker.reporting.figures import charts, thinned
from tests.reporting import story

POINTS = st.lists(st.tuples(st.floats(0, 1e6), st.floats(-1e6, 1e6)), min_size=1, max_size=400).map(sorted)


@given(POINTS, st.integers(4, 50))
def test_thinning_keeps_the_extremes_and_the_order(points: list[tuple[float, float]], most: int) -> None:
    """A spike of one point is still seen; few points are left as they are."""
    kept = thinned(points, most)
    if len(points) <= most:
        assert kept == points
        return
    assert len(kept) <= most + 2
    assert kept == sorted(kept, key=lambda point: point[0])
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    heights, kept_heights = [y for _, y in points], [y for _, y in kept]
    assert (min(kept_heights), max(kept_heights)) == (min(heights), max(heights))


def test_a_run_has_the_charts_its_events_allow() -> None:
    """Learning, throughput, learning rate and memory of a whole run; no chart of a metric nobody evaluated."""
    keys = [chart.key for chart in charts(story.report(story.whole_run()))]
    assert keys == ["loss", "metric-accuracy", "throughput", "learning-rate", "memory"]
    young = [chart.key for chart in charts(story.report(story.young_run(), status="unfinished"))]
    assert young == ["loss", "throughput", "learning-rate", "memory"]
    assert charts(story.report([], has_plan=False)) == ()


def test_a_resumed_run_draws_no_sample_twice() -> None:
    """The loss curve runs forward through the resume, which is marked."""
    loss = charts(story.report(story.killed_and_resumed()))[0]
    figure = json.loads(loss.figure)
    x = figure["data"][0]["x"]
    assert x == sorted(x)
    assert figure["layout"]["shapes"][0]["x0"] == 135_648


def test_a_loss_that_is_not_finite_is_left_out() -> None:
    """A nan would be no JSON; the finite rest is drawn."""
    events = [
        Event(kind="progress", at=0.0, fields={"samples": n, "loss": loss}) for n, loss in enumerate((1.0, "nan", 2.0))
    ]
    figure = json.loads(charts(story.report(events, has_plan=False))[0].figure)
    assert figure["data"][0]["y"] == [1.0, 2.0]


def test_a_single_point_is_a_marker() -> None:
    """A line of one point cannot be seen."""
    figure = json.loads(charts(story.report(story.young_run()[:3]))[0].figure)
    assert figure["data"][0]["mode"] == "markers"


def test_the_best_evaluation_is_marked() -> None:
    """A ring round the best of the metric, at its position, with its value."""
    chart = charts(story.report(story.whole_run()))[1]
    figure = json.loads(chart.figure)
    ring = next(trace for trace in figure["data"] if trace["marker"]["symbol"] == "circle-open")
    assert ring["x"] == [270_000]
    assert "best 93.26 %" in chart.words


def evaluations(*values: float, name: str = "accuracy") -> list[Event]:
    """A metric's values in one evaluation after another, the last of which was the best."""
    return [
        Event(kind="evaluated", at=0.0, fields={"split": "valid", "samples": at, "metrics": {name: value, "loss": 1.0},
                                                "best": at == len(values)})
        for at, value in enumerate(values, 1)
    ]  # fmt: skip


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_metric_that_is_never_a_number_costs_the_page_nothing(value: float) -> None:
    """It has no chart, though an evaluation that was the best has it; the loss has one."""
    drawn = charts(story.report(evaluations(value, value), has_plan=False))
    assert [chart.key for chart in drawn] == ["loss"]


def test_a_best_evaluation_without_a_number_has_no_ring() -> None:
    """The others are drawn."""
    chart = charts(story.report(evaluations(0.5, math.nan), has_plan=False))[1]
    assert [trace["y"] for trace in json.loads(chart.figure)["data"]] == [[0.5]]
    assert "best" not in chart.words


@pytest.mark.parametrize(("values", "tick_format"), [((0.5, 0.9), ".1%"), ((50.0, 90.0), "")])
def test_an_axis_is_in_per_cent_where_the_values_are_fractions(values: tuple[float, ...], tick_format: str) -> None:
    """A user's own accuracy of up to 100 is neither cut off at 1 nor shown as 9000 %."""
    chart = charts(story.report(evaluations(*values), has_plan=False))[1]
    assert json.loads(chart.figure)["layout"]["yaxis"]["tickformat"] == tick_format


def test_every_metric_has_a_chart() -> None:
    """However many there are."""
    events = [
        Event(kind="evaluated", at=0.0, fields={"samples": at, "metrics": {f"m{one}": 1.0 for one in range(9)}})
        for at in (1, 2)
    ]
    assert len(charts(story.report(events, has_plan=False))) == 9


def test_names_from_users_are_text_in_a_figure() -> None:
    """Plotly reads a subset of HTML in names; a metric's name is not HTML."""
    events = [Event(kind="evaluated", at=0.0, fields={"split": "<b>x", "samples": 1, "metrics": {"<i>m": 1.0}})]
    chart = charts(story.report(events, has_plan=False))[0]
    assert json.loads(chart.figure)["data"][0]["name"] == "&lt;b&gt;x"


def test_a_forecast_that_holds_nearly_anything_flattens_no_curve() -> None:
    """Its band would reach far beyond the measured rate; its ends are said."""
    whole = story.report(story.whole_run())
    wide = Estimate(value=1400.0, low=243.0, high=358_912.0, unit="samples/s", basis="measured here")
    chosen = story.decision().chosen
    chosen = dataclasses.replace(chosen, forecast=dataclasses.replace(chosen.forecast, samples_per_s=wide))
    other = dataclasses.replace(whole, decision=dataclasses.replace(story.decision(), candidates=(chosen,)))
    drawn, left_out = (next(one for one in charts(report) if one.key == "throughput") for report in (whole, other))
    assert json.loads(drawn.figure)["layout"]["shapes"]
    assert not json.loads(left_out.figure)["layout"].get("shapes")
    assert left_out.words.endswith("forecast band 243 to 358,912, too wide to draw")

"""The page's figures."""

import json

from hypothesis import given
from hypothesis import strategies as st

from stoker.records import Event
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


def test_names_from_users_are_text_in_a_figure() -> None:
    """Plotly reads a subset of HTML in names; a metric's name is not HTML."""
    events = [Event(kind="evaluated", at=0.0, fields={"split": "<b>x", "samples": 1, "metrics": {"<i>m": 1.0}})]
    chart = charts(story.report(events, has_plan=False))[0]
    assert json.loads(chart.figure)["data"][0]["name"] == "&lt;b&gt;x"

"""Charts that few runs have, and a run's own plot."""

from __future__ import annotations

import dataclasses
import html
import re

from hypothesis import given
from hypothesis import strategies as st

from stoker.records import Event, Report
from stoker.records.run import ExampleSet
from stoker.reporting.figures import plot_report
from stoker.reporting.folded_log import FoldedLog, thinned
from stoker.reporting.run_page import render_html
from tests.reporting import story
from tests.reporting.test_html import documents


def told(*more: dict[str, object]) -> Report:
    """The story's report with fields added to its progress events, in turn."""
    report = story.report(story.whole_run())
    changed = []
    number = 0
    for event in report.events:
        fields = dict(event.fields)
        if event.kind == "progress":
            fields |= more[number % len(more)]
            number += 1
        if event.kind == "evaluated":
            fields["metrics"] = {**fields["metrics"], "f1[0]": 0.9, "f1[1]": 0.4}
        changed.append(dataclasses.replace(event, fields=fields))
    return dataclasses.replace(report, events=tuple(changed))


def test_a_gradients_norm_is_in_the_data_where_it_is_told() -> None:
    """Of the events that tell it; the others leave a gap."""
    found = documents(render_html(told({"grad_norm": 2.5}, {"grad_norm": 0.5}, {})))
    assert found["series"]["samples"]["progress"]["grad_norm"][:4] == [2.5, 0.5, None, 2.5]
    assert "grad_norm" not in documents(render_html(told({})))["series"]["samples"]["progress"]


def test_rates_of_several_groups_have_a_line_each() -> None:
    """Only where they differ, which events then tell; a resume takes them back too."""
    rates = documents(render_html(told({"lrs": [0.1, 0.01]})))["series"]["samples"]["rates"]
    assert [set(group["y"]) for group in rates] == [{0.1}, {0.01}]
    log = FoldedLog()
    progress = [Event(kind="progress", at=0.0, fields={"samples": at, "lrs": [at, 2 * at]}) for at in (1, 2, 3)]
    log.take([*progress, Event(kind="resumed", at=0.0, fields={"samples": 1}), progress[1]])
    assert [table.rows.tolist() for table in log.rates] == [[[1, 1], [2, 2]], [[1, 2], [2, 4]]]


def test_results_by_class_are_bars_and_not_lines() -> None:
    """Of the last evaluation, with the lowest named; the metric's usual charts leave them out."""
    page = render_html(told({}))
    section = page.partition("<h2>F1 by class</h2>")[2].partition("</section>")[0]
    assert "lowest 0.4 for class 1" in section
    assert re.findall(r'class="of-class" width="(.*?)"', section) == ["162.0", "72.0"]
    assert re.findall("<b>(.*?)</b>", section) == ["90.00 %", "40.00 %"]
    assert not [name for name in documents(page)["state"]["evaluations"] if "f1" in name]


def test_classes_go_by_their_names_where_they_have_any() -> None:
    """As in the confusion matrix; names that are too few, or not one for each, are left aside."""
    for classes, shown in ((("cat", "<dog>"), ["cat", "<dog>"]), (("cat",), ["0", "1"]), (("cat", "cat"), ["0", "1"])):
        page = render_html(told({}), [ExampleSet(split="valid", num_samples=2, classes=classes)])
        assert f"for class {html.escape(shown[1])}</p>" in page
        assert re.findall(r'<li><span title="(.*?)">', page) == [html.escape(name) for name in shown]


def test_a_plot_has_losses_above_and_metrics_below() -> None:
    """Every measure of every split, by name."""
    figure = plot_report(told({}))
    names = {trace.name: trace.yaxis for trace in figure.data}
    assert {"train loss", "valid loss", "valid accuracy", "test accuracy"} <= set(names)
    assert names["train loss"] == "y"
    assert names["valid accuracy"] == "y2"
    assert figure.layout.title.text == story.NAME


def test_a_plot_of_a_run_that_told_nothing_is_empty() -> None:
    """As one that was killed while it planned."""
    report = dataclasses.replace(story.report(story.whole_run()), events=())
    assert len(plot_report(report).data) == 0
    only_train = (Event(kind="progress", at=0.0, fields={"samples": 5, "loss": 1.0}),)
    assert len(plot_report(dataclasses.replace(report, events=only_train)).data) == 1


def test_names_from_users_are_text_in_a_figure() -> None:
    """Plotly reads a subset of HTML in names; a metric's name is not HTML."""
    events = (Event(kind="evaluated", at=0.0, fields={"split": "<b>x", "samples": 1, "metrics": {"<i>m": 1.0}}),)
    report = dataclasses.replace(story.report(story.whole_run()), events=events)
    assert plot_report(report).data[0].name == "&lt;b&gt;x &lt;i&gt;m"


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

"""Figures beside the usual ones, and a run's own plot."""

from __future__ import annotations

import dataclasses
import html
import json

from stoker.records import Event, Report
from stoker.records.run import ExampleSet
from stoker.reporting.figures import habit_charts, plot_report
from stoker.reporting.run_page import render_html
from tests.reporting import story


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


def test_a_gradients_norm_has_a_chart_where_it_is_told() -> None:
    """Of the events that tell it; with its highest and its last value in words."""
    report = told({"grad_norm": 2.5}, {"grad_norm": 0.5}, {})
    chart = next(chart for chart in habit_charts(report) if chart.key == "gradient-norm")
    assert "highest 2.5" in chart.words
    assert set(json.loads(chart.figure)["data"][0]["y"]) == {2.5, 0.5}
    assert not [chart for chart in habit_charts(story.report(story.whole_run())) if chart.key == "gradient-norm"]


def test_rates_of_several_groups_have_a_line_each() -> None:
    """Only where they differ, which events then tell."""
    chart = next(chart for chart in habit_charts(told({"lrs": [0.1, 0.01]})) if chart.key == "learning-rates")
    lines = json.loads(chart.figure)["data"]
    assert [line["name"] for line in lines] == ["group 0", "group 1"]
    assert set(lines[1]["y"]) == {0.01}


def test_results_by_class_are_bars_and_not_lines() -> None:
    """Of the last evaluation, with the lowest named; the metric's usual charts leave them out."""
    report = told({})
    chart = next(chart for chart in habit_charts(report) if chart.key == "class-f1")
    bars = json.loads(chart.figure)["data"][0]
    assert (bars["x"], bars["y"]) == (["0", "1"], [0.9, 0.4])
    assert "lowest 0.4 for class 1" in chart.words
    assert "F1[0]" not in render_html(report)


def test_classes_go_by_their_names_where_they_have_any() -> None:
    """As in the confusion beside it; names that are too few, or not one for each, are left aside."""
    for classes, shown in ((("cat", "<dog>"), ["cat", "<dog>"]), (("cat",), ["0", "1"]), (("cat", "cat"), ["0", "1"])):
        chart = next(chart for chart in habit_charts(told({}), classes) if chart.key == "class-f1")
        assert json.loads(chart.figure)["data"][0]["x"] == list(map(html.escape, shown))  # plotly takes names for HTML
        assert chart.words.endswith(f"for class {shown[1]}")
    page = render_html(told({}), [ExampleSet(split="valid", num_samples=2, classes=("cat", "dog"))])
    assert "lowest 0.4 for class dog" in page


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

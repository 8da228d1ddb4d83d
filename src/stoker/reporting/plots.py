"""Figures beside the usual ones: the gradient's norm, rates by group, results by class; and a run's own plot."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from stoker.records import Event, Report
from stoker.reporting.figures import MOST_POINTS, Chart, as_chart, blank_figure, line_trace, thinned
from stoker.reporting.history import evaluation_metrics, finite, live_history, of_kind, text
from stoker.reporting.palette import light
from stoker.reporting.wording import are_fractions, is_of_class

COLOURS = ("blue", "ember", "teal", "violet", "amber", "good", "bad", "grey")
"""Of curves that share a figure, in this order."""

Point = tuple[float, float]


def habit_charts(report: Report, classes: Sequence[str] = ()) -> tuple[Chart, ...]:
    """The charts of what not every run tells; `classes` are the names of the targets' classes, if they have any."""
    events = live_history(report.events)
    drawn = [_gradient_norm(events), _rates(events), *_by_class(events, classes)]
    return tuple(chart for chart in drawn if chart is not None)


def plot(report: Report) -> Any:
    """A plotly figure of a run: its losses above, its metrics below (if it has any), over samples."""
    events = live_history(report.events)
    curves = {"train loss": series(of_kind(events, "progress"), "loss"), **evaluated(events)}
    losses = {name: points for name, points in curves.items() if name.endswith("loss") and points}
    metrics = {name: points for name, points in curves.items() if not name.endswith("loss") and points}
    rows = [group for group in (losses, metrics) if group]
    figure = make_subplots(rows=max(1, len(rows)), cols=1, shared_xaxes=True, vertical_spacing=0.08)
    for row, group in enumerate(rows, start=1):
        for number, (name, points) in enumerate(group.items()):
            is_train = name == "train loss"
            shown = thinned(points, MOST_POINTS)
            trace = line_trace(shown, name, COLOURS[number % len(COLOURS)], markers=not is_train)
            figure.add_trace(trace, row=row, col=1)
    figure.update_xaxes(title_text="samples", row=max(1, len(rows)), col=1)
    figure.update_layout(title=report.run.name, template="plotly_white", height=300 * max(1, len(rows)))
    return figure


def _gradient_norm(events: Sequence[Event]) -> Chart | None:
    points = series(of_kind(events, "progress"), "grad_norm")
    if not points:
        return None
    figure = blank_figure("samples", from_zero=True)
    figure.add_trace(line_trace(thinned(points), "gradient norm", "violet", width=1.6))
    peak = max(y for _, y in points)
    words = f"before clipping, of one update each; highest {peak:.3g}, last {points[-1][1]:.3g}"
    return as_chart("gradient-norm", "Gradient norm", words, figure)


def _rates(events: Sequence[Event]) -> Chart | None:
    """The learning rates of all groups of parameters, where they differ."""
    told = [event for event in of_kind(events, "progress") if isinstance(event.fields.get("lrs"), list)]
    if not told:
        return None
    figure = blank_figure("samples", from_zero=True)
    count = max(len(event.fields["lrs"]) for event in told)
    for group in range(count):
        points = [(finite(event, "samples") or 0.0, float(event.fields["lrs"][group]))
                  for event in told if len(event.fields["lrs"]) > group]  # fmt: skip
        figure.add_trace(line_trace(thinned(points), f"group {group}", COLOURS[group % len(COLOURS)], width=1.6))
    return as_chart("learning-rates", "Learning rates by group", f"{count} groups of parameters", figure)


def _by_class(events: Sequence[Event], classes: Sequence[str]) -> list[Chart]:
    """The last values of each metric that has one for every class, as bars."""
    evaluations = of_kind(events, "evaluated")
    if not evaluations:
        return []
    last = evaluations[-1]
    values: dict[str, dict[str, float]] = {}
    for name, value in evaluation_metrics(last).items():
        if is_of_class(name):
            base, _, of_class = name.partition("[")
            values.setdefault(base, {})[of_class.rstrip("]")] = value
    return [_bars(base, _named(of, classes), text(last, "split", "valid")) for base, of in values.items()]


def _named(values: dict[str, float], classes: Sequence[str]) -> dict[str, float]:
    """Values under the names of their classes, where there is one of its own for each."""
    if len(set(classes)) != len(values) or set(values) != {str(number) for number in range(len(values))}:
        return values
    return {classes[int(number)]: value for number, value in values.items()}


def _bars(name: str, values: dict[str, float], split: str) -> Chart:
    figure = blank_figure("class", y_format=".0%" if are_fractions(name, values.values()) else "", from_zero=True)
    names = [html.escape(one) for one in values]
    figure.add_trace(go.Bar(x=names, y=list(values.values()), marker={"color": light("teal")}, name=name))
    figure.update_layout(xaxis={"type": "category"}, hovermode="closest")
    lowest = min(values, key=lambda one: values[one])
    words = f"{split}, at the end; lowest {values[lowest]:.4g} for class {lowest}"
    return as_chart(f"class-{name}", f"{name.replace('_', ' ').capitalize()} by class", words, figure)


def series(events: Sequence[Event], field: str) -> list[Point]:
    """A field of events over samples, where both are finite."""
    pairs = ((finite(event, "samples"), finite(event, field)) for event in events)
    return [(x, y) for x, y in pairs if x is not None and y is not None]


def evaluated(events: Sequence[Event]) -> dict[str, list[Point]]:
    """Every measure of every split over samples; those by class are left out."""
    found: dict[str, list[Point]] = {}
    for event in of_kind(events, "evaluated"):
        at = finite(event, "samples")
        for name, value in evaluation_metrics(event).items():
            if at is not None and abs(value) < float("inf") and not is_of_class(name):
                found.setdefault(f"{text(event, 'split', 'valid')} {name}", []).append((at, value))
    return found

"""The page's figures: learning curves, throughput, learning rate, memory; drawn light, repainted by the page when dark.

A point is one event of the live history; more than `MOST_POINTS` of them are thinned, keeping each stretch's extremes.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from stoker.records import Event, Report
from stoker.reporting.history import best_evaluation, evaluation_metrics, finite, live_history, of_kind, text
from stoker.reporting.palette import light
from stoker.reporting.wording import are_fractions, format_metric, format_samples, is_of_class, is_wide

MOST_POINTS = 600
_LINEAR_UP_TO = 6.0

Point = tuple[float, float]


@dataclass(frozen=True)
class Chart:
    """A figure with its title, what it shows in words, and its Plotly JSON."""

    key: str
    title: str
    words: str
    figure: str


def charts(report: Report) -> tuple[Chart, ...]:
    """The charts a run's events allow, learning first; none for a run that never got to train."""
    events = live_history(report.events)
    drawn = [_loss(events), *_metrics(events), _throughput(events, report), _learning_rate(events), _memory(events)]
    return tuple(chart for chart in drawn if chart is not None)


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most `most` + 2 points: the ends, and the lowest and the highest of each run of points, in order of x."""
    if len(points) <= most:
        return list(points)
    stretch = -(-len(points) // (most // 2))
    kept: list[Point] = []
    for start in range(0, len(points), stretch):
        part = points[start : start + stretch]
        ends = {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
        kept += sorted(ends)
    return [*([] if kept[0] == points[0] else [points[0]]), *kept, *([] if kept[-1] == points[-1] else [points[-1]])]


_SET_COLOURS = ("ember", "violet", "blue")
"""Of validation sets, in turn."""


def _loss(events: Sequence[Event]) -> Chart | None:
    train = _points(of_kind(events, "progress"), lambda event: finite(event, "loss"))
    valid = {split: points for split, points in _by_split("loss", events).items() if split != "test"}
    if not train and not valid:
        return None
    ticks = _logarithmic_ticks([*train, *(point for points in valid.values() for point in points)])
    figure = blank_figure("samples", log_ticks=ticks)
    if train:
        figure.add_trace(line_trace(thinned(train), "train, running", "blue", width=1.6))
    for number, (split, points) in enumerate(valid.items()):
        figure.add_trace(line_trace(points, split, _SET_COLOURS[number % len(_SET_COLOURS)], markers=True))
    _mark_resumes(figure, events)
    words = [f"train {train[0][1]:.4g} to {train[-1][1]:.4g}"] if train else []
    words += [f"{split} at its lowest {min(y for _, y in points):.4g}" for split, points in valid.items()]
    return as_chart("loss", "Loss, logarithmic" if ticks else "Loss", "; ".join(words), figure)


def _metrics(events: Sequence[Event]) -> list[Chart]:
    evaluations = of_kind(events, "evaluated")
    names = dict.fromkeys(name for event in evaluations for name in evaluation_metrics(event)
                          if name != "loss" and not is_of_class(name))  # fmt: skip
    found = [_metric(name, events) for name in names]
    return [chart for chart in found if chart is not None]


def _metric(name: str, events: Sequence[Event]) -> Chart | None:
    """One metric over the evaluations: valid as a line, its best ringed, test as a diamond at the end."""
    shown = _by_split(name, events)
    if not shown:
        return None
    is_in_per_cent = are_fractions(name, (y for points in shown.values() for _, y in points))
    figure = blank_figure("samples", y_format=".1%" if is_in_per_cent else "")
    words: list[str] = []
    for number, (split, points) in enumerate(shown.items()):
        is_test = split == "test"
        colour = "teal" if is_test else _SET_COLOURS[number % len(_SET_COLOURS)]
        figure.add_trace(line_trace(points, split, colour, markers=True, symbol="diamond" if is_test else "circle"))
        words.append(f"{split} {format_metric(name, points[-1][1])}")
    best = best_evaluation(events)
    value = evaluation_metrics(best).get(name) if best else None
    if best is not None and value is not None and math.isfinite(value):
        _ring(figure, (finite(best, "samples") or 0.0, value), f"best {format_metric(name, value)}")
        words.append(f"best {format_metric(name, value)} at {format_samples(finite(best, 'samples') or 0)} samples")
    _mark_resumes(figure, events)
    return as_chart(f"metric-{name}", name.replace("_", " ").capitalize(), "; ".join(words), figure)


def _by_split(name: str, events: Sequence[Event]) -> dict[str, list[Point]]:
    """The points of a metric, of each split that has any."""
    found: dict[str, list[Point]] = {}
    for event in of_kind(events, "evaluated"):
        points = _points([event], lambda one: evaluation_metrics(one).get(name))
        found.setdefault(text(event, "split", "valid"), []).extend(points)
    return {split: points for split, points in found.items() if points}


def _throughput(events: Sequence[Event], report: Report) -> Chart | None:
    points = _points(of_kind(events, "progress"), lambda event: finite(event, "samples_per_s"), over_time=True)
    if not points:
        return None
    shown, unit = _in_time_units(points)
    figure = blank_figure(unit, from_zero=True)
    words = f"last {points[-1][1]:,.0f}"
    if report.decision is not None:
        expected = report.decision.chosen.forecast.samples_per_s
        words += f"; forecast band {expected.low:,.0f} to {expected.high:,.0f}"
        if is_wide(expected):  # a band far beyond the curve would flatten it
            words += ", too wide to draw"
        else:
            figure.add_hrect(y0=expected.low, y1=expected.high, fillcolor=light("amber"), opacity=0.18, line_width=0)
    figure.add_trace(line_trace(thinned(shown), "samples/s", "blue", width=1.6))
    return as_chart("throughput", "Throughput, samples/s", words, figure)


def _learning_rate(events: Sequence[Event]) -> Chart | None:
    points = _points(of_kind(events, "progress"), lambda event: finite(event, "lr"))
    if not points:
        return None
    figure = blank_figure("samples", from_zero=True)
    figure.add_trace(line_trace(thinned(points), "learning rate", "blue", width=2))
    peak = max(y for _, y in points)
    return as_chart("learning-rate", "Learning rate", f"highest {peak:.3g}, last {points[-1][1]:.3g}", figure)


def _memory(events: Sequence[Event]) -> Chart | None:
    points = _points(of_kind(events, "progress"), lambda event: finite(event, "resident_bytes"), over_time=True)
    if not points:
        return None
    shown, unit = _in_time_units([(x, y / 2**30) for x, y in points])
    figure = blank_figure(unit, from_zero=True)
    figure.add_trace(line_trace(thinned(shown), "GiB", "blue", width=2))
    peak = max(y for _, y in shown)
    return as_chart("memory", "Memory, GiB", f"highest {peak:.2f}", figure)


def _points(events: Sequence[Event], value: Callable[[Event], float | None], *, over_time: bool = False) -> list[Point]:
    """(samples or wall seconds, value) of the events that have both."""
    pairs = ((finite(event, "wall_s" if over_time else "samples"), value(event)) for event in events)
    return [(x, y) for x, y in pairs if x is not None and y is not None and abs(y) < float("inf")]


def _in_time_units(points: Sequence[Point]) -> tuple[list[Point], str]:
    """Points over seconds as points over the unit people would use for the whole."""
    longest = points[-1][0]
    size, unit = (1, "s") if longest < 180 else (60, "min") if longest < 3 * 3600 else (3600, "h")
    return [(x / size, y) for x, y in points], unit


def _logarithmic_ticks(points: Sequence[Point]) -> list[float]:
    """1, 2, 5, 10, … across values so far apart that only a logarithmic axis shows the small ones; else empty."""
    low, high = min(y for _, y in points), max(y for _, y in points)
    if low <= 0 or high <= _LINEAR_UP_TO * low:
        return []
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if high < 1000 * low else (1,)
    ticks = [float(f"{step}e{decade}") for decade in decades for step in steps]
    return [tick for tick in ticks if low / 2 <= tick <= high * 2]


def blank_figure(x_title: str, *, y_format: str = "", from_zero: bool = False, log_ticks: Sequence[float] = ()) -> Any:
    """A figure without content, in the page's fonts and colours; logarithmic upwards if it is given ticks for that."""
    font = {"family": "system-ui, -apple-system, Segoe UI, Roboto, sans-serif", "size": 12, "color": light("muted")}
    axis = {"zeroline": False, "linecolor": light("line"), "tickcolor": light("line"), "automargin": True}
    hover = {"bgcolor": light("surface"), "bordercolor": light("line"), "font": {"color": light("ink"), "size": 12}}
    return go.Figure(
        layout={
            "template": "none",
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": font,
            "margin": {"l": 8, "r": 14, "t": 8, "b": 8},
            "showlegend": False,
            "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"},
            "hovermode": "x unified",
            "hoverlabel": hover,
            "dragmode": False,
            "xaxis": {**axis, "title": {"text": x_title, "standoff": 6}, "showgrid": False, "ticks": "outside",
                      "ticklen": 4, "nticks": 7, "tickangle": 0, "rangemode": "tozero", "hoverformat": ",.6~g"},
            "yaxis": {**axis, "gridcolor": light("grid"), "showline": False, "exponentformat": "e",
                      "tickformat": y_format, "hoverformat": ".2%" if y_format else ".4~g",
                      "autorangeoptions": {"clipmin": 0, "clipmax": 1} if y_format else {},
                      "rangemode": "tozero" if from_zero else "normal",
                      **({"type": "log", "tickvals": list(log_ticks)} if log_ticks else {"nticks": 6})},
        }
    )  # fmt: skip


def line_trace(
    points: Sequence[Point],
    name: str,
    colour: str,
    *,
    width: float = 2.0,
    markers: bool = False,
    symbol: str = "circle",
) -> Any:
    """A trace; a single point is a marker, since a line of one point cannot be seen."""
    mode = "lines+markers" if markers else "lines"
    return go.Scatter(
        x=[x for x, _ in points],
        y=[y for _, y in points],
        name=html.escape(name),
        mode=mode if len(points) > 1 else "markers",
        line={"color": light(colour), "width": width},
        cliponaxis=not markers,
        marker={"color": light(colour), "size": 10 if symbol == "diamond" else 7, "symbol": symbol},
    )


def _ring(figure: Any, best: Point, words: str) -> None:
    """A ring round the best point, with its value below it, on the side where there is more room."""
    x, y = best
    ring = {"size": 15, "symbol": "circle-open", "color": light("good"), "line": {"width": 2.5}}
    is_late = x > 0.6 * max(position for trace in figure.data for position in trace.x)
    figure.add_trace(
        go.Scatter(x=[x], y=[y], mode="markers", marker=ring, hoverinfo="skip", showlegend=False, cliponaxis=False)
    )
    figure.add_annotation(
        x=x, y=y, text=html.escape(words), showarrow=False, yshift=-20, xanchor="right" if is_late else "left",
        font={"color": light("good")},
    )  # fmt: skip


def _mark_resumes(figure: Any, events: Sequence[Event]) -> None:
    """A dotted line where the run was taken up again."""
    for event in of_kind(events, "resumed"):
        position = finite(event, "samples")
        if position:
            line = {"color": light("grey"), "width": 1, "dash": "dot"}
            note = {"text": "resumed", "font": {"size": 11}, "textangle": 0, "yanchor": "top"}
            figure.add_vline(x=position, line=line, annotation=note, annotation_position="top right")


def as_chart(key: str, title: str, words: str, figure: Any) -> Chart:
    """A figure with its key in the page, its title, and what it shows in words; several traces have a legend."""
    num_named = sum(trace.showlegend is not False for trace in figure.data)
    figure.update_layout(showlegend=num_named > 1)
    return Chart(key, title, words, str(figure.to_json()))

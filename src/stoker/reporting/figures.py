"""The page's figures: learning curves, throughput, memory, results by class; drawn light, repainted when it is dark.

A point is one event of the live history; more than `MOST_POINTS` of them are thinned, keeping each stretch's extremes.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
from markupsafe import Markup
from plotly.offline import get_plotlyjs
from plotly.subplots import make_subplots

from stoker.records import Event, Report, dumps
from stoker.records.run import ExampleSet
from stoker.reporting import pages
from stoker.reporting.history import best_evaluation, evaluation_metrics, finite, live_history, of_kind, text
from stoker.reporting.pages import light
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


def render_with_figures(template: str, charts: Sequence[Chart], **values: object) -> str:
    """A page with its figures' data and what draws them: about 5 MB of plotly.js, which no page without figures has.

    A content security policy in the page forbids it to load anything, and lets run only the scripts whose SHA-256 it
    names: plotly.js (MIT licence) and what draws the figures with it. Source: W3C, Content Security Policy Level 3,
    section 6.7.3, "Does element match source list for type and source?".
    """
    figures = ",".join(f"{dumps(chart.key)}:{chart.figure}" for chart in charts)
    data = f'{{"figures":{{{figures}}},"dark":{dumps(pages.repainting(), indent=None)}}}'
    scripts = _programs() if charts else ()
    return pages.render(template, policy=_policy(), scripts=scripts, figures=pages.script_json(data), **values)


@functools.cache
def _programs() -> tuple[Markup, ...]:
    """The scripts that run in a page; the figures' data does not run."""
    return Markup(get_plotlyjs()), pages.resource("page.js")  # noqa: S704 - plotly's own


@functools.cache
def _policy() -> str:
    """What a page may do: run these scripts and no other, draw with styles in it, show images in it."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in _programs())
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"


def charts(report: Report) -> tuple[Chart, ...]:
    """The charts a run's events allow, learning first; none for a run that never got to train."""
    events = live_history(report.events)
    measures = evaluated(events)
    names = dict.fromkeys(name for _, name in measures if name != "loss")
    return (
        *_loss(events, _of_splits("loss", measures)),
        *(_metric(name, _of_splits(name, measures), events) for name in names),
        *_speed_and_memory(of_kind(events, "progress"), report),
    )


def _of_splits(name: str, measures: Mapping[tuple[str, str], list[Point]]) -> dict[str, list[Point]]:
    return {split: points for (split, measure), points in measures.items() if measure == name}


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


def _loss(events: Sequence[Event], held_out: Mapping[str, list[Point]]) -> Iterator[Chart]:
    train = series(of_kind(events, "progress"), "loss")
    valid = {split: points for split, points in held_out.items() if split != "test"}
    if not train and not valid:
        return
    ticks = _logarithmic_ticks([*train, *(point for points in valid.values() for point in points)])
    figure = blank_figure("samples", log_ticks=ticks)
    if train:
        figure.add_trace(line_trace(thinned(train), "train, running", "blue", width=1.6))
    for number, (split, points) in enumerate(valid.items()):
        figure.add_trace(line_trace(points, split, _SET_COLOURS[number % len(_SET_COLOURS)], markers=True))
    _mark_resumes(figure, events)
    words = [f"train {train[0][1]:.4g} to {train[-1][1]:.4g}"] if train else []
    words += [f"{split} at its lowest {min(y for _, y in points):.4g}" for split, points in valid.items()]
    yield as_chart("loss", "Loss, logarithmic" if ticks else "Loss", "; ".join(words), figure)


def _metric(name: str, shown: Mapping[str, list[Point]], events: Sequence[Event]) -> Chart:
    """One metric over the evaluations: valid as a line, its best ringed, test as a diamond at the end."""
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


def _speed_and_memory(progress: Sequence[Event], report: Report) -> Iterator[Chart]:
    if rates := series(progress, "samples_per_s", over="wall_s"):
        shown, unit = _in_time_units(rates)
        figure, words = blank_figure(unit, from_zero=True), f"last {rates[-1][1]:,.0f}"
        if report.decision is not None:
            expected = report.decision.chosen.forecast.samples_per_s
            words += f"; forecast band {expected.low:,.0f} to {expected.high:,.0f}"
            if is_wide(expected):  # a band far beyond the curve would flatten it
                words += ", too wide to draw"
            else:
                band = {"y0": expected.low, "y1": expected.high, "fillcolor": light("amber")}
                figure.add_hrect(**band, opacity=0.18, line_width=0)
        figure.add_trace(line_trace(thinned(shown), "samples/s", "blue", width=1.6))
        yield as_chart("throughput", "Throughput, samples/s", words, figure)
    if rates := series(progress, "lr"):
        figure, peak = blank_figure("samples", from_zero=True), max(y for _, y in rates)
        figure.add_trace(line_trace(thinned(rates), "learning rate", "blue"))
        yield as_chart("learning-rate", "Learning rate", f"highest {peak:.3g}, last {rates[-1][1]:.3g}", figure)
    if held := series(progress, "resident_bytes", over="wall_s"):
        shown, unit = _in_time_units([(x, y / 2**30) for x, y in held])
        figure, peak = blank_figure(unit, from_zero=True), max(y for _, y in shown)
        figure.add_trace(line_trace(thinned(shown), "GiB", "blue"))
        yield as_chart("memory", "Memory, GiB", f"highest {peak:.2f}", figure)


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


def as_chart(key: str, title: str, words: str, figure: Any, *, has_legend: bool = True) -> Chart:
    """A figure with its key in the page, its title, and what it shows in words; several traces may have a legend."""
    num_named = sum(trace.showlegend is not False for trace in figure.data)
    figure.update_layout(showlegend=has_legend and num_named > 1)
    return Chart(key, title, words, str(figure.to_json()))


COLOURS = ("blue", "ember", "teal", "violet", "amber", "good", "bad", "grey")
"""Of curves that share a figure, in this order."""


def habit_charts(report: Report, classes: Sequence[str] = ()) -> tuple[Chart, ...]:
    """The charts that few runs have; `classes` are the names of the targets' classes, if they have any."""
    events = live_history(report.events)
    progress = of_kind(events, "progress")
    return (*_gradient_norm(progress), *_rates(progress), *_by_class(events, classes))


def plot_report(report: Report) -> Any:
    """A plotly figure of a run: its losses above, its metrics below (if it has any), over samples."""
    drawn = curves(report)
    losses = {name: points for name, points in drawn.items() if name.endswith("loss")}
    metrics = {name: points for name, points in drawn.items() if not name.endswith("loss")}
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


def _gradient_norm(progress: Sequence[Event]) -> Iterator[Chart]:
    if points := series(progress, "grad_norm"):
        figure, peak = blank_figure("samples", from_zero=True), max(y for _, y in points)
        figure.add_trace(line_trace(thinned(points), "gradient norm", "violet", width=1.6))
        words = f"before clipping, of one update each; highest {peak:.3g}, last {points[-1][1]:.3g}"
        yield as_chart("gradient-norm", "Gradient norm", words, figure)


def _rates(progress: Sequence[Event]) -> Iterator[Chart]:
    """The learning rates of all groups of parameters, where they differ."""
    reports = [event for event in progress if isinstance(event.fields.get("lrs"), list)]
    count = max((len(event.fields["lrs"]) for event in reports), default=0)
    figure = blank_figure("samples", from_zero=True)
    for group in range(count):
        points = [(finite(event, "samples") or 0.0, float(event.fields["lrs"][group]))
                  for event in reports if len(event.fields["lrs"]) > group]  # fmt: skip
        figure.add_trace(line_trace(thinned(points), f"group {group}", COLOURS[group % len(COLOURS)], width=1.6))
    if reports:
        yield as_chart("learning-rates", "Learning rates by group", f"{count} groups of parameters", figure)


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
    return [_bars(base, of, classes, text(last, "split", "valid")) for base, of in values.items()]


def _bars(name: str, values: dict[str, float], classes: Sequence[str], split: str) -> Chart:
    """One bar for each class, under the class's name where every class has its own, else under its number."""
    if len(set(classes)) == len(values) and set(values) == {str(number) for number in range(len(values))}:
        values = {classes[int(number)]: value for number, value in values.items()}
    figure = blank_figure("class", y_format=".0%" if are_fractions(name, values.values()) else "", from_zero=True)
    figure.add_trace(
        go.Bar(x=list(map(html.escape, values)), y=list(values.values()), marker={"color": light("teal")}, name=name)
    )
    figure.update_layout(xaxis={"type": "category"}, hovermode="closest")
    lowest = min(values, key=values.__getitem__)
    words = f"{split}, at the end; lowest {values[lowest]:.4g} for class {lowest}"
    return as_chart(f"class-{name}", f"{name.replace('_', ' ').capitalize()} by class", words, figure)


def series(events: Sequence[Event], field: str, *, over: str = "samples") -> list[Point]:
    """A field of events over samples or `wall_s`, where both are finite."""
    pairs = ((finite(event, over), finite(event, field)) for event in events)
    return [(x, y) for x, y in pairs if x is not None and y is not None]


def evaluated(events: Sequence[Event]) -> dict[tuple[str, str], list[Point]]:
    """By (split, measure) all that was measured, over samples; what is measured by class is left out."""
    found: dict[tuple[str, str], list[Point]] = {}
    for event in of_kind(events, "evaluated"):
        samples = finite(event, "samples")
        for name, value in evaluation_metrics(event).items():
            if samples is not None and math.isfinite(value) and not is_of_class(name):
                found.setdefault((text(event, "split", "valid"), name), []).append((samples, value))
    return found


def curves(report: Report) -> dict[str, list[Point]]:
    """All that has points over samples: `train loss`, and `valid accuracy` and the like."""
    events = live_history(report.events)
    train = series(of_kind(events, "progress"), "loss")
    held_out = {f"{split} {name}": points for (split, name), points in evaluated(events).items()}
    return ({"train loss": train} if train else {}) | held_out


_MOST_LABELLED = 20
"""Of more classes cells have no numbers in them, only when pointed at."""


def confusion_chart(examples: ExampleSet) -> Chart | None:
    """The matrix, a row for each class of the targets, by its share of that class; None where there is none."""
    counts = examples.confusion
    if counts is None:
        return None
    # An axis would merge two classes of one name: then their numbers are shown.
    is_named = len(examples.classes) == len(counts) == len(set(examples.classes))
    classes = list(examples.classes) if is_named else [str(number) for number in range(len(counts))]
    names = [html.escape(name) for name in classes]
    totals = [sum(row) for row in counts]
    shares = [[cell / total if total else 0.0 for cell in row] for row, total in zip(counts, totals, strict=True)]
    figure = blank_figure("found")
    figure.add_trace(
        go.Heatmap(
            z=shares, x=names, y=names, customdata=counts, zmin=0.0, zmax=1.0, showscale=False, xgap=1, ygap=1,
            colorscale=[[0.0, light("grid")], [1.0, light("blue")]],
            text=[[f"{cell:,}" if cell else "" for cell in row] for row in counts],
            texttemplate="%{text}" if len(counts) <= _MOST_LABELLED else "",
            hovertemplate="%{customdata:,} of %{y} taken for %{x} (%{z:.1%})<extra></extra>",
        )
    )  # fmt: skip
    category: dict[str, Any] = {"type": "category", "nticks": len(counts), "tickvals": names}
    figure.update_layout(
        hovermode="closest",
        xaxis=category | {"rangemode": "normal", "hoverformat": ""},
        yaxis=category | {"title": {"text": "wanted"}, "autorange": "reversed", "hoverformat": "", "showgrid": False},
    )
    return as_chart(f"confusion-{examples.split}", f"Confusion, {examples.split}", _words(examples, classes), figure)


def _words(examples: ExampleSet, names: list[str]) -> str:
    """The pair of classes that is confused most often."""
    counts = examples.confusion or ()
    pairs = [(cell, row, column) for row, cells in enumerate(counts) for column, cell in enumerate(cells)
             if row != column and cell]  # fmt: skip
    if not pairs:
        return "no class is taken for another"
    cell, row, column = max(pairs, key=lambda pair: (pair[0], -pair[1], -pair[2]))
    return f"most often {names[row]} taken for {names[column]}, {cell:,} times"

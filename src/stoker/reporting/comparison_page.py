"""Runs in one page: the curves of each measure, over samples and over training time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stoker.records import Report
from stoker.reporting.figures import COLOURS, Chart, as_chart, blank_figure, evaluated, line_trace, series, thinned
from stoker.reporting.history import finite, live_history, of_kind, samples_done
from stoker.reporting.markup import Markup, element, escaped, section, table
from stoker.reporting.run_page import figure_grid, page
from stoker.reporting.wording import are_fractions, format_metrics, format_samples
from stoker.units import format_seconds

Point = tuple[float, float]


def render_side_by_side(reports: Sequence[Report]) -> str:
    """An HTML page of about 5 MB, nearly all of it plotly.js, that needs nothing else."""
    names = [one.run.name for one in reports]
    curves = []
    for report in reports:
        events = live_history(report.events)
        measured = {"train loss": series(of_kind(events, "progress"), "loss"), **evaluated(events)}
        curves.append({name: points for name, points in measured.items() if points})
    # What was measured once, such as the test at the end, is in the table above.
    measures = list(dict.fromkeys(name for one in curves for name, points in one.items() if len(points) > 1))
    by_samples = [_chart(measure, names, curves, None) for measure in measures]
    clocks = [_clock(one) for one in reports]
    by_time = [_chart(measure, names, curves, clocks) for measure in measures]
    parts = [
        element("header", element("h1", escaped(" · ".join(names)))),
        _outcomes(reports),
        figure_grid("Over samples", by_samples),
        figure_grid("Over training time", by_time),
        element("footer", escaped("Made by Stoker; figures by plotly.js. This file loads nothing.")),
    ]
    return page("Runs side by side", parts, (*by_samples, *by_time))


def _outcomes(reports: Sequence[Report]) -> Markup:
    rows = [
        [escaped(word) for word in (one.run.name, one.run.status, format_samples(samples_done(one)),
                                    format_seconds(one.run.wall_s), format_metrics(one.run.metrics))]
        for one in reports
    ]  # fmt: skip
    return section("What came of them", table(("run", "status", "samples", "time", "metrics"), rows))


def _clock(report: Report) -> tuple[list[float], list[float]]:
    """Samples, and the seconds trained until then; rising."""
    points = sorted(
        (samples, seconds)
        for event in of_kind(live_history(report.events), "progress")
        if (samples := finite(event, "samples")) is not None and (seconds := finite(event, "wall_s")) is not None
    )
    return [samples for samples, _ in points], [seconds for _, seconds in points]


def _chart(
    measure: str,
    names: Sequence[str],
    curves: Sequence[dict[str, list[Point]]],
    clocks: Sequence[tuple[list[float], list[float]]] | None,
) -> Chart:
    """One measure of all runs that have it; with `clocks`, over seconds, interpolated between progress events."""
    values = (y for of in curves for _, y in of.get(measure, ()))
    figure = blank_figure("samples" if clocks is None else "training time [s]",
                          y_format=".0%" if are_fractions(measure.rsplit(maxsplit=1)[-1], values) else "")  # fmt: skip
    lasts = []
    for number, (name, of) in enumerate(zip(names, curves, strict=True)):
        points = of.get(measure, [])
        if clocks is not None:  # a run without times has no place over time
            points = [(float(np.interp(x, *clocks[number])), y) for x, y in points if clocks[number][0]]
        if points:
            colour = COLOURS[number % len(COLOURS)]
            figure.add_trace(line_trace(thinned(points), name, colour, markers=measure != "train loss"))
            lasts.append(f"{name} {points[-1][1]:.4g}")
    key = f"{measure.replace(' ', '-')}-{'samples' if clocks is None else 'time'}"
    return as_chart(key, measure.capitalize(), f"last: {', '.join(lasts)}", figure)

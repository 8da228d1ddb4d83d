"""Several runs side by side: one HTML file that needs nothing else, no network, no file."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stoker.records import Report
from stoker.reporting import figures, history, wording
from stoker.reporting.folded_log import thinned
from stoker.units import format_seconds


def render_side_by_side(reports: Sequence[Report]) -> str:
    """An HTML page of about 5 MB, nearly all of it plotly.js, that needs nothing else."""
    names = [report.run.name for report in reports]
    drawn = [figures.curves(report) for report in reports]
    # What was measured once, such as the test at the end, is in the table above.
    measures = list(dict.fromkeys(name for curves in drawn for name, points in curves.items() if len(points) > 1))
    by_samples = [_chart(measure, names, drawn, None) for measure in measures]
    clocks = [_clock(report) for report in reports]
    by_time = [_chart(measure, names, drawn, clocks) for measure in measures]
    outcomes = [
        (
            report.run.name,
            report.run.status,
            wording.format_samples(history.samples_done(report)),
            format_seconds(report.run.wall_s),
            wording.format_metrics(report.run.metrics),
        )
        for report in reports
    ]
    return figures.render_with_figures(
        "side_by_side",
        [*by_samples, *by_time],
        title="Runs side by side",
        names=names,
        outcomes=outcomes,
        by_samples=by_samples,
        by_time=by_time,
    )


def _clock(report: Report) -> tuple[list[float], list[float]]:
    """Samples, and the seconds trained until then; rising."""
    points = sorted(figures.series(history.of_kind(history.live_history(report.events), "progress"), "wall_s"))
    return [samples for samples, _ in points], [seconds for _, seconds in points]


def _chart(
    measure: str,
    names: Sequence[str],
    drawn: Sequence[dict[str, list[figures.Point]]],
    clocks: Sequence[tuple[list[float], list[float]]] | None,
) -> figures.Chart:
    """One measure of all runs that have it; with `clocks`, over seconds, interpolated between progress events."""
    values = (y for of in drawn for _, y in of.get(measure, ()))
    is_in_per_cent = wording.are_fractions(measure.rsplit(maxsplit=1)[-1], values)
    x_title = "samples" if clocks is None else "training time [s]"
    figure = figures.blank_figure(x_title, y_format=".0%" if is_in_per_cent else "")
    lasts = []
    for index, (name, of) in enumerate(zip(names, drawn, strict=True)):
        points = of.get(measure, [])
        if clocks is not None:  # a run without times has no place over time
            points = [(float(np.interp(x, *clocks[index])), y) for x, y in points if clocks[index][0]]
        if points:
            colour = figures.COLOURS[index % len(figures.COLOURS)]
            figure.add_trace(figures.line_trace(thinned(points), name, colour, markers=measure != "train loss"))
            lasts.append(f"{name} {points[-1][1]:.4g}")
    key = f"{measure.replace(' ', '-')}-{'samples' if clocks is None else 'time'}"
    return figures.as_chart(key, measure.capitalize(), f"last: {', '.join(lasts)}", figure)

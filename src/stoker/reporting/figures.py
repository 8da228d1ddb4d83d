"""Plotly's figures of studies and of several runs, and a run's plot; drawn light, repainted when it is dark.

A point is one event of the live history; very many are thinned, keeping each stretch's extremes.
"""

from __future__ import annotations

import functools
import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
from markupsafe import Markup
from plotly.offline import get_plotlyjs
from plotly.subplots import make_subplots

from stoker.records import Event, Report, dumps
from stoker.reporting import pages
from stoker.reporting.colours import light, repainting
from stoker.reporting.folded_log import thinned
from stoker.reporting.history import evaluation_metrics, finite, live_history, of_kind, text
from stoker.reporting.wording import is_of_class

Point = tuple[float, float]


@dataclass(frozen=True)
class Chart:
    """A figure with its title, what it shows in words, and its Plotly JSON."""

    key: str
    title: str
    words: str
    figure: str


def render_with_figures(template: str, charts: Sequence[Chart], **values: object) -> str:
    """A page with its figures' data and what draws them: about 5 MB of plotly.js (MIT licence), if it has figures."""
    figures = ",".join(f"{dumps(chart.key)}:{chart.figure}" for chart in charts)
    data = f'{{"figures":{{{figures}}},"dark":{dumps(repainting(), indent=None)}}}'
    return pages.render_with_scripts(template, _programs() if charts else (), data, values)


@functools.cache
def _programs() -> tuple[Markup, ...]:
    """The scripts that run in a page; the figures' data does not run."""
    return Markup(get_plotlyjs()), pages.resource("page.js")  # noqa: S704 - plotly's own


def blank_figure(x_title: str, *, y_format: str = "", from_zero: bool = False) -> Any:
    """A figure without content, in the page's fonts and colours."""
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
            "xaxis": {
                **axis,
                "title": {"text": x_title, "standoff": 6},
                "showgrid": False,
                "ticks": "outside",
                "ticklen": 4,
                "nticks": 7,
                "tickangle": 0,
                "rangemode": "tozero",
                "hoverformat": ",.6~g",
            },
            "yaxis": {
                **axis,
                "gridcolor": light("grid"),
                "showline": False,
                "exponentformat": "e",
                "tickformat": y_format,
                "hoverformat": ".2%" if y_format else ".4~g",
                "autorangeoptions": {"clipmin": 0, "clipmax": 1} if y_format else {},
                "rangemode": "tozero" if from_zero else "normal",
                "nticks": 6,
            },
        }
    )


def line_trace(points: Sequence[Point], name: str, colour: str, *, width: float = 2.0, markers: bool = False) -> Any:
    """A trace; a single point is a marker, since a line of one point cannot be seen."""
    mode = "lines+markers" if markers else "lines"
    return go.Scatter(
        x=[x for x, _ in points],
        y=[y for _, y in points],
        name=html.escape(name),
        mode=mode if len(points) > 1 else "markers",
        line={"color": light(colour), "width": width},
        cliponaxis=not markers,
        marker={"color": light(colour), "size": 7, "symbol": "circle"},
    )


def as_chart(key: str, title: str, words: str, figure: Any, *, has_legend: bool = True) -> Chart:
    """A figure with its key in the page, its title, and what it shows in words; several traces may have a legend."""
    num_named = sum(trace.showlegend is not False for trace in figure.data)
    figure.update_layout(showlegend=has_legend and num_named > 1)
    return Chart(key, title, words, str(figure.to_json()))


COLOURS = ("blue", "ember", "teal", "violet", "amber", "good", "bad", "grey")
"""Colours of curves that share a figure, in this order."""


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
            shown = thinned(points)
            trace = line_trace(shown, name, COLOURS[number % len(COLOURS)], markers=not is_train)
            figure.add_trace(trace, row=row, col=1)
    figure.update_xaxes(title_text="samples", row=max(1, len(rows)), col=1)
    figure.update_layout(title=report.run.name, template="plotly_white", height=300 * max(1, len(rows)))
    return figure


def series(events: Sequence[Event], field: str) -> list[Point]:
    """A field of events over samples, where both are finite."""
    pairs = ((finite(event, "samples"), finite(event, field)) for event in events)
    return [(x, y) for x, y in pairs if x is not None and y is not None]


def evaluated(events: Sequence[Event]) -> dict[tuple[str, str], list[Point]]:
    """By (split, measure) all that was measured, over samples; what is measured by class is left out."""
    points: dict[tuple[str, str], list[Point]] = {}
    for event in of_kind(events, "evaluated"):
        samples = finite(event, "samples")
        for name, value in evaluation_metrics(event).items():
            if samples is not None and math.isfinite(value) and not is_of_class(name):
                points.setdefault((text(event, "split", "valid"), name), []).append((samples, value))
    return points


def curves(report: Report) -> dict[str, list[Point]]:
    """All that has points over samples: `train loss`, and `valid accuracy` and the like."""
    events = live_history(report.events)
    train = series(of_kind(events, "progress"), "loss")
    held_out = {f"{split} {name}": points for (split, name), points in evaluated(events).items()}
    return ({"train loss": train} if train else {}) | held_out

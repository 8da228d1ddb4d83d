"""A run's report as one HTML file that needs nothing else: no network, no other file.

A content security policy in the page forbids it to load anything, and lets run only the scripts whose SHA-256 it names:
plotly.js (MIT licence), which is inside once, and what draws the figures with it. Source: W3C, Content Security Policy
Level 3, section 6.7.3, "Does element match source list for type and source?".
"""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Sequence
from importlib import resources

from plotly.offline import get_plotlyjs

from stoker.records import Report, dumps
from stoker.records.examples import ExampleSet
from stoker.reporting import sections
from stoker.reporting.bottlenecks import bottleneck_section
from stoker.reporting.confusion import confusion_chart
from stoker.reporting.figures import Chart, charts
from stoker.reporting.kernel_section import profiled
from stoker.reporting.markup import Markup, element, escaped, joined, script_json, section
from stoker.reporting.palette import repainting, style_variables
from stoker.reporting.plots import habit_charts
from stoker.reporting.predictions import predictions
from stoker.reporting.rank_section import ranks_together

_POLICY = "default-src 'none'; script-src {}; style-src 'unsafe-inline'; img-src data: blob:"


def render_html(report: Report, examples: Sequence[ExampleSet] = ()) -> str:
    """The report as a page of about 5 MB, nearly all of it plotly.js; a run without any chart needs no plotly.js.

    `examples` are samples of held-out sets, and what the trained weights made of them.
    """
    confused = [chart for one in examples if (chart := confusion_chart(one)) is not None]
    drawn = (
        *charts(report),
        *habit_charts(report, next((one.classes for one in examples if one.classes), ())),
        *confused,
    )
    body = joined(
        [
            sections.headline(report),
            sections.failure(report),
            _figures("Learning", [chart for chart in drawn if _is_learning(chart)]),
            _figures("Running", [chart for chart in drawn if not _is_learning(chart) and chart not in confused]),
            _figures("Confusion", confused),
            predictions(examples),
            bottleneck_section(report),
            ranks_together(report),
            profiled(report),
            sections.time_spent(report),
            sections.forecast_beside_measured(report),
            sections.plan_and_why(report),
            sections.contract(report),
            sections.timeline(report),
            sections.surroundings(report),
            _footer(),
        ]
    )
    return _document(report.run.name, element("main", body), _scripts(drawn))


def page(title: str, parts: Sequence[Markup], drawn: Sequence[Chart] = ()) -> str:
    """A page of its own, of parts that hold `drawn` as `figure_grid` lays them out."""
    return _document(title, element("main", *parts), _scripts(drawn))


def figure_grid(title: str, drawn: Sequence[Chart]) -> Markup:
    """A titled grid of figures, for `page`; nothing where there are none."""
    return _figures(title, drawn)


def _document(title: str, body: Markup, scripts: Markup) -> str:
    style = f"{style_variables()}{_resource('page.css')}"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escaped(_policy())}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escaped(title)} · Stoker</title><style>{style}</style></head><body>{body}{scripts}</body></html>\n"
    )


def _is_learning(chart: Chart) -> bool:
    return chart.key == "loss" or chart.key.startswith(("metric-", "class-"))


def _figures(title: str, drawn: Sequence[Chart]) -> Markup:
    """A grid of figures; each has its words for those who do not see it, or print it before it is drawn."""
    if not drawn:
        return Markup("")
    return section(title, element("div", *(_figure(chart) for chart in drawn), css=f"figures n{min(3, len(drawn))}"))


def _figure(chart: Chart) -> Markup:
    caption = element("figcaption", element("b", escaped(chart.title)), element("span", escaped(chart.words)))
    label = f"{chart.title}: {chart.words}"
    return element("figure", caption, element("div", css="plot", id=chart.key, role="img", aria_label=label))


def _scripts(drawn: Sequence[Chart]) -> Markup:
    if not drawn:
        return Markup("")
    figures = ",".join(f"{dumps(chart.key)}:{chart.figure}" for chart in drawn)
    data = f'{{"figures":{{{figures}}},"dark":{dumps(repainting(), indent=None)}}}'
    return joined(
        [
            element("script", script_json(data), type="application/json", id="report-data"),
            *(element("script", Markup(script)) for script in _programs()),
        ]
    )


def _programs() -> tuple[str, ...]:
    """The scripts that run in a page; `report-data` is data, which none does."""
    return _plotly_js(), _resource("page.js")


@functools.cache
def _policy() -> str:
    """What a page may do: run these scripts and no other, draw with styles in it, show images in it."""
    digests = (hashlib.sha256(script.encode()).digest() for script in _programs())
    return _POLICY.format(" ".join(f"'sha256-{base64.b64encode(one).decode()}'" for one in digests))


def _footer() -> Markup:
    words = "Counts are in samples. Forecast intervals are meant to hold 8 of 10 measured values. "
    return element("footer", escaped(f"{words}Made by Stoker; figures by plotly.js. This file loads nothing."))


@functools.cache
def _plotly_js() -> str:
    return str(get_plotlyjs())


@functools.cache
def _resource(name: str) -> str:
    return resources.files("stoker.reporting").joinpath(name).read_text(encoding="utf-8")

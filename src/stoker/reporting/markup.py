"""HTML from values, and the colours of pages: escaped text, elements, whole documents, tiles, bars, small pictures.

Everything is escaped on its way in; the type `Markup` marks what is HTML already. Colours have a light and a dark form,
one table for the style sheet and the figures. Text colours have a contrast of at least 4.5 to 1 against both
backgrounds, lines and areas of at least 3 to 1 (WCAG 2.2, 1.4.3 and 1.4.11); series differ by hue, lightness and
labels, never by hue alone.
"""

from __future__ import annotations

import functools
import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import NewType

from stoker.records import Estimate
from stoker.reporting.wording import format_interval, format_quantity
from stoker.units import format_seconds

COLOURS: dict[str, tuple[str, str]] = {
    "paper": ("#faf8f5", "#131417"),
    "surface": ("#ffffff", "#1b1d21"),
    "ink": ("#1c1d20", "#eceae5"),
    "muted": ("#5f646c", "#a3a8b0"),
    "line": ("#e4dfd7", "#31343a"),
    "grid": ("#efebe4", "#26292e"),
    "ember": ("#c2410c", "#ff8c4b"),
    "blue": ("#3a6db3", "#86b3f2"),
    "teal": ("#0f7a6b", "#4fc9b1"),
    "violet": ("#6f49c4", "#b8a0ff"),
    "amber": ("#9a6206", "#e2b23f"),
    "grey": ("#7d828a", "#7f858e"),
    "good": ("#17744a", "#52cf93"),
    "bad": ("#bd2334", "#ff838a"),
}
"""Name: (light, dark)."""

PHASE_COLOURS = {
    "update": "ember",
    "data": "blue",
    "evaluation": "teal",
    "checkpoint": "violet",
    "planning": "amber",
    "other": "grey",
}
"""The colour of each phase in the time bar; phases that are not named here are grey."""

BOUND_COLOURS = {
    "arithmetic": "ember",
    "memory bandwidth": "amber",
    "host launch": "violet",
    "data": "blue",
    "evaluation": "teal",
    "copies": "good",
    "checkpoints": "muted",
    "unknown": "grey",
}
"""The colour of each thing that a run waits for."""


def light(name: str) -> str:
    """The light colour of that name; figures are drawn in it and repainted by the page when the browser is dark."""
    return COLOURS[name][0]


def style_variables() -> str:
    """The colours as CSS custom properties for both schemes; print is light."""
    lights = "".join(f"--{name}:{pair[0]};" for name, pair in COLOURS.items())
    darks = "".join(f"--{name}:{pair[1]};" for name, pair in COLOURS.items())
    return f":root{{{lights}}}@media screen and (prefers-color-scheme:dark){{:root{{{darks}}}}}"


def repainting() -> dict[str, str]:
    """Light colour to dark colour, for figures."""
    return dict(COLOURS.values())


Markup = NewType("Markup", str)
"""Text that is HTML already. A plain `str` is not, so that mypy finds what was not escaped."""


def escaped(value: object) -> Markup:
    """A value as text that can stand in an element or a quoted attribute."""
    return Markup(html.escape(str(value), quote=True))


def joined(parts: Iterable[Markup], separator: str = "") -> Markup:
    """Pieces of HTML one after another; `separator` is escaped."""
    return Markup(escaped(separator).join(parts))


def element(tag: str, *content: Markup, css: str = "", **attributes: str) -> Markup:
    """An element with its content; attribute names with `_` become `-`, attribute values are escaped."""
    named = ({"class": css} if css else {}) | {key.rstrip("_").replace("_", "-"): v for key, v in attributes.items()}
    inside = "".join(f' {name}="{escaped(value)}"' for name, value in named.items())
    return Markup(f"<{tag}{inside}>{''.join(content)}</{tag}>")


@functools.cache
def resource(name: str) -> str:
    """The text of a style sheet or script of this package."""
    return resources.files("stoker.reporting").joinpath(name).read_text(encoding="utf-8")


def document(title: str, body: Markup, *, policy: str, styles: Sequence[str] = ("page.css",)) -> str:
    """A whole page under a content security policy, with the named style sheets in it."""
    style = style_variables() + "".join(map(resource, styles))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escaped(policy)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escaped(title)} · Stoker</title><style>{style}</style></head><body>{body}</body></html>\n"
    )


def header(
    title: str, status: str, status_css: str, result: Iterable[tuple[str, str]], tiles: Iterable[tuple[str, str, str]]
) -> Markup:
    """The top of a page: its title with a status, the result as (text, class) lines, and (label, value, note) tiles."""
    badge = element("span", escaped(status), css=f"status {status_css}")
    lines = (element("p", escaped(text), css=css) for text, css in result)
    drawn = [
        element(
            "div", *(element("p", escaped(text), css=css) for text, css in zip(tile, _TILE, strict=True)), css="tile"
        )
        for tile in tiles
    ]
    hero = element("div", element("div", *lines, css="result"), element("div", *drawn, css="tiles"), css="hero")
    return element("header", element("div", element("h1", escaped(title)), badge, css="title"), hero)


_TILE = ("label", "value", "note")


def section(title: str, *content: Markup, css: str = "") -> Markup:
    """A titled part of the page."""
    return element("section", element("h2", escaped(title)), *content, css=css)


def facts(rows: Iterable[tuple[str, Markup]]) -> Markup:
    """A list of terms and what they are; rows without content are left out."""
    pairs = (element("div", element("dt", escaped(term)), element("dd", value)) for term, value in rows if value)
    return element("dl", *pairs, css="facts")


def table(head: Sequence[str], rows: Iterable[Sequence[Markup]], *, css: str = "") -> Markup:
    """A table that scrolls sideways on a narrow screen and names each cell's column for one that stacks it."""
    heads = joined(element("th", escaped(title), scope="col") for title in head)
    body = joined(
        element("tr", *(element("td", cell, data_label=title) for title, cell in zip(head, row, strict=True)))
        for row in rows
    )
    whole = element("table", element("thead", element("tr", heads)), element("tbody", body))
    return element("div", whole, css=f"scroll {css}".strip())


def script_json(text: str) -> Markup:
    """JSON text that can stand inside a script element, whatever its strings hold."""
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


@dataclass(frozen=True)
class BarSegment:
    """A part of a bar: its name for people, a name of `palette.COLOURS`, what it took [s], its share of the whole."""

    label: str
    colour: str
    seconds: float
    fraction: float


def stacked_bar(segments: Sequence[BarSegment]) -> Markup:
    """The bar and the legend; its words stand in for it where it is not seen."""
    parts, keys = [], []
    for segment in segments:
        seconds, colour = format_seconds(segment.seconds), f"background:var(--{segment.colour})"
        inside = f"{100 * segment.fraction:.0f} %" if segment.fraction > 0.07 else ""
        width = f"flex-grow:{segment.fraction:.5f};{colour}"
        parts.append(element("span", escaped(inside), style=width, title=f"{segment.label}: {seconds}"))
        percent = f"{100 * segment.fraction:.1f} %" if segment.fraction >= 0.001 else "< 0.1 %"
        swatch, label = element("i", css="swatch", style=colour), element("span", escaped(segment.label))
        keys.append(element("li", swatch, label, element("b", escaped(f"{seconds} · {percent}"))))
    text = ", ".join(f"{segment.label} {100 * segment.fraction:.1f} %" for segment in segments)
    bar = element("div", *parts, css="bar", role="img", aria_label=text)
    return joined([bar, element("ul", *keys, css="keys")])


WIDTH, HEIGHT, MARGIN = 150, 22, 8


def interval_strip(forecast: Estimate, measured: float | None) -> Markup:
    """Inline SVG; the scale spans the interval and the measured value, a dot outside the bar is hollow."""
    ends = [forecast.low, forecast.high, *([] if measured is None else [measured])]
    low, high = min(ends), max(ends)
    pad = (high - low) * 0.12 or max(abs(high), 1e-12)
    low, high = low - pad, high + pad

    def x(value: float) -> float:
        return MARGIN + (value - low) / (high - low) * (WIDTH - 2 * MARGIN)

    left, right, middle = x(forecast.low), x(forecast.high), HEIGHT / 2
    width, tick = max(2.0, right - left), x(forecast.value)
    shapes = [
        f'<line class="track" x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{middle}" y2="{middle}"/>',
        f'<rect class="interval" x="{left:.1f}" width="{width:.1f}" y="{middle - 5}" height="10" rx="3"/>',
        f'<line class="tick" x1="{tick:.1f}" x2="{tick:.1f}" y1="{middle - 7}" y2="{middle + 7}"/>',
    ]
    words = f"forecast {format_quantity(forecast.value, forecast.unit)} ({format_interval(forecast)})"
    if measured is not None:
        place = "in" if forecast.low <= measured <= forecast.high else "out"
        shapes.append(f'<circle class="dot {place}" cx="{x(measured):.1f}" cy="{middle}" r="4.5"/>')
        words += f", measured {format_quantity(measured, forecast.unit)}"
    head = f'<svg class="strip" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img"'
    return Markup(f'{head} aria-label="{escaped(words)}">{"".join(shapes)}</svg>')

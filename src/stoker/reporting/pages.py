"""Pages from templates: the Jinja environment, the content security policy, and the colours.

A template escapes every value on its way in; only `Markup` is HTML already. Colours have a light and a dark form, one
table for the style sheet and the figures. Text colours have a contrast of at least 4.5 to 1 against both backgrounds,
lines and areas of at least 3 to 1 (WCAG 2.2, 1.4.3 and 1.4.11); series differ by hue, lightness and labels, never by
hue alone.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib import resources

import jinja2
from markupsafe import Markup

from stoker import units
from stoker.reporting import event_text, wording

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


def repainting() -> dict[str, str]:
    """Light colour to dark colour, for figures."""
    return dict(COLOURS.values())


@functools.cache
def resource(name: str) -> Markup:
    """The text of a style sheet or script of this package, which stands in a page as it is."""
    return Markup(resources.files("stoker.reporting").joinpath("static", name).read_text(encoding="utf-8"))  # noqa: S704 - ours


@functools.cache
def _environment() -> jinja2.Environment:
    """Made at the first page: compiling templates takes longer than a command's start may."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("stoker.reporting"), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.globals |= {"colours": COLOURS, "resource": resource}
    environment.filters |= {
        "bytes": units.format_bytes,
        "described": event_text.describe_event,
        "interval": wording.format_interval,
        "percent": lambda fraction, digits=0: f"{100 * fraction:.{digits}f} %",
        "quantity": wording.format_quantity,
        "samples": wording.format_samples,
        "seconds": units.format_seconds,
        "spread": wording.format_spread,
    }
    return environment


def render(template: str, **values: object) -> str:
    """HTML of a template in `templates/`, given what it shows; a name that it uses and is not given is an error."""
    return _environment().get_template(f"{template}.html.j2").render(values)


def script_json(text: str) -> Markup:
    """JSON text that can stand inside a script element, whatever its strings hold."""
    escaped = text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    return Markup(escaped)  # noqa: S704 - no character is left that HTML would read


@dataclass(frozen=True)
class BarSegment:
    """A part of a bar: its name for people, a name of `COLOURS`, what it took [s], its share of the whole [0 to 1]."""

    label: str
    colour: str
    seconds: float
    fraction: float

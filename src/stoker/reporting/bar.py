"""A stacked bar with its legend: parts of a time, each with its colour, its seconds and its share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stoker.reporting.markup import Markup, element, escaped, joined
from stoker.units import format_seconds


@dataclass(frozen=True)
class Segment:
    """A part of a bar: its name for people, a name of `palette.COLOURS`, what it took [s], its share of the whole."""

    label: str
    colour: str
    seconds: float
    fraction: float


def stacked_bar(segments: Sequence[Segment]) -> Markup:
    """The bar and the legend; its words stand in for it where it is not seen."""
    words = ", ".join(f"{one.label} {100 * one.fraction:.1f} %" for one in segments)
    bar = element("div", *(_drawn(one) for one in segments), css="bar", role="img", aria_label=words)
    return joined([bar, element("ul", *(_key(one) for one in segments), css="keys")])


def _drawn(one: Segment) -> Markup:
    width = f"flex-grow:{one.fraction:.5f};background:var(--{one.colour})"
    inside = f"{100 * one.fraction:.0f} %" if one.fraction > 0.07 else ""
    return element("span", escaped(inside), style=width, title=f"{one.label}: {format_seconds(one.seconds)}")


def _key(one: Segment) -> Markup:
    swatch = element("i", css="swatch", style=f"background:var(--{one.colour})")
    percent = f"{100 * one.fraction:.1f} %" if one.fraction >= 0.001 else "< 0.1 %"
    amount = f"{format_seconds(one.seconds)} · {percent}"
    return element("li", swatch, element("span", escaped(one.label)), element("b", escaped(amount)))

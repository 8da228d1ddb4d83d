"""The colours of pages and figures, each in a light and a dark form.

Text colours have a contrast of at least 4.5 to 1 against both backgrounds, lines and areas of at least 3 to 1 (WCAG
2.2, 1.4.3 and 1.4.11); series differ by hue, lightness and labels, never by hue alone.
"""

from __future__ import annotations

import functools

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


@functools.cache
def colour_sheet() -> str:
    """The colours as a style sheet; a page may be set to one of both themes, and paper is light."""
    light, dark = ("".join(f"--{name}:{pair[number]};" for name, pair in COLOURS.items()) for number in (0, 1))
    return (
        f":root{{{light}}}\n@media screen and (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}\n"
        f"@media screen{{:root[data-theme=dark]{{{dark}}}}}\n"
    )


def repainting() -> dict[str, str]:
    """Light colour to dark colour, for figures."""
    return dict(COLOURS.values())

"""What the trained weights make of samples: those they are most wrong about, and the first ones."""

from __future__ import annotations

import re
from collections.abc import Sequence

from stoker.records.examples import Example, ExampleSet
from stoker.reporting.markup import Markup, element, escaped, joined, section

_LONGEST = 28
"""Characters of a name under a picture; the whole name is its description."""


def predictions(sets: Sequence[ExampleSet]) -> Markup:
    """A row of samples with the largest losses of each split, and one of its first samples; else nothing."""
    rows = [row for one in sets for row in _rows_of(one)]
    scale = next((one.scale for one in sets if one.scale is not None), None)
    if scale is not None:
        note = f"In all pictures black is {scale[0]:.4g} and white {scale[1]:.4g}."
        rows.append(element("p", escaped(note), css="note"))
    return section("Samples", *rows) if rows else Markup("")


def _rows_of(examples: ExampleSet) -> list[Markup]:
    of = f"of {examples.num_samples:,} in {examples.split}"
    titled = ((f"Largest losses, {of}", examples.worst), (f"The first ones, {of}", examples.first))
    return [
        joined([element("h3", escaped(title)), element("div", *map(_card, shown), css="samples")])
        for title, shown in titled
        if shown
    ]


def _card(example: Example) -> Markup:
    """A sample: its picture or numbers, what was wanted, what came out."""
    is_right = re.fullmatch(rf"{re.escape(example.target)}( \(\d+ %\))?", example.output) is not None
    label = example.name or f"sample {example.index}"
    pictures = {"": example.picture, "output": example.output_picture, "target": example.target_picture}
    picture = joined(_picture(png, label, of) for of, png in pictures.items() if png is not None)
    if not picture and example.values:
        picture = element("code", escaped(", ".join(f"{value:.3g}" for value in example.values)))
    loss = "" if example.loss is None else f"loss {example.loss:.3g}"
    lines = [
        element("b", escaped(example.output), css="good" if is_right else "bad"),
        element("span", escaped(f"wanted {example.target}" if example.target else "")),
        element("span", escaped(" · ".join(part for part in (_short(example), loss) if part))),
    ]
    return element("figure", picture, *lines, css="sample")


def _picture(png: str, label: str, of: str) -> Markup:
    """A picture; one that is not the sample itself has a word of what it is."""
    description = f"{label}, {of}" if of else label
    image = Markup(f'<img src="data:image/png;base64,{escaped(png)}" alt="{escaped(description)}">')
    return joined([element("span", escaped(of)), image]) if of else image


def _short(example: Example) -> str:
    """What a sample is called, its end where that is long: `#8` of data without names."""
    if not example.name:
        return f"#{example.index}"
    return example.name if len(example.name) <= _LONGEST else f"…{example.name[1 - _LONGEST :]}"

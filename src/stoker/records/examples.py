"""What the trained weights made of some samples of a held-out set, to be looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class Example:
    """A sample, what was wanted and what came out, as text.

    `index` is its place in the set, `name` what the data call it, such as its file; empty where they do not. `loss` is
    its own, where that is known. `picture` is a PNG in base64; `values` are the first of the numbers that a sample
    without a picture has. `output_picture` and `target_picture` are there where output and target are pictures too, as
    those of an autoencoder.
    """

    schema: ClassVar[int] = 1
    index: int
    target: str
    output: str
    loss: float | None = None
    picture: str | None = None
    values: tuple[float, ...] = ()
    name: str = ""
    output_picture: str | None = None
    target_picture: str | None = None


@dataclass(frozen=True, kw_only=True)
class ExampleSet:
    """Samples of one split: those with the largest losses, and the first ones; of classifiers also how they confuse.

    `confusion` counts samples: a row for each class that was wanted, a column for each that was found; None where
    samples have no classes, or too many. `classes` are their names, in order; empty where they have none. `scale` is
    the value that is black and the one that is white, in all pictures.
    """

    schema: ClassVar[int] = 1
    split: str
    num_samples: int
    worst: tuple[Example, ...] = ()
    first: tuple[Example, ...] = ()
    confusion: tuple[tuple[int, ...], ...] | None = None
    classes: tuple[str, ...] = ()
    scale: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True)
class ExampleSets:
    """Those of all splits that were evaluated at a run's end."""

    schema: ClassVar[int] = 1
    sets: tuple[ExampleSet, ...] = ()

"""The seam between files and samples with pixels: units of work that a process can take whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from numpy.typing import NDArray

from stoker.records.cleaning import DataKind, Finding

SAMPLES_OF_A_UNIT = 256
"""Enough that handing a unit to another process costs little, few enough that progress is seen."""


@dataclass(frozen=True)
class Item:
    """A sample as it is stored.

    `content` is the bytes of an image file, or pixels [height, width] or [height, width, channels]. `suffix` is the
    ending of its name, which promises a format; empty where it has none. `problem` says why there is no content.
    """

    id: str
    content: bytes | NDArray[Any]
    label: str | None = None
    suffix: str = ""
    problem: str = ""


class Unit(Protocol):
    """Some samples of one split, of which each can be read alone. It travels between processes."""

    @property
    def split(self) -> str:
        """The split that they are in; empty where there are none."""
        ...

    def __len__(self) -> int:
        """How many."""
        ...

    def item(self, index: int) -> Item:
        """One of them; what cannot be read has a problem and no content."""
        ...


@dataclass(frozen=True)
class Found:
    """What a path holds: units to read, classes without a sample (split, class), and what was amiss on the way."""

    kind: DataKind
    units: tuple[Unit, ...]
    empty_classes: tuple[tuple[str, str], ...] = ()
    findings: tuple[Finding, ...] = field(default=())


def cut(count: int, size: int = SAMPLES_OF_A_UNIT) -> Sequence[range]:
    """Ranges of at most `size` that make up `count`."""
    return [range(start, min(start + size, count)) for start in range(0, count, size)]

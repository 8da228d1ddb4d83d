"""What can be wrong with a row, with a table as a whole, and with an image."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from stoker.errors import BadJob
from stoker.records.cleaning import Fault


@dataclass(frozen=True)
class RowFault:
    """Why a row has no values: what it counts as, and in words that go on after the row's name."""

    kind: Fault
    words: str


class BadTable(BadJob):
    """A file that cannot be read, or not on from here; `what` goes on after the file's name."""

    def __init__(self, path: Path, what: str, *, remedy: str) -> None:
        super().__init__(f"{path} {what}", remedy=remedy)
        self.what = what


class BadImage(ValueError):
    """An image that cannot be decoded: what it counts as, and why."""

    def __init__(self, fault: Fault, why: str) -> None:
        super().__init__(why)
        self.fault: Fault = fault

"""The catalogue: what vendors say of devices, each figure with its source and the date it was compared with it.

The figures are in `catalogue.json`, as the vendors print them so that a reader can hold them beside the datasheet; this
file turns them into bytes, bytes/s and FLOP/s. To add a device, add a row; to add a column, name it in `COLUMNS`.
Rates are dense: figures printed for structured sparsity are halved, and the cell's note says so.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from importlib.resources import files
from typing import Any

from stoker.errors import nearest
from stoker.records import Device
from stoker.units import GIB, MIB, format_bytes


@dataclass(frozen=True)
class Column:
    """What a column holds: its unit, the range a believable value lies in, and whether every device must have it."""

    unit: str
    low: float
    high: float
    is_required: bool = False


_RATE = Column("TFLOP/s", 0.1, 1e5)

COLUMNS: Mapping[str, Column] = {
    "memory_gib": Column("GiB", 1, 4096, is_required=True),
    "memory_reported_mib": Column("MiB", 1000, 4e6),
    "bandwidth_gb_per_s": Column("GB/s", 10, 1e5, is_required=True),
    "dense_tflops_fp32": Column("TFLOP/s", 0.1, 1e5, is_required=True),
    "dense_tflops_tf32": _RATE,
    "dense_tflops_bf16": _RATE,
    "dense_tflops_fp16": _RATE,
    "dense_tflops_fp8": _RATE,
    "dense_tflops_int8": _RATE,
    "power_w": Column("W", 5, 5000, is_required=True),
    "multiprocessors": Column("SMs", 1, 1000, is_required=True),
    "compute_capability": Column("version", 5.0, 99.0, is_required=True),
}
"""Every column there is. Vendors write GB of memory for GiB; `memory_reported_mib` is what the driver then offers."""


@dataclass(frozen=True)
class Source:
    """A document: its title as printed, and who published it."""

    title: str
    publisher: str


@dataclass(frozen=True)
class Cell:
    """One figure, in the unit of its column, where it is from, and the day it was last compared with that."""

    value: float
    source: Source
    compared_on: date
    note: str = ""


@dataclass(frozen=True)
class CatalogueEntry:
    """A device model. `name` is its word for `--on`, `driver_names` what the driver calls it, `cells` by column."""

    name: str
    title: str
    aliases: tuple[str, ...]
    driver_names: tuple[str, ...]
    cells: Mapping[str, Cell]

    @property
    def memory_bytes(self) -> int:
        """Memory by the datasheet [bytes]; a process gets some per cent less, see `reported_memory_bytes`."""
        return int(self.cells["memory_gib"].value * GIB)

    @property
    def reported_memory_bytes(self) -> int | None:
        """Memory the driver offers [bytes]; None where nobody wrote it down."""
        cell = self.cells.get("memory_reported_mib")
        return int(cell.value * MIB) if cell else None

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """Memory bandwidth [bytes/s], reads and writes together."""
        return self.cells["bandwidth_gb_per_s"].value * 1e9

    @property
    def dense_flops(self) -> dict[str, float]:
        """Peak rate of dense matrix products [FLOP/s] by dtype (operations/s for int8)."""
        prefix = "dense_tflops_"
        return {name.removeprefix(prefix): c.value * 1e12 for name, c in self.cells.items() if name.startswith(prefix)}

    @property
    def power_w(self) -> float:
        """Power limit as sold [W]."""
        return self.cells["power_w"].value

    @property
    def multiprocessors(self) -> int:
        """Streaming multiprocessors."""
        return int(self.cells["multiprocessors"].value)

    @property
    def compute_capability(self) -> str:
        """CUDA compute capability, such as `9.0`."""
        return f"{self.cells['compute_capability'].value:.1f}"

    def in_words(self) -> str:
        """`NVIDIA H100 SXM, 80.0 GiB`."""
        return f"{self.title}, {format_bytes(self.memory_bytes)}"


@dataclass(frozen=True)
class Catalogue:
    """All device models that are known."""

    entries: tuple[CatalogueEntry, ...]

    def find(self, word: str) -> tuple[CatalogueEntry, ...]:
        """The models a word of `--on` may mean; several where an alias such as `a100` leaves the memory open."""
        word = word.lower()
        return tuple(e for e in self.entries if e.name == word) or tuple(e for e in self.entries if word in e.aliases)

    def describing(self, device: Device) -> CatalogueEntry | None:
        """The entry of an attached device, by the name its driver gives; None where the model is not known."""
        return next((entry for entry in self.entries if device.model in entry.driver_names), None)

    def words(self) -> tuple[str, ...]:
        """Every name and alias, each once."""
        return tuple(dict.fromkeys(word for entry in self.entries for word in (entry.name, *entry.aliases)))


@functools.cache
def catalogue() -> Catalogue:
    """The built-in catalogue, read once."""
    return load_catalogue(files("stoker.devices").joinpath("catalogue.json").read_text(encoding="utf-8"))


def load_catalogue(text: str) -> Catalogue:
    """A catalogue from JSON text.

    Args:
        text: an object with `sources` (by key: title, publisher) and `devices` (rows with name, title, aliases,
            driver_names and cells, a cell being `[value, source key, ISO date]` or the same with a note).

    Raises:
        ValueError: the first thing that does not fit, naming the device and the column.
    """
    document = json.loads(text)
    sources = {key: Source(row["title"], row["publisher"]) for key, row in document["sources"].items()}
    entries = tuple(_entry(row, sources) for row in document["devices"])
    for words in ([e.name for e in entries], [name for e in entries for name in e.driver_names]):
        if twice := sorted({word for word in words if words.count(word) > 1}):
            raise ValueError(f"catalogue: {twice[0]!r} stands for two devices")
    if clash := {e.name for e in entries} & {alias for e in entries for alias in e.aliases}:
        raise ValueError(f"catalogue: {min(clash)!r} is a name and an alias")
    return Catalogue(entries)


def _entry(row: Mapping[str, Any], sources: Mapping[str, Source]) -> CatalogueEntry:
    """One row, checked."""
    name = row.get("name", "")
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        raise ValueError(f"catalogue: a device is named {name!r}; wanted lower-case letters, digits and '-'")
    cells = {column: _cell(name, column, cell, sources) for column, cell in row["cells"].items()}
    for column, about in COLUMNS.items():
        if about.is_required and column not in cells:
            raise ValueError(f"catalogue, device {name!r}: column {column!r} is missing")
    return CatalogueEntry(name, row["title"], tuple(row["aliases"]), tuple(row["driver_names"]), cells)


def _cell(name: str, column: str, cell: object, sources: Mapping[str, Source]) -> Cell:
    """One cell, checked: a known column, a believable number, a known source, a date."""
    where = f"catalogue, device {name!r}, column {column!r}"
    if column not in COLUMNS:
        raise ValueError(f"{where}: no such column. {nearest(column, COLUMNS)}")
    if not (isinstance(cell, list) and len(cell) in (3, 4)):
        raise ValueError(f"{where}: wanted [value, source, date] or [value, source, date, note], found {cell!r}")
    value, source, day, *note = cell
    about = COLUMNS[column]
    if isinstance(value, bool) or not isinstance(value, int | float) or not about.low <= value <= about.high:
        raise ValueError(f"{where}: wanted {about.low:g} to {about.high:g} {about.unit}, found {value!r}")
    if source not in sources:
        raise ValueError(f"{where}: no such source {source!r}. {nearest(str(source), sources)}")
    try:
        compared_on = date.fromisoformat(day)
    except (TypeError, ValueError) as problem:
        raise ValueError(f"{where}: wanted a date such as 2026-11-21, found {day!r}") from problem
    return Cell(float(value), sources[source], compared_on, note[0] if note else "")

"""The catalogue of device models: figures of datasheets, each with its source and the date it was compared with it.

Figures are in `catalogue.json` as printed in the datasheet; this file turns them into bytes, bytes/s and FLOP/s. To add
a device, add a row; to add a column, name it in `COLUMNS`. Rates are dense: figures printed for structured sparsity are
halved, and the cell's note says so. Unknown figures are left out.

A catalogue file is an object with `sources` (by key: title, publisher) and `devices` (rows with name, title, kind,
aliases, driver_names and cells, a cell being `[value, source key, ISO date]` or the same with a note). A user's file
adds rows to the built-in ones; its bad rows are left out and reported.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, get_args

from stoker.errors import nearest
from stoker.records import Device
from stoker.units import GIB, MIB, format_bytes

DeviceKind = Literal["cuda", "rocm", "tpu", "cpu"]
"""`cuda` for NVIDIA's GPUs, `rocm` for AMD's, `tpu` for Google's TPUs; `cpu` is one socket."""

KINDS: tuple[DeviceKind, ...] = get_args(DeviceKind)

LEAST_USABLE = 0.93
"""Share of a device's memory that a driver surely offers [0 to 1], for rows without the driver's figure.

Below the smallest share among rows where it is known: 275,040 of 294,912 MiB (0.933) on a B300, whose printed gigabytes
are decimal, and 46,068 of 49,152 MiB (0.937) on an L40S, whose error correction takes the rest.
"""


@dataclass(frozen=True)
class Column:
    """Title, unit and plausible range of a column, and the kinds of devices that must have it."""

    title: str
    unit: str
    low: float
    high: float
    needed_by: tuple[DeviceKind, ...] = ()


_RATE = "matrix products, "

COLUMNS: Mapping[str, Column] = {
    "memory_gib": Column("memory", "GiB", 1, 4096, KINDS),
    "memory_reported_mib": Column("memory the driver offers", "MiB", 1000, 4e6),
    "bandwidth_gb_per_s": Column("memory bandwidth", "GB/s", 10, 1e5, KINDS),
    "dense_tflops_fp32": Column(f"{_RATE}fp32", "TFLOP/s", 0.1, 1e5, ("cuda", "rocm", "cpu")),
    "dense_tflops_tf32": Column(f"{_RATE}tf32", "TFLOP/s", 0.1, 1e5),
    "dense_tflops_bf16": Column(f"{_RATE}bf16", "TFLOP/s", 0.1, 1e5),
    "dense_tflops_fp16": Column(f"{_RATE}fp16", "TFLOP/s", 0.1, 1e5),
    "dense_tflops_fp8": Column(f"{_RATE}fp8", "TFLOP/s", 0.1, 1e5),
    "dense_tflops_int8": Column(f"{_RATE}int8", "TOP/s", 0.1, 1e5),
    "power_w": Column("power limit", "W", 5, 5000, ("cuda", "rocm", "cpu")),
    "idle_w": Column("power, doing nothing", "W", 1, 1000),
    "multiprocessors": Column("multiprocessors", "SMs", 1, 1000, ("cuda",)),
    "cores": Column("cores", "cores", 1, 1024, ("cpu",)),
    "boost_ghz": Column("boost clock", "GHz", 0.1, 10),
    "compute_capability": Column("compute capability", "", 5.0, 99.0, ("cuda",)),
    "l2_mib": Column("L2 cache", "MiB", 0.25, 4096),
    "link_gb_per_s": Column("links to its neighbours, both ways", "GB/s", 10, 1e4),
    "pcie_gb_per_s": Column("PCI Express, one way", "GB/s", 1, 1000),
    "node_devices": Column("devices of the vendor's machine", "devices", 1, 64),
    "domain_devices": Column("devices joined by its links", "devices", 1, 1024),
    "network_cards": Column("network cards of the machine", "cards", 1, 64),
    "network_gbit": Column("rate of each, one way", "Gbit/s", 1, 10_000),
}
"""All columns. Vendors mostly write GB of memory for GiB; `memory_reported_mib` is the driver's figure.

`idle_w` is read with no process on the device: a process that only holds a CUDA context costs 26 to 66 W more (S. S.
Vadari, arXiv:2605.23918). `link_gb_per_s` is the sum over all links such as NVLink, both directions. The last four
are of the vendor's own machine with such devices, cards for storage left out: see `stoker.devices.cluster`.
"""


@dataclass(frozen=True)
class Citation:
    """A document: its printed title and its publisher."""

    title: str
    publisher: str


@dataclass(frozen=True)
class Cell:
    """One figure in its column's unit, its source, and the day it was last compared with the source."""

    value: float
    source: Citation
    compared_on: date
    note: str = ""


@dataclass(frozen=True)
class CatalogueEntry:
    """A device model: its `name` for `--on`, its names in drivers, and its figures by column."""

    name: str
    title: str
    kind: DeviceKind
    aliases: tuple[str, ...]
    driver_names: tuple[str, ...]
    cells: Mapping[str, Cell]

    def value(self, column: str) -> float | None:
        """A figure in its column's unit; None if not known."""
        cell = self.cells.get(column)
        return None if cell is None else cell.value

    @property
    def can_be_planned(self) -> bool:
        """True if there is a time model for its kind; for others only memory is known."""
        return self.kind in ("cuda", "cpu")

    @property
    def memory_bytes(self) -> int:
        """Memory by the datasheet [bytes]; `usable_memory_bytes` is some per cent less."""
        return int(self.cells["memory_gib"].value * GIB)

    @property
    def reported_memory_bytes(self) -> int | None:
        """Memory the driver offers [bytes]; None if not known."""
        reported = self.value("memory_reported_mib")
        return None if reported is None else int(reported * MIB)

    @property
    def usable_memory_bytes(self) -> int:
        """Memory to plan with [bytes]: the driver's figure, or `LEAST_USABLE` of the datasheet's."""
        return self.reported_memory_bytes or int(self.memory_bytes * LEAST_USABLE)

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
    def power_w(self) -> float | None:
        """Power limit as sold [W]."""
        return self.value("power_w")

    @property
    def multiprocessors(self) -> int | None:
        """Streaming multiprocessors of an NVIDIA GPU."""
        count = self.value("multiprocessors")
        return None if count is None else int(count)

    @property
    def cores(self) -> int | None:
        """Cores of a CPU."""
        count = self.value("cores")
        return None if count is None else int(count)

    @property
    def compute_capability(self) -> str | None:
        """CUDA compute capability of an NVIDIA GPU, such as `9.0`."""
        number = self.value("compute_capability")
        return None if number is None else f"{number:.1f}"

    def in_words(self) -> str:
        """`NVIDIA H100 SXM, 80.0 GiB`."""
        return f"{self.title}, {format_bytes(self.memory_bytes)}"


@dataclass(frozen=True)
class Catalogue:
    """All known device models; `problems` says which rows could not be used, and why."""

    entries: tuple[CatalogueEntry, ...]
    problems: tuple[str, ...] = ()

    def find(self, word: str) -> tuple[CatalogueEntry, ...]:
        """The models a word may mean; several if an alias such as `a100` leaves the memory open.

        Case, spaces, dashes, the vendor's name and a `g` or `gb` after the memory do not matter.

        >>> from stoker.devices import catalogue
        >>> [entry.name for entry in catalogue().find("A100-80GB")], [e.name for e in catalogue().find("RTX 4090")]
        (['a100-80'], ['rtx-4090'])
        """
        for name in (normalized_name(word), re.sub(r"(?<=\d)gb?$", "", normalized_name(word))):
            named = tuple(entry for entry in self.entries if name == normalized_name(entry.name))
            if matches := named or tuple(e for e in self.entries if name in map(normalized_name, e.aliases)):
                return matches
        return ()

    def called(self, model: str) -> CatalogueEntry | None:
        """The entry with that name in drivers; None if the model is not known."""
        return next((entry for entry in self.entries if model in entry.driver_names), None)

    def describing(self, device: Device) -> CatalogueEntry | None:
        """The entry of an attached device, by its driver's name; None if the model is not known.

        A CPU has one only if all its cores may be used: the figures say nothing about a part of it.
        """
        entry = self.called(device.model)
        return None if entry and entry.cores and device.cores < entry.cores else entry

    def words(self) -> tuple[str, ...]:
        """Every name and alias, each once."""
        return tuple(dict.fromkeys(word for entry in self.entries for word in (entry.name, *entry.aliases)))

    def with_rows(self, rows: Iterable[CatalogueEntry], problems: Iterable[str] = ()) -> Catalogue:
        """This catalogue with more rows, which replace those of the same name."""
        rows = tuple(rows)
        replaced = {row.name for row in rows}
        kept = (entry for entry in self.entries if entry.name not in replaced)
        return Catalogue((*kept, *rows), (*self.problems, *problems))


def normalized_name(word: str) -> str:
    """A device's name without case, spaces, dashes and the vendor's name, which people write differently.

    >>> normalized_name("NVIDIA GeForce RTX 4090")
    'rtx4090'
    """
    return re.sub(r"nvidia|geforce|tesla|instinct|[^a-z0-9]", "", word.lower())


def user_file(variable: str, *names: str, environ: Mapping[str, str] = os.environ) -> Path | None:
    """The file with a user's own rows; None if there is none.

    Args:
        variable: the environment variable that may name it; a file it names need not exist.
        names: its possible names in the configuration directory (`stoker` in `$XDG_CONFIG_HOME` or in `~/.config`), in
            order.
        environ: the environment.

    Source: XDG Base Directory Specification 0.8: a relative `$XDG_CONFIG_HOME` is ignored.
    """
    if given := environ.get(variable):
        return Path(given).expanduser()
    xdg, home = Path(environ.get("XDG_CONFIG_HOME", "")), environ.get("HOME")
    if not xdg.is_absolute():
        if not home:
            return None
        xdg = Path(home) / ".config"
    return next((xdg / "stoker" / name for name in names if (xdg / "stoker" / name).is_file()), None)


@functools.cache
def catalogue() -> Catalogue:
    """The built-in catalogue with the user's own rows, read once.

    These are in the file `$STOKER_CATALOGUE`, or in `devices.json` of the configuration directory.
    """
    path = user_file("STOKER_CATALOGUE", "devices.json")
    return builtin_catalogue() if path is None else read_catalogue(path, builtin_catalogue())


@functools.cache
def builtin_catalogue() -> Catalogue:
    """Stoker's own catalogue."""
    return load_catalogue(files("stoker.devices").joinpath("catalogue.json").read_text(encoding="utf-8"))


def load_catalogue(text: str) -> Catalogue:
    """A catalogue from JSON text.

    Raises:
        ValueError: the first fault, with its device and column.
    """
    entries, problems = _read_rows(json.loads(text), "catalogue", {})
    problems = (*problems, *_clashes(entries, "catalogue"))
    if problems:
        raise ValueError(problems[0])
    return Catalogue(entries)


def read_catalogue(path: Path, builtin: Catalogue) -> Catalogue:
    """The built-in catalogue with a user's rows; bad rows are left out and named in `problems`.

    A row may use the sources of the built-in file by their keys. A row of a built-in name replaces that row.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as problem:
        return builtin.with_rows((), (f"{path}: cannot be read ({problem}): the built-in catalogue alone is used.",))
    if not isinstance(document, dict):
        return builtin.with_rows((), (f"{path}: wanted an object with `sources` and `devices`.",))
    entries, problems = _read_rows(document, str(path), _builtin_sources())
    known = builtin.with_rows((), problems)
    for entry in entries:
        wider = known.with_rows((entry,))
        clashes = _clashes(wider.entries, f"{path}, device {entry.name!r}")
        known = known.with_rows((), clashes) if clashes else wider
    return known


@functools.cache
def _builtin_sources() -> Mapping[str, Citation]:
    document = json.loads(files("stoker.devices").joinpath("catalogue.json").read_text(encoding="utf-8"))
    return _sources(document)


def _sources(document: Mapping[str, Any]) -> dict[str, Citation]:
    return {key: Citation(row["title"], row["publisher"]) for key, row in document.get("sources", {}).items()}


def _read_rows(
    document: Mapping[str, Any], where: str, more_sources: Mapping[str, Citation]
) -> tuple[tuple[CatalogueEntry, ...], tuple[str, ...]]:
    """The good rows, and what is wrong with the others."""
    entries, problems = [], []
    try:
        sources = {**more_sources, **_sources(document)}
    except (AttributeError, KeyError, TypeError) as problem:
        return (), (f"{where}: wanted `sources` as an object of {{title, publisher}} by key, missing {problem}.",)
    rows = document.get("devices")
    if not isinstance(rows, list):
        return (), (f"{where}: wanted `devices` as a list of rows.",)
    for row in rows:
        try:
            entries.append(_entry(row, sources, where))
        except ValueError as problem:
            problems.append(str(problem))
    return tuple(entries), tuple(problems)


def _clashes(entries: Sequence[CatalogueEntry], where: str) -> tuple[str, ...]:
    """Words that would mean two devices."""
    names = [normalized_name(entry.name) for entry in entries]
    drivers = [name for entry in entries for name in entry.driver_names]
    twice = sorted({word for words in (names, drivers) for word in words if words.count(word) > 1})
    both = sorted({normalized_name(alias) for entry in entries for alias in entry.aliases} & set(names))
    return (
        *(f"{where}: {word!r} stands for two devices" for word in twice),
        *(f"{where}: {word!r} is a name and an alias" for word in both),
    )


def _entry(row: object, sources: Mapping[str, Citation], where: str) -> CatalogueEntry:
    """One row, checked."""
    name = str(row.get("name", "") if isinstance(row, dict) else row)
    if not isinstance(row, dict) or not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        raise ValueError(f"{where}: a device is named {name!r}; wanted lower-case letters, digits and '-'")
    where = f"{where}, device {name!r}"
    kind, cells = row.get("kind", "cuda"), row.get("cells")
    if kind not in KINDS:
        raise ValueError(f"{where}: no such kind {kind!r}. {nearest(str(kind), KINDS)}")
    if not isinstance(cells, dict):
        raise ValueError(f"{where}: wanted `cells` by column")  # noqa: TRY004 - a bad file, not a bad call
    checked = {column: _cell(f"{where}, column {column!r}", column, cell, sources) for column, cell in cells.items()}
    for column, about in COLUMNS.items():
        if kind in about.needed_by and column not in checked:
            raise ValueError(f"{where}: column {column!r} is missing")
    aliases, drivers = (_strings(row, key, where) for key in ("aliases", "driver_names"))
    return CatalogueEntry(name, str(row.get("title", name)), kind, aliases, drivers, checked)


def _strings(row: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    words = row.get(key, [])
    if not (isinstance(words, list) and all(isinstance(word, str) for word in words)):
        raise ValueError(f"{where}: wanted `{key}` as a list of strings, found {words!r}")
    return tuple(words)


def _cell(where: str, column: str, cell: object, sources: Mapping[str, Citation]) -> Cell:
    """One cell, checked: a known column, a plausible number, a known source, a date."""
    if column not in COLUMNS:
        raise ValueError(f"{where}: no such column. {nearest(column, COLUMNS)}")
    if not (isinstance(cell, list) and len(cell) in (3, 4)):
        raise ValueError(f"{where}: wanted [value, source, date] or [value, source, date, note], found {cell!r}")
    value, source, day, *note = cell
    about = COLUMNS[column]
    if isinstance(value, bool) or not isinstance(value, int | float) or not about.low <= value <= about.high:
        raise ValueError(f"{where}: wanted {about.low:g} to {about.high:g} {about.unit}, found {value!r}")
    if not isinstance(source, str) or source not in sources:
        raise ValueError(f"{where}: no such source {source!r}. {nearest(str(source), sources)}")
    try:
        compared_on = date.fromisoformat(day)
    except (TypeError, ValueError) as problem:
        raise ValueError(f"{where}: wanted a date such as 2026-11-21, found {day!r}") from problem
    return Cell(float(value), sources[source], compared_on, str(note[0]) if note else "")

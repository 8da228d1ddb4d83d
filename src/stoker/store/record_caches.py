"""Records remembered between runs, in the cache: one file for each key, or one line for each event.

All of it may be deleted; the next plan then knows less. What cannot be read counts as missing, since the cache serves
several versions of Stoker at once. `root` is `cache_root()`.

A trace has thousands of small parts, so its file holds columns of numbers, as compressed JSON, and each shape once; its
layout is `_LAYOUT`.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

from stoker.errors import RunFailed
from stoker.records import Calibration, Ceilings, MicroBenchmark, Trace, dumps, from_json, loads, to_json
from stoker.records.codec import JSON
from stoker.records.hardware import Links
from stoker.records.plan import KeptDecision, OutOfMemory
from stoker.records.trace import (
    Occurrence,
    Operation,
    Repetition,
    Segment,
    Storage,
    TensorShape,
    TraceSettings,
    Widened,
)
from stoker.store.disk_errors import disk_errors
from stoker.store.files import append_line, make_directories, read_lines, write_atomic
from stoker.store.locations import is_own

R = TypeVar("R")

LONGEST_KEPT_S = 30 * 86400.0
"""Age from which a decision is planned again [s]: a machine changes."""


def ceilings_cache(root: Path) -> RecordCache[Ceilings]:
    """Measured ceilings of devices, by device and versions."""
    return RecordCache(root, "ceilings", Ceilings, what="measured ceilings")


def operations_cache(root: Path) -> RecordCache[MicroBenchmark]:
    """Times of single operations, by device and versions, and `N threads` where a CPU did not use all cores."""
    return RecordCache(root, "operations", MicroBenchmark, what="times of operations")


def operations_key(device_key: str, threads: int | None) -> tuple[str, ...]:
    """Key of a device's operation times; `threads` None: computed with all cores, or on a GPU.

    A GPU's has an entry of its own, with the times of its host.
    """
    if threads is None:
        return (device_key, "host") if device_key.startswith("cuda-") else (device_key,)
    return (device_key, f"{threads} threads")


def links_cache(root: Path) -> RecordCache[Links]:
    """Measured links between processes on this machine, by device and versions, and `N processes`."""
    return RecordCache(root, "links", Links, what="measured links")


def plan_cache(root: Path) -> RecordCache[KeptDecision]:
    """Decisions with the coupling they rest on: the same job is planned once for a device.

    The coupling decides what is learned, so a file that another user may have written is not read.
    """
    return RecordCache(
        root, "plans", KeptDecision, what="a plan", encode=dumps, longest_kept_s=LONGEST_KEPT_S, is_own_only=True
    )


def trace_cache(root: Path) -> RecordCache[Trace]:
    """Traces, by the job's identity, the settings and the version of PyTorch."""
    return RecordCache(
        root, "traces", Trace, what="a trace", encode=packed_trace, decode=unpacked_trace, suffix=".json.gz"
    )


def calibration_log(root: Path) -> RecordLog[Calibration]:
    """Forecasts with what was measured, of all runs on this machine."""
    return RecordLog(root / "calibration" / "calibrations.jsonl", Calibration, what="a calibration")


def out_of_memory_log(root: Path) -> RecordLog[OutOfMemory]:
    """Plans that ran out of memory on this machine."""
    return RecordLog(root / "calibration" / "out_of_memory.jsonl", OutOfMemory, what="what ran out of memory")


@dataclass(frozen=True)
class RecordCache(Generic[R]):
    """Records of one kind, each in a file of its own named by a key.

    A key is one or more texts that together say what the record depends on.
    """

    root: Path
    folder: str
    kind: type[R]
    what: str
    """The kind of record, for error messages."""
    encode: Callable[[R], str | bytes] = lambda record: dumps(record) + "\n"
    decode: Callable[[bytes], R] | None = None
    """From a file's bytes; without it, `records.loads`."""
    suffix: str = ".json"
    longest_kept_s: float = math.inf
    is_own_only: bool = False

    @property
    def directory(self) -> Path:
        """Where the files are."""
        return self.root / self.folder

    def read(self, *key: str) -> R | None:
        """The record under `key`; None if there is none, it is too old, another user's, or cannot be read."""
        path = self._path(key)
        try:
            if self.is_own_only and not is_own(path):
                return None
            if time.time() - path.stat().st_mtime > self.longest_kept_s:
                return None
            data = path.read_bytes()
            return loads(data, self.kind) if self.decode is None else self.decode(data)
        except (OSError, ValueError):
            return None

    def write(self, record: R, *key: str) -> None:
        """Store a record under `key`, replacing what was there.

        Raises:
            RunFailed: it cannot be written.
        """
        with disk_errors(self.directory, self.what, error=RunFailed):
            make_directories(self.directory)
        write_atomic(self._path(key), self.encode(record), what=self.what)

    def _path(self, key: tuple[str, ...]) -> Path:
        return self.directory / f"{hashlib.sha256(', '.join(key).encode()).hexdigest()[:24]}{self.suffix}"


@dataclass(frozen=True)
class RecordLog(Generic[R]):
    """Records of one kind, one a line; several processes may append at once."""

    path: Path
    kind: type[R]
    what: str

    def append(self, record: R) -> None:
        """Add one.

        Raises:
            RunFailed: it cannot be written; what was there is intact.
        """
        with disk_errors(self.path.parent, self.what, error=RunFailed):
            make_directories(self.path.parent)
        append_line(self.path, dumps(record, indent=None), what=self.what)

    def read(self, *, newest: int | None = None, **fields: Any) -> tuple[R, ...]:
        """Records that can be read and have these values, oldest first: `log.read(device_model="A")`.

        A log grows with every run, so lines without a value that is a text are not decoded, and with `newest` no more
        than so many records are.
        """
        try:
            lines = read_lines(self.path)
        except OSError:
            return ()
        texts = [dumps(value, indent=None).encode() for value in fields.values() if isinstance(value, str)]
        records: list[R] = []
        for line in reversed(lines):
            if len(records) == newest:
                break
            if all(text in line for text in texts):
                with suppress(ValueError):
                    record = loads(line, self.kind)
                    if all(getattr(record, name) == value for name, value in fields.items()):
                        records.append(record)
        return tuple(reversed(records))


_LAYOUT = 3


def packed_trace(trace: Trace) -> bytes:
    """A trace as the bytes of a file; the same trace gives the same bytes."""
    shapes = _Shapes()
    content = {
        "layout": _LAYOUT,
        "schema": Trace.schema,
        "settings": to_json(trace.settings),
        "operations": [shapes.row_of(operation) for operation in trace.operations],
        "occurrences": _columns(trace.occurrences, Occurrence),
        "storages": _columns(trace.storages, Storage),
        "events": trace.events,
        "modules": trace.modules,
        "sources": trace.sources,
        "repetition": None if trace.repetition is None else _repetition_to_json(trace.repetition, shapes),
        "is_fallback": trace.is_fallback,
        "is_balanced": trace.is_balanced,
        "took_s": trace.took_s,
        "shapes": shapes.table,
    }
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return gzip.compress(text.encode(), compresslevel=3, mtime=0)


def unpacked_trace(data: bytes) -> Trace:
    """The trace that `packed_trace` gave these bytes for.

    Raises:
        ValueError: they are of something else, of another version, or damaged.
    """
    try:
        content = json.loads(gzip.decompress(data))
        if (content["layout"], content["schema"]) != (_LAYOUT, Trace.schema):
            raise ValueError("a trace of another version")
        return _trace(content)
    except (KeyError, IndexError, TypeError, EOFError, OSError, zlib.error) as problem:
        raise ValueError(f"this is no trace: {problem!r}") from problem


def _trace(content: JSON) -> Trace:
    shapes = [TensorShape(shape=tuple(sizes), dtype=dtype) for dtype, sizes in content["shapes"]]
    return Trace(
        settings=from_json(content["settings"], TraceSettings),
        operations=tuple(_operation(row, shapes) for row in content["operations"]),
        occurrences=_rows(content["occurrences"], Occurrence),
        storages=_rows(content["storages"], Storage),
        events=tuple(content["events"]),
        modules=tuple(content["modules"]),
        sources=tuple(content["sources"]),
        repetition=_repetition(content["repetition"], shapes),
        is_fallback=content["is_fallback"],
        is_balanced=content.get("is_balanced", False),
        took_s=content["took_s"],
    )


class _Shapes:
    """The table of different shapes while a file is written."""

    def __init__(self) -> None:
        self.table: list[tuple[str, tuple[int, ...]]] = []
        self._numbers: dict[TensorShape, int] = {}

    def row_of(self, operation: Operation) -> list[JSON]:
        """An operation, shapes by their number in the table."""
        inputs, outputs = list(map(self._number, operation.inputs)), list(map(self._number, operation.outputs))
        return [
            operation.name,
            inputs,
            outputs,
            operation.flops,
            operation.bytes_read,
            operation.bytes_written,
            operation.attributes,
        ]

    def _number(self, shape: TensorShape) -> int:
        if shape not in self._numbers:
            self._numbers[shape] = len(self.table)
            self.table.append((shape.dtype, shape.shape))
        return self._numbers[shape]


def _operation(row: list[JSON], shapes: list[TensorShape]) -> Operation:
    name, inputs, outputs, flops, bytes_read, bytes_written, attributes = row
    return Operation(
        name=name,
        inputs=tuple(map(shapes.__getitem__, inputs)),
        outputs=tuple(map(shapes.__getitem__, outputs)),
        flops=flops,
        bytes_read=bytes_read,
        bytes_written=bytes_written,
        attributes=tuple((key, value) for key, value in attributes),
    )


def _repetition_to_json(repetition: Repetition, shapes: _Shapes) -> JSON:
    return {
        "module": repetition.module,
        "num_blocks": repetition.num_blocks,
        "traced": repetition.traced,
        "segments": _columns(repetition.segments, Segment),
        "copies": repetition.copies,
        "widened": [(w.occurrence, shapes.row_of(w.operation)) for w in repetition.widened],
        "grown": repetition.grown,
    }


def _repetition(content: JSON, shapes: list[TensorShape]) -> Repetition | None:
    if content is None:
        return None
    return Repetition(
        module=content["module"],
        num_blocks=content["num_blocks"],
        traced=content["traced"],
        segments=_rows(content["segments"], Segment),
        copies=tuple((block, copies) for block, copies in content["copies"]),
        widened=tuple(Widened(occurrence=at, operation=_operation(row, shapes)) for at, row in content["widened"]),
        grown=tuple((storage, num_bytes) for storage, num_bytes in content["grown"]),
    )


def _columns(records: Sequence[object], kind: type[Any]) -> dict[str, list[JSON]]:
    """The fields of records of one class, each as a column under its name."""
    return {field.name: [getattr(record, field.name) for record in records] for field in fields(kind)}


def _rows(columns: dict[str, list[JSON]], kind: type[Any]) -> tuple[Any, ...]:
    """The records of a class that `_columns` gave these columns for."""
    names = [field.name for field in fields(kind)]
    rows = zip(*(columns[name] for name in names), strict=True)
    return tuple(kind(**dict(zip(names, row, strict=True))) for row in rows)

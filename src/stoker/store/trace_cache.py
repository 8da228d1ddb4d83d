"""Traces in the cache, by what they depend on.

A trace has thousands of small parts, so a file holds columns of numbers, as compressed JSON, and each shape once; its
layout is `_LAYOUT`. What cannot be read is passed over, and traced anew: the cache serves several versions of Stoker.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from pathlib import Path

from stoker.errors import RunFailed
from stoker.records import from_json, to_json
from stoker.records.codec import JSON
from stoker.records.trace import (
    Occurrence,
    Operation,
    Repetition,
    Segment,
    Storage,
    TensorShape,
    Trace,
    TraceSettings,
    Widened,
)
from stoker.store.disk_errors import disk_errors
from stoker.store.files import make_directories, write_atomic

_LAYOUT = 1


class TraceCache:
    """Traces by a key that says what they depend on: the job's identity, the settings, the version of PyTorch.

    `directory` is `cache_root() / "traces"`.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def read(self, key: str) -> Trace | None:
        """What was stored under `key`; None if nothing was, or it cannot be read."""
        try:
            return unpacked(self._path(key).read_bytes())
        except (OSError, ValueError):
            return None

    def write(self, key: str, trace: Trace) -> None:
        """Store under `key`, replacing what was there.

        Raises:
            RunFailed: it cannot be written.
        """
        with disk_errors(self.directory, "a trace", error=RunFailed):
            make_directories(self.directory)
        write_atomic(self._path(key), packed(trace), what="a trace")

    def _path(self, key: str) -> Path:
        return self.directory / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json.gz"


def packed(trace: Trace) -> bytes:
    """A trace as the bytes of a file; the same trace gives the same bytes."""
    shapes = _Shapes()
    content = {
        "layout": _LAYOUT,
        "schema": Trace.schema,
        "settings": to_json(trace.settings),
        "operations": [shapes.row_of(operation) for operation in trace.operations],
        "phases": [o.phase for o in trace.occurrences],
        "occurrences": _columns([(o.operation, o.part, o.module, o.source) for o in trace.occurrences], 4),
        "categories": [s.category for s in trace.storages],
        "storages": _columns([(s.num_bytes, s.born, s.died, s.block) for s in trace.storages], 4),
        "events": trace.events,
        "modules": trace.modules,
        "sources": trace.sources,
        "repetition": _repetition_to_json(trace.repetition, shapes),
        "is_fallback": trace.is_fallback,
        "took_s": trace.took_s,
        "shapes": shapes.table,
    }
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return gzip.compress(text.encode(), compresslevel=3, mtime=0)


def unpacked(data: bytes) -> Trace:
    """The trace that `packed` gave these bytes for.

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
    occurrences = zip(content["phases"], *content["occurrences"], strict=True)
    storages = zip(content["categories"], *content["storages"], strict=True)
    return Trace(
        settings=from_json(content["settings"], TraceSettings),
        operations=tuple(_operation(row, shapes) for row in content["operations"]),
        occurrences=tuple(
            Occurrence(operation=operation, phase=phase, part=part, module=module, source=source)
            for phase, operation, part, module, source in occurrences
        ),
        storages=tuple(
            Storage(num_bytes=num_bytes, category=category, born=born, died=died, block=block)
            for category, num_bytes, born, died, block in storages
        ),
        events=tuple(content["events"]),
        modules=tuple(content["modules"]),
        sources=tuple(content["sources"]),
        repetition=_repetition(content["repetition"], shapes),
        is_fallback=content["is_fallback"],
        took_s=content["took_s"],
    )


class _Shapes:
    """The table of different shapes while a file is written."""

    def __init__(self) -> None:
        self.table: list[tuple[str, tuple[int, ...]]] = []
        self._numbers: dict[TensorShape, int] = {}

    def row_of(self, one: Operation) -> list[JSON]:
        """An operation, shapes by their number in the table."""
        inputs, outputs = list(map(self._number, one.inputs)), list(map(self._number, one.outputs))
        return [one.name, inputs, outputs, one.flops, one.bytes_read, one.bytes_written, one.attributes]

    def _number(self, one: TensorShape) -> int:
        if one not in self._numbers:
            self._numbers[one] = len(self.table)
            self.table.append((one.dtype, one.shape))
        return self._numbers[one]


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


def _repetition_to_json(one: Repetition | None, shapes: _Shapes) -> JSON:
    if one is None:
        return None
    return {
        "module": one.module,
        "num_blocks": one.num_blocks,
        "traced": one.traced,
        "segments": _columns([(s.block, s.start, s.stop) for s in one.segments], 3),
        "copies": one.copies,
        "widened": [(w.occurrence, shapes.row_of(w.operation)) for w in one.widened],
        "grown": one.grown,
    }


def _repetition(content: JSON, shapes: list[TensorShape]) -> Repetition | None:
    if content is None:
        return None
    segments = zip(*content["segments"], strict=True)
    return Repetition(
        module=content["module"],
        num_blocks=content["num_blocks"],
        traced=content["traced"],
        segments=tuple(Segment(block=block, start=start, stop=stop) for block, start, stop in segments),
        copies=tuple((block, copies) for block, copies in content["copies"]),
        widened=tuple(Widened(occurrence=at, operation=_operation(row, shapes)) for at, row in content["widened"]),
        grown=tuple((storage, num_bytes) for storage, num_bytes in content["grown"]),
    )


def _columns(rows: list[tuple[JSON, ...]], num_columns: int) -> list[tuple[JSON, ...]]:
    """Rows turned into columns; as many without any rows."""
    return list(zip(*rows, strict=True)) or [()] * num_columns

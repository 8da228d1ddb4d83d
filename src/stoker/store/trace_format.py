"""The file format of a trace.

A trace has thousands of small parts, so a file holds columns of numbers, as compressed JSON, and each shape once; its
layout is `_LAYOUT`.
"""

from __future__ import annotations

import gzip
import json
import zlib

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

_LAYOUT = 1


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
        "repetition": None if trace.repetition is None else _repetition_to_json(trace.repetition, shapes),
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

    def row_of(self, operation: Operation) -> list[JSON]:
        """An operation, shapes by their number in the table."""
        inputs, outputs = list(map(self._number, operation.inputs)), list(map(self._number, operation.outputs))
        return [
            operation.name, inputs, outputs, operation.flops, operation.bytes_read, operation.bytes_written,
            operation.attributes,
        ]  # fmt: skip

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
        "segments": _columns([(s.block, s.start, s.stop) for s in repetition.segments], 3),
        "copies": repetition.copies,
        "widened": [(w.occurrence, shapes.row_of(w.operation)) for w in repetition.widened],
        "grown": repetition.grown,
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

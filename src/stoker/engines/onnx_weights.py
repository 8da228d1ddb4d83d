"""Files that an ONNX graph reads its weights from ("external data").

Engines open them by the names that the graph gives. Each engine refuses names outside the graph's directory today; a
server does not rely on that, and holds the names against the manifest's list.

Source: `onnx.proto`, `TensorProto.external_data`.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_KEY = b"location"
"""The key under which a tensor has its file; a graph without these bytes has no such tensor, however it is encoded."""


def weight_files(path: Path) -> tuple[str, ...]:
    """Names of the files that a graph reads weights from, relative to its directory; without opening any of them.

    Raises:
        OSError: the graph cannot be read.
        ValueError: it names such files and is not ONNX.
    """
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            return ()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if content.find(_KEY) < 0:  # nearly always; the graph is not parsed twice then
                return ()
    import onnx  # noqa: PLC0415 - a tenth of a second that most graphs do not need
    from google.protobuf.message import DecodeError  # noqa: PLC0415 - comes with it

    try:
        return weights_named(onnx.load(path, load_external_data=False))
    except DecodeError as error:
        raise ValueError(f"it is not an ONNX graph: {error}") from error


def weights_named(model: Any) -> tuple[str, ...]:
    """The same of an `onnx.ModelProto` that was read without its weights."""
    return tuple(dict.fromkeys(_locations(model)))


def _locations(message: Any) -> Iterator[str]:
    """Every `external_data` location anywhere in a message: initializers, constants, branches, functions."""
    for field, value in message.ListFields():
        if field.name == "external_data":
            yield from (entry.value for entry in value if entry.key == _KEY.decode())
        elif field.type == field.TYPE_MESSAGE:
            for inner in [value] if hasattr(value, "ListFields") else value:
                yield from _locations(inner)

"""Finds the engines, and loads the one that an artifact names after checking the files its graph reads weights from.

Engines open an ONNX graph's external data by the names in the graph. Each engine refuses names outside the graph's
directory today; a server does not rely on that, and compares the names with the manifest's list.

Source: `onnx.proto`, `TensorProto.external_data`.
"""

from __future__ import annotations

import functools
import importlib
import mmap
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from stoker.artifacts import Artifact
from stoker.devices import attached_cpu
from stoker.engines.base import Engine, EngineRecord, Graph, Where
from stoker.errors import BadArtifact
from stoker.records import EngineName

_RECORD = "\nENGINE = "


def engine_records() -> tuple[EngineRecord, ...]:
    """Records of all engines, of each file of `stoker.engines` with an `ENGINE`; the preferred for exports first."""
    package = importlib.import_module("stoker.engines")
    return _records_in(package.__name__, tuple(package.__path__))


@functools.cache
def _records_in(package: str, paths: tuple[str, ...]) -> tuple[EngineRecord, ...]:
    files = [file for path in paths for file in Path(path).glob("*.py")]
    # By its text, since other files may need libraries that a server goes without.
    names = [file.stem for file in files if _RECORD in file.read_text(encoding="utf-8")]
    records: list[EngineRecord] = [importlib.import_module(f"{package}.{name}").ENGINE for name in names]
    return tuple(sorted(records, key=lambda record: (record.export_rank, record.name)))


def engine_record(name: EngineName) -> EngineRecord | None:
    """The record of an engine; None if there is no such engine here."""
    return next((record for record in engine_records() if record.name == name), None)


def load(
    artifact: Artifact, *, instances: int = 1, threads: int | None = None, where: Where = "cpu"
) -> tuple[Engine, ...]:
    """Engines of an artifact, each with `threads` threads (default: the usable cores divided by `instances`).

    Raises:
        BadArtifact: the graph cannot be loaded, has another format than artifacts have, reads weights from a file
            that the manifest does not list, or its engine is not installed.
    """
    manifest = artifact.manifest
    _require_known_files(artifact)
    return load_graph(
        manifest.engine,
        Graph(
            path=artifact.graph_path,
            precision=manifest.precision,
            inputs=manifest.inputs,
            outputs=manifest.outputs,
            instances=instances,
            threads=default_threads(instances) if threads is None else threads,
            where=where,
        ),
    )


def load_graph(engine: EngineName, graph: Graph) -> tuple[Engine, ...]:
    """Engines of a graph that is not, or not yet, part of an artifact.

    Raises:
        BadArtifact: see `load`.
    """
    if not graph.path.is_file():
        raise BadArtifact(f"There is no {graph.path}", remedy="Copy the artifact whole, or export it again.")
    record = engine_record(engine)
    if record is not None:
        return tuple(record.load_all(graph))
    reason = f"there is no such engine here, only {', '.join(known.name for known in engine_records())}"
    if engine == "torch":
        reason = "programs of PyTorch may hold pickles, and are not opened"
    raise BadArtifact(
        f"{graph.path} cannot be run by {engine}: {reason}", remedy="Export the model to ONNX: `stoker export`."
    )


def _require_known_files(artifact: Artifact) -> None:
    """Refuse a graph from which an engine would open files that were not verified."""
    path, manifest = artifact.graph_path, artifact.manifest
    record = engine_record(manifest.engine)
    if record is not None and path.suffix not in record.suffixes:
        raise BadArtifact(
            f"{path} is to be run by {record.name}, whose graphs in artifacts end in {' or '.join(record.suffixes)}",
            remedy="Export the model again.",
        )
    if path.suffix != ".onnx" or not path.is_file():
        return
    try:
        names = weight_files(path)
    except (OSError, ValueError) as error:
        raise BadArtifact(f"{path} cannot be read: {error}", remedy="Export the model again.") from error
    listed = {PurePosixPath(file.name) for file in manifest.files}
    for name in names:
        if PurePosixPath(manifest.graph).parent / name not in listed:
            raise BadArtifact(
                f"{path} reads weights from {name!r}, which is not in the manifest's list of files",
                remedy="Export the model again.",
            )


def default_threads(instances: int) -> int:
    """Number of threads [threads] of each instance: the usable cores divided by the instances, at least 1."""
    return max(1, attached_cpu().cores // instances)


_KEY = b"location"
"""Key of a tensor's file; a graph without these bytes has no external data in any encoding."""


def weight_files(path: Path) -> tuple[str, ...]:
    """Names of the files that a graph reads weights from, relative to its directory; none of them is opened.

    Raises:
        OSError: the graph cannot be read.
        ValueError: it names such files and is not ONNX.
    """
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            return ()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if content.find(_KEY) < 0:  # nearly always; saves parsing the graph
                return ()
    import onnx  # noqa: PLC0415 - a tenth of a second that most graphs do not need
    from google.protobuf.message import DecodeError  # noqa: PLC0415 - comes with it

    try:
        return weights_named(onnx.load(path, load_external_data=False))
    except DecodeError as error:
        raise ValueError(f"it is not an ONNX graph: {error}") from error


def weights_named(model: Any) -> tuple[str, ...]:
    """Like `weight_files`, for an `onnx.ModelProto` that was read without its weights."""
    return tuple(dict.fromkeys(_locations(model)))


def _locations(message: Any) -> Iterator[str]:
    """Every `external_data` location anywhere in a message: initializers, constants, branches, functions."""
    for field, value in message.ListFields():
        if field.name == "external_data":
            yield from (entry.value for entry in value if entry.key == _KEY.decode())
        elif field.type == field.TYPE_MESSAGE:
            for inner in [value] if hasattr(value, "ListFields") else value:
                yield from _locations(inner)

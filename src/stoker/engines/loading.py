"""From an artifact to engines."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import cast

from stoker.artifacts import Artifact
from stoker.devices import attached_cpu
from stoker.engines.base import Engine, Graph, Where
from stoker.engines.onnx_weights import weight_files
from stoker.errors import BadArtifact
from stoker.records import EngineName

_MODULES: dict[EngineName, str] = {
    "openvino": "stoker.engines.openvino",
    "onnxruntime": "stoker.engines.onnxruntime",
}
_FORMATS: dict[EngineName, tuple[str, ...]] = {"openvino": (".onnx", ".xml"), "onnxruntime": (".onnx",)}
"""Endings of graphs that artifacts have; engines read further formats, whose other files nothing here knows."""


def load(
    artifact: Artifact, *, instances: int = 1, threads: int | None = None, where: Where = "cpu"
) -> tuple[Engine, ...]:
    """Engines of an artifact, each with so many threads (default: the usable cores, shared among them).

    Raises:
        BadArtifact: the graph cannot be loaded, is of another format than artifacts have, reads weights from a file
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
    if engine not in _MODULES:
        raise BadArtifact(
            f"{graph.path} cannot be run by {engine}: programs of PyTorch may hold pickles, and are not opened",
            remedy="Export the model to ONNX: `stoker export`.",
        )
    module = importlib.import_module(_MODULES[engine])
    return tuple(cast("Sequence[Engine]", module.load_all(graph)))


def _require_known_files(artifact: Artifact) -> None:
    """Refuse a graph from which an engine would open files that nobody verified."""
    path, manifest = artifact.graph_path, artifact.manifest
    if manifest.engine in _FORMATS and path.suffix not in _FORMATS[manifest.engine]:
        raise BadArtifact(
            f"{path} is to be run by {manifest.engine}, whose graphs in artifacts end in "
            f"{' or '.join(_FORMATS[manifest.engine])}",
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
    """Threads of each of so many instances: the cores this process may use, shared among them; at least 1."""
    return max(1, attached_cpu().cores // instances)

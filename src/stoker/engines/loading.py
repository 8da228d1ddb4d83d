"""From an artifact to engines."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import cast

from stoker.artifacts import Artifact
from stoker.devices import attached_cpu
from stoker.engines.base import Engine, Graph, Where
from stoker.errors import BadArtifact
from stoker.records import EngineName

_MODULES: dict[EngineName, str] = {
    "openvino": "stoker.engines.openvino",
    "onnxruntime": "stoker.engines.onnxruntime",
}


def load(
    artifact: Artifact, *, instances: int = 1, threads: int | None = None, where: Where = "cpu"
) -> tuple[Engine, ...]:
    """Engines of an artifact, each with so many threads (default: the usable cores, shared among them).

    Raises:
        BadArtifact: the graph cannot be loaded, or its engine is not installed.
    """
    manifest = artifact.manifest
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


def default_threads(instances: int) -> int:
    """Threads of each of so many instances: the cores this process may use, shared among them; at least 1."""
    return max(1, attached_cpu().cores // instances)

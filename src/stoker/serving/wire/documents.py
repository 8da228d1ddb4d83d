"""What the protocol tells about a server and its models, as JSON; gRPC's messages have the same fields."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from stoker.records import Manifest, TensorSpec
from stoker.serving.service import BatchTotal, Entry, Statistics, Total

EXTENSIONS = (
    "binary_tensor_data",
    "classification",
    "model_configuration",
    "parameters",
    "schedule_policy",
    "statistics",
)
"""Those that every server has."""
ADMIN_EXTENSIONS = ("model_repository",)
"""Those that the admin port has besides."""

_PLATFORMS = {"onnxruntime": "onnxruntime_onnx", "openvino": "openvino", "torch": "pytorch"}


def server_metadata(*, name: str, version: str, is_admin: bool) -> dict[str, Any]:
    """Name, version and extensions."""
    return {"name": name, "version": version, "extensions": [*EXTENSIONS, *(ADMIN_EXTENSIONS if is_admin else ())]}


def model_metadata(model: str, manifest: Manifest, versions: Iterable[str]) -> dict[str, Any]:
    """What a model takes and gives; -1 for each dimension that varies."""
    return {
        "name": model,
        "versions": list(versions),
        "platform": _PLATFORMS[manifest.engine],
        "inputs": [_tensor(spec) for spec in manifest.inputs],
        "outputs": [_tensor(spec) for spec in manifest.outputs],
    }


def statistics(models: Iterable[Statistics]) -> dict[str, Any]:
    """What models did, as the statistics extension has it."""
    return {"model_stats": [_statistics(one) for one in models]}


def index(entries: Iterable[Entry]) -> list[dict[str, str]]:
    """What is in the repository."""
    return [{"name": e.name, "version": e.version, "state": e.state, "reason": e.reason} for e in entries]


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    shape = [size if isinstance(size, int) else -1 for size in spec.shape]
    return {"name": spec.name, "datatype": spec.datatype, "shape": shape}


def _statistics(of: Statistics) -> dict[str, Any]:
    return {
        "name": of.name,
        "version": of.version,
        "last_inference": of.last_inference_ms,
        "inference_count": of.inference_count,
        "execution_count": of.execution_count,
        "inference_stats": {
            "success": _total(of.success),
            "fail": _total(of.fail),
            "queue": _total(of.queue),
            "compute_input": _total(of.compute_input),
            "compute_infer": _total(of.compute_infer),
            "compute_output": _total(of.compute_output),
            "cache_hit": _total(Total()),
            "cache_miss": _total(Total()),
        },
        "batch_stats": [_batch(one) for one in of.batches],
    }


def _batch(of: BatchTotal) -> dict[str, Any]:
    return {
        "batch_size": of.batch_size,
        "compute_input": _total(of.compute_input),
        "compute_infer": _total(of.compute_infer),
        "compute_output": _total(of.compute_output),
    }


def _total(of: Total) -> dict[str, int]:
    return {"count": of.count, "ns": of.ns}

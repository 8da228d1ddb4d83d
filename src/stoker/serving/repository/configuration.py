"""A model's settings in the form of Triton's model configuration, which clients and load tools ask for.

Source: Triton Inference Server, `model_config.proto`; sizes that vary are -1, and the batch is left out of `dims`.
"""

from __future__ import annotations

from stoker.records import BATCH, Manifest, ServiceSettings, TensorSpec
from stoker.records.codec import JSON

_TYPES = {"BYTES": "TYPE_STRING"}


def triton_config(manifest: Manifest, settings: ServiceSettings, versions: tuple[int, ...]) -> JSON:
    """The configuration of one version; `versions` are all that serve."""
    return {
        "name": manifest.name,
        "platform": f"{manifest.engine}_{manifest.precision}",
        "backend": manifest.engine,
        "version_policy": {"specific": {"versions": list(versions)}},
        "max_batch_size": settings.max_batch_rows if manifest.is_batched else 0,
        "input": [_tensor(spec, is_batched=manifest.is_batched) for spec in manifest.inputs],
        "output": [_tensor(spec, is_batched=manifest.is_batched) for spec in manifest.outputs],
        "instance_group": [{"name": manifest.name, "kind": "KIND_CPU", "count": settings.instances or 1}],
        "dynamic_batching": {
            "preferred_batch_size": [],
            "max_queue_delay_microseconds": round(settings.max_delay_s * 1e6),
            "default_queue_policy": {
                "default_timeout_microseconds": round((settings.deadline_s or 0) * 1e6),
                "allow_timeout_override": True,
                "max_queue_size": settings.max_queue_rows,
            },
        },
        "parameters": {"threads": {"string_value": str(settings.threads or 1)}},
    }


def _tensor(spec: TensorSpec, *, is_batched: bool) -> JSON:
    dims = spec.shape[1:] if is_batched and spec.shape[:1] == (BATCH,) else spec.shape
    return {
        "name": spec.name,
        "data_type": _TYPES.get(spec.datatype, f"TYPE_{spec.datatype}"),
        "dims": [size if isinstance(size, int) else -1 for size in dims],
    }

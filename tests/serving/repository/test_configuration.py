"""Triton's model configuration."""

from __future__ import annotations

from pathlib import Path

from stoker.records import ServiceSettings
from stoker.serving.protocol import triton_config
from stoker.testing.tiny_models import tiny_artifact


def test_the_batch_is_left_out_of_dims_and_varying_sizes_are_minus_one(tmp_path: Path) -> None:
    """As Triton writes it for a model that it batches."""
    manifest = tiny_artifact(tmp_path, kind="tokens").manifest
    config = triton_config(manifest, ServiceSettings(instances=2, max_delay_s=0.001), (1, 3))
    assert config["max_batch_size"] == 32
    assert config["input"][0] == {"name": "input_ids", "data_type": "TYPE_INT64", "dims": [-1]}
    assert config["output"] == [{"name": "embedding", "data_type": "TYPE_FP32", "dims": [4]}]
    assert config["instance_group"][0]["count"] == 2
    assert config["dynamic_batching"]["max_queue_delay_microseconds"] == 1000
    assert config["version_policy"] == {"specific": {"versions": [1, 3]}}

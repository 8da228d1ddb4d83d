"""Models that exist in a few lines of NumPy: what they take, and engines that compute, fail or count."""

from __future__ import annotations

import numpy as np

from stoker.artifacts.dtypes import Arrays
from stoker.errors import ServiceError
from stoker.records import ArtifactSource, DynamicDim, Manifest, TensorSpec, Tolerance


def manifest(
    inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], dims: tuple[DynamicDim, ...] = ()
) -> Manifest:
    """A manifest of which only the signature matters."""
    return Manifest(
        name="small",
        engine="onnxruntime",
        precision="fp32",
        graph="",
        golden="",
        inputs=inputs,
        outputs=outputs,
        dims=dims,
        tolerance=Tolerance(absolute=1e-6, relative=1e-6),
        proved_on="",
        made_at="",
        files=(),
        source=ArtifactSource(kind="onnx", name="", digest=""),
    )


FIXED = manifest(
    (TensorSpec(name="x", datatype="FP32", shape=("batch", 4)),),
    (TensorSpec(name="y", datatype="FP32", shape=("batch", 2)),),
)
TOKENS = manifest(
    (
        TensorSpec(name="input_ids", datatype="INT64", shape=("batch", "tokens"), pad=0),
        TensorSpec(name="attention_mask", datatype="INT64", shape=("batch", "tokens"), pad=0),
    ),
    (
        TensorSpec(name="mean", datatype="FP32", shape=("batch",)),
        TensorSpec(name="states", datatype="FP32", shape=("batch", "tokens", 2)),
    ),
    (DynamicDim(name="tokens", low=1, high=128),),
)
IMAGES = manifest(
    (TensorSpec(name="image", datatype="FP32", shape=("batch", "height", "width")),),
    (TensorSpec(name="sum", datatype="FP32", shape=("batch",)),),
)

POISON = -1
"""A token that no engine can compute."""


def token_inputs(rows: int, length: int, *, first: int = 1) -> Arrays:
    """Token ids that differ in every place, none of them padded."""
    ids = np.arange(first, first + rows * length, dtype=np.int64).reshape(rows, length)
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


class TokenEngine:
    """Computes the token model: the masked mean of the ids, and two states for each token; fails on POISON."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def run(self, inputs: Arrays) -> Arrays:
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        assert ids.shape == mask.shape
        self.shapes.append(ids.shape)
        if (ids == POISON).any():
            raise ServiceError("token -1 is not in the vocabulary")
        total = (ids * mask).sum(axis=1) / mask.sum(axis=1)
        return {"mean": total.astype(np.float32), "states": np.stack((ids, mask), axis=2).astype(np.float32)}

    def close(self) -> None:
        """Nothing to give back."""


class FixedEngine:
    """Twice the first two numbers of each row; NaN in a row is what it cannot compute."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def run(self, inputs: Arrays) -> Arrays:
        x = inputs["x"]
        self.rows.append(len(x))
        if np.isnan(x).any():
            raise ServiceError("not a number")
        return {"y": x[:, :2] * 2}

    def close(self) -> None:
        """Nothing to give back."""

"""How servers without a protocol of their own are asked: the raw tensors of one sample in a body, raw outputs back.

A body has the sample's inputs one after the other, row-major and little-endian, without its batch dimension. At most
one dimension varies, and its size follows from the body's length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.artifacts import dtype_of
from stoker.records import TensorSpec

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Format:
    """The inputs that a body holds, in their order."""

    inputs: Sequence[TensorSpec]

    def encode(self, sample: Arrays) -> bytes:
        """The body of one sample; arrays have no batch dimension."""
        return b"".join(sample[spec.name].astype(dtype_of(spec.datatype), copy=False).tobytes() for spec in self.inputs)

    def decode(self, body: bytes) -> Arrays:
        """The sample in a body."""
        size = self._size(body)
        sample, start = {}, 0
        for spec in self.inputs:
            shape = tuple(size if isinstance(dim, str) else dim for dim in spec.shape[1:])
            dtype = dtype_of(spec.datatype)
            sample[spec.name] = np.frombuffer(body, dtype, prod(shape), start).reshape(shape)
            start += prod(shape) * dtype.itemsize
        return sample

    def stack(self, samples: Sequence[Arrays]) -> Arrays:
        """A batch, each sample filled up to the largest among them, as people write it by hand."""
        return {spec.name: self._stacked(spec, [sample[spec.name] for sample in samples]) for spec in self.inputs}

    def _stacked(self, spec: TensorSpec, parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
        if all(part.shape == parts[0].shape for part in parts):
            return np.stack(parts)
        shape = tuple(max(sizes) for sizes in zip(*(part.shape for part in parts), strict=True))
        batch = np.full((len(parts), *shape), spec.pad or 0, dtype=dtype_of(spec.datatype))
        for row, part in zip(batch, parts, strict=True):
            row[tuple(slice(size) for size in part.shape)] = part
        return batch

    def _size(self, body: bytes) -> int:
        """Of the dimension that varies; 0 where none does."""
        per_element = sum(
            dtype_of(spec.datatype).itemsize * prod(dim for dim in spec.shape[1:] if isinstance(dim, int))
            for spec in self.inputs
            if any(isinstance(dim, str) for dim in spec.shape[1:])
        )
        return len(body) // per_element if per_element else 0

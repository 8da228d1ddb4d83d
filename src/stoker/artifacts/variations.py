"""One request in other forms: some of its samples, cut shorter, or filled up; and answers cut back."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.artifacts.elements import Arrays
from stoker.records import BATCH, TensorSpec

Sizes = Mapping[str, int]
"""Sizes of named dimensions, such as {"tokens": 12}."""


def rows(tensors: Arrays, chosen: slice | Sequence[int]) -> Arrays:
    """Some of the samples."""
    return {name: array[chosen] for name, array in tensors.items()}


def num_rows(tensors: Arrays) -> int:
    """How many samples."""
    return len(next(iter(tensors.values())))


def stacked(parts: Iterable[Arrays]) -> Arrays:
    """Samples of several requests in one."""
    each = list(parts)
    return {name: np.concatenate([part[name] for part in each]) for name in each[0]}


def sizes_of(tensors: Arrays, specs: Iterable[TensorSpec]) -> dict[str, int]:
    """The sizes that named dimensions have in these tensors, the batch's among them.

    >>> spec = TensorSpec(name="ids", datatype="INT64", shape=("batch", "tokens"))
    >>> sizes_of({"ids": np.zeros((2, 5))}, [spec])
    {'batch': 2, 'tokens': 5}
    """
    pairs = itertools.chain.from_iterable(
        zip(spec.shape, tensors[spec.name].shape, strict=True) for spec in specs if spec.name in tensors
    )
    return {dim: size for dim, size in pairs if isinstance(dim, str)}


def cut(tensors: Arrays, specs: Iterable[TensorSpec], sizes: Sizes) -> Arrays:
    """Tensors with named dimensions cut back to these sizes; dimensions of other names stay."""
    return {spec.name: _cut(tensors[spec.name], spec, sizes) for spec in specs if spec.name in tensors}


def _cut(array: NDArray[Any], spec: TensorSpec, sizes: Sizes) -> NDArray[Any]:
    kept = (slice(sizes.get(dim)) if isinstance(dim, str) else slice(None) for dim in spec.shape)
    return array[(*kept, ...)]  # with `...` what has no dimensions stays an array


def filled(tensors: Arrays, specs: Iterable[TensorSpec], sizes: Sizes) -> Arrays:
    """Inputs filled up with their `pad` along named dimensions to these sizes; the batch, and unnamed ones, stay."""
    return {spec.name: _filled(tensors, spec, sizes) for spec in specs}


def _filled(tensors: Arrays, spec: TensorSpec, sizes: Sizes) -> NDArray[Any]:
    array = tensors[spec.name]
    shape = tuple(
        sizes.get(dim, size) if isinstance(dim, str) and dim != BATCH else size
        for dim, size in zip(spec.shape, array.shape, strict=True)
    )
    if shape == array.shape:
        return array
    full = np.full(shape, 0 if spec.pad is None else spec.pad, dtype=array.dtype)
    full[tuple(map(slice, array.shape))] = array
    return full

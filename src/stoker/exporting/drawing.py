"""Example inputs for a graph that came without any: drawn, the same every time, and within what the graph can take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.artifacts import dtype_of
from stoker.artifacts.elements import Arrays
from stoker.records import BATCH, TensorSpec

_PASSES_ON = frozenset(
    {"Cast", "Identity", "Unsqueeze", "Squeeze", "Reshape", "Flatten", "Clip", "Transpose", "Expand"}
)
_MASKS = ("mask",)
_SEED = 20
_TOKENS, _PIXELS = 8, 64
"""Sizes of dimensions that vary: of sequences, and of images; the next name's is twice as long."""


def drawn(model: Any, inputs: tuple[TensorSpec, ...], sizes: Mapping[str, int]) -> Arrays:
    """Inputs of these sizes: standard normal numbers, bytes, and whole numbers below the rows of what they look up.

    Masks are 1, but for the second half of every other sample.
    """
    draw = np.random.default_rng(_SEED)
    tables = dict(_tables(model))
    found: Arrays = {}
    for spec in inputs:
        shape = tuple(sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape)
        found[spec.name] = _drawn(draw, spec, shape, tables.get(spec.name, 2))
    return found


def likely_sizes(inputs: tuple[TensorSpec, ...]) -> dict[str, int]:
    """Sizes for named dimensions that most models can take; of each name another, to tell them apart in outputs."""
    bases = {
        dim: _PIXELS if len(spec.shape) >= 4 and at > 0 else _TOKENS
        for spec in inputs
        for at, dim in enumerate(spec.shape)
        if isinstance(dim, str) and dim != BATCH
    }
    alike = {base: [dim for dim, other in bases.items() if other == base] for base in (_TOKENS, _PIXELS)}
    return {dim: base * 2 ** alike[base].index(dim) for dim, base in bases.items()}


def _drawn(draw: np.random.Generator, spec: TensorSpec, shape: tuple[int, ...], below: int) -> NDArray[Any]:
    dtype = dtype_of(spec.datatype)
    if any(word in spec.name for word in _MASKS):
        mask = np.ones(shape, dtype=dtype)
        mask[1::2, ..., shape[-1] - shape[-1] // 2 :] = 0
        return mask
    if dtype.hasobject:
        return np.array([f"word {at}".encode() for at in range(int(np.prod(shape)))], dtype=object).reshape(shape)
    if spec.datatype == "UINT8":
        return draw.integers(0, 256, shape).astype(dtype)
    if dtype.kind in "iub":
        return draw.integers(0, below, shape).astype(dtype)
    return draw.standard_normal(shape).astype(dtype)


def _tables(model: Any) -> Iterator[tuple[str, int]]:
    """Inputs that look rows up in a table of the graph's, and how many rows that has."""
    weights = {one.name: one for one in model.graph.initializer}
    came_from = {
        node.output[0]: node.input[0] for node in model.graph.node if node.op_type in _PASSES_ON and node.input
    }
    names = {one.name for one in model.graph.input}
    for node in model.graph.node:
        if node.op_type == "Gather" and node.input[0] in weights:
            axis = next((one.i for one in node.attribute if one.name == "axis"), 0)
            source, seen = node.input[1], 0
            while source in came_from and source not in names and seen < len(came_from):
                source, seen = came_from[source], seen + 1
            if source in names:
                yield source, int(weights[node.input[0]].dims[axis])

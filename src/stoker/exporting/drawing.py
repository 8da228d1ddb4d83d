"""Example inputs for a graph that came without any: drawn, the same every time, and within what the graph can take."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import numpy_helper

from stoker.artifacts import dtype_of
from stoker.artifacts.elements import Arrays
from stoker.records import BATCH, TensorSpec

_PASSES_ON = frozenset(
    {"Cast", "Identity", "Unsqueeze", "Squeeze", "Reshape", "Flatten", "Clip", "Transpose", "Expand"}
)
_MASKS = ("mask",)
_SEED = 20
DRAWS = 3
"""How many kinds of inputs can be drawn."""
_UNKNOWN = (2, 256, 2)
"""Whole numbers of no known range lie below, by the number of the draw."""
_TOKENS, _PIXELS = 8, 64
"""Sizes of dimensions that vary: of sequences, and of images; the next name's is twice as long."""


def drawn(model: Any, inputs: tuple[TensorSpec, ...], sizes: Mapping[str, int], *, number: int = 0) -> Arrays:
    """Inputs of these sizes: standard normal numbers, bytes, and whole numbers below what the graph shows (`_limits`).

    Masks are 1, but for the second half of every other sample. Draws of another `number`, below `DRAWS`, have other
    numbers of other sizes: floats from 0 to 1, or small ones; whole numbers of no known range 0 and 1, or bytes.
    """
    draw = np.random.default_rng(_SEED + number)
    known: dict[str, int] = {}
    for name, below in _limits(model):
        known[name] = min(below, known.get(name, below))
    found: Arrays = {}
    for spec in inputs:
        shape = tuple(sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape)
        found[spec.name] = _drawn(draw, spec, shape, known.get(spec.name, _UNKNOWN[number]), number)
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


def _drawn(
    draw: np.random.Generator, spec: TensorSpec, shape: tuple[int, ...], below: int, number: int
) -> NDArray[Any]:
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
    if number == 1:
        return draw.random(shape).astype(dtype)
    return (draw.standard_normal(shape) * (0.1 if number == 2 else 1.0)).astype(dtype)


def _limits(model: Any) -> Iterator[tuple[str, int]]:
    """Inputs of whole numbers whose range the graph shows, and the number that they lie below.

    It is shown where rows of a table are looked up by them, by the depth of a one-hot encoding, and by the constants
    that they are compared with for equality, which is how one-hot encodings of JAX and TensorFlow are written.
    """
    weights = {one.name: one for one in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].HasField("t"):
            weights[node.output[0]] = node.attribute[0].t
    came_from = {
        node.output[0]: node.input[0] for node in model.graph.node if node.op_type in _PASSES_ON and node.input
    }
    names = {one.name for one in model.graph.input} - set(weights)
    origin = partial(_origin, came_from)
    for node in model.graph.node:
        if node.op_type == "Gather":
            axis = next((one.i for one in node.attribute if one.name == "axis"), 0)
            table, source = origin(node.input[0], weights), origin(node.input[1], names)
            if table is not None and source is not None:
                yield source, int(weights[table].dims[axis])
        elif node.op_type in {"OneHot", "Equal"}:
            pairs = [(node.input[0], node.input[1]), (node.input[1], node.input[0])]
            for asked, known in pairs[: 1 if node.op_type == "OneHot" else 2]:
                source, constant = origin(asked, names), origin(known, weights)
                if source is not None and constant is not None:
                    largest = _largest(weights[constant]) + (node.op_type == "Equal")
                    if largest > 1:
                        yield source, largest


def _origin(came_from: Mapping[str, str], tensor: str, ends: Container[str]) -> str | None:
    """Where a tensor comes from by way of operations that pass elements on, if that is one of `ends`."""
    for _ in range(len(came_from) + 1):
        if tensor in ends or tensor not in came_from:
            break
        tensor = came_from[tensor]
    return tensor if tensor in ends else None


def _largest(tensor: Any) -> int:
    """The largest element of a constant, as a whole number; 0 where it has none, or lies in another file."""
    if tensor.data_location == tensor.EXTERNAL:
        return 0
    values = numpy_helper.to_array(tensor)
    if values.dtype.kind not in "iuf" or not values.size or not np.isfinite(values).all():
        return 0
    return int(values.max())

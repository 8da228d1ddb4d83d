"""Tensors as JSON: `data` with numbers, booleans or strings, nested as the shape is or flat."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.artifacts.elements import dtype_of
from stoker.records import Datatype
from stoker.serving.problems import BadRequest
from stoker.serving.wire.tensors import count, strings

BINARY_ONLY = frozenset[Datatype]({"FP16", "BF16"})
"""Types of elements that JSON does not carry, says the protocol."""


def from_json(data: object, datatype: Datatype, shape: tuple[int, ...], tensor: str) -> NDArray[Any]:
    """The tensor in `data`, copied.

    `shape` is one that `checked_shape` gave.

    Raises:
        BadRequest: more or fewer values than the shape has, nested otherwise, values of another kind (a string or a
            boolean among numbers, a fraction among integers), too large for the datatype, or FP16 or BF16.
    """
    if datatype in BINARY_ONLY:
        raise BadRequest(f"{tensor} is {datatype}, which JSON does not carry; send it as binary data")
    values = _flat(data, shape, tensor)
    foreign = set(map(type, values)) - _kinds(datatype)
    if foreign:
        names = ", ".join(sorted(_JSON_NAMES.get(kind, kind.__name__) for kind in foreign))
        raise BadRequest(f"{tensor} is {datatype} and has values of other kinds in its data: {names}")
    if datatype == "BYTES":
        return strings([value.encode() for value in values]).reshape(shape)
    try:
        with np.errstate(over="ignore"):
            array = np.array(values, dtype_of(datatype))
    except OverflowError as error:
        raise BadRequest(f"{tensor} is {datatype} and has a value that does not fit: {error}") from error
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise BadRequest(f"{tensor} is {datatype} and has a value that is too large for it")
    return array.reshape(shape)


def to_json(array: NDArray[Any]) -> object:
    """What to write as `data`, flat; orjson writes the array itself, and `null` for what is no finite number."""
    flat = array.reshape(-1)
    if array.dtype.kind in "OSU":
        return [value.decode() if isinstance(value, bytes) else str(value) for value in flat.tolist()]
    return np.ascontiguousarray(flat)


_JSON_NAMES = {type(None): "null", bool: "boolean", str: "string", list: "list", dict: "object", float: "fraction"}


def _kinds(datatype: Datatype) -> set[type]:
    """What JSON values of a datatype are in Python."""
    if datatype == "BYTES":
        return {str}
    if datatype == "BOOL":
        return {bool}
    return {int, float} if datatype.startswith("FP") else {int}


def _flat(data: Any, shape: tuple[int, ...], tensor: str) -> list[Any]:
    """The values in one list, row by row."""
    if not isinstance(data, list):
        if shape or data is None:
            raise BadRequest(f"{tensor} needs `data`: a list, nested as its shape is, or flat")
        return [data]
    elements = count(shape)
    if len(data) == elements and not (data and isinstance(data[0], list)):
        return data
    level: list[Any] = [data]
    for dim, size in enumerate(shape):
        for part in level:
            if type(part) is not list or len(part) != size:
                found = f"{len(part)} values" if isinstance(part, list) else "no list"
                raise BadRequest(f"{tensor} has shape {list(shape)}; its data has {found} where dimension {dim} is")
        level = list(chain.from_iterable(level))
    if len(level) != elements:
        raise BadRequest(f"{tensor} has shape {list(shape)}, of {elements} values; its data has {len(level)}")
    return level

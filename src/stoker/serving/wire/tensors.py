"""Tensors in raw bytes, as both edges carry them: little-endian, row-major, nothing between the elements.

Source: Open Inference Protocol, "Binary Tensor Data" extension; `raw_input_contents` of the gRPC protocol.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, cast, get_args

import numpy as np
from numpy.typing import NDArray

from stoker.artifacts.elements import dtype_of
from stoker.records import Datatype
from stoker.serving.problems import BadRequest

Buffer = bytes | bytearray | memoryview

MOST_DIMS = 32
"""Dimensions of a tensor; NumPy has up to 64."""
MOST_ELEMENTS = 2**40
"""Product of a shape, zeros counted as ones; above it sizes in bytes come near to what 64 bits hold."""

_DATATYPES: frozenset[str] = frozenset(get_args(Datatype))
_LENGTH = struct.Struct("<I")


def datatype_named(value: object, tensor: str) -> Datatype:
    """A datatype by the protocol's name of it.

    Raises:
        BadRequest: there is none of that name.
    """
    if not isinstance(value, str) or value not in _DATATYPES:
        raise BadRequest(f"{tensor} has datatype {value!r}; known: {', '.join(sorted(_DATATYPES))}")
    return cast("Datatype", value)


def checked_shape(shape: object, tensor: str) -> tuple[int, ...]:
    """A shape whose elements can be counted.

    Raises:
        BadRequest: it is no list of whole numbers, has a negative one, or more dimensions or elements than can be.
    """
    if not isinstance(shape, Sequence) or isinstance(shape, str):
        raise BadRequest(f"{tensor} needs a shape: a list of whole numbers")
    if len(shape) > MOST_DIMS:
        raise BadRequest(f"{tensor} has {len(shape)} dimensions; at most {MOST_DIMS} are taken")
    elements = 1
    for size in shape:
        if type(size) is not int or size < 0:
            raise BadRequest(f"{tensor} has {size!r} in its shape; sizes are whole numbers from 0")
        elements *= size or 1
    if elements > MOST_ELEMENTS:
        raise BadRequest(f"{tensor} has a shape of {elements} elements, more than any server holds")
    return tuple(shape)


def count(shape: Sequence[int]) -> int:
    """How many elements a tensor of this shape has."""
    elements = 1
    for size in shape:
        elements *= size
    return elements


def from_raw(raw: Buffer, datatype: Datatype, shape: tuple[int, ...], tensor: str) -> NDArray[Any]:
    """The tensor in these bytes: a read-only view of them, perhaps unaligned; for BYTES an array of objects.

    `shape` is one that `checked_shape` gave.

    Raises:
        BadRequest: there are more or fewer bytes than the shape has, or a BOOL is neither 0 nor 1.
    """
    elements = count(shape)
    if datatype == "BYTES":
        return _unpack(raw, elements, tensor).reshape(shape)
    dtype = dtype_of(datatype)
    if len(raw) != elements * dtype.itemsize:
        raise BadRequest(
            f"{tensor} comes with {len(raw)} bytes; {datatype} {list(shape)} has {elements * dtype.itemsize}"
        )
    if elements == 0:
        return np.empty(shape, dtype)
    if datatype == "BOOL" and np.frombuffer(raw, np.uint8).max() > 1:
        raise BadRequest(f"{tensor} is BOOL and has bytes other than 0 and 1")
    return np.frombuffer(raw, dtype).reshape(shape)


def to_raw(array: NDArray[Any]) -> Buffer:
    """The bytes of a tensor: a view of a row-major one, a copy of any other; strings each after their length."""
    if array.dtype.kind in "OSU":
        return _pack(array)
    flat = array.reshape(-1)
    return np.ascontiguousarray(flat).view(np.uint8).data


def as_bytes(value: object) -> bytes:
    """An element of a BYTES tensor; text is written in UTF-8."""
    return value if isinstance(value, bytes) else str(value).encode()


def strings(values: Sequence[bytes]) -> NDArray[Any]:
    """A BYTES tensor of one dimension."""
    array = np.empty(len(values), object)
    array[:] = values
    return array


def _unpack(raw: Buffer, elements: int, tensor: str) -> NDArray[Any]:
    """Strings, each after its length in four bytes."""
    if elements * _LENGTH.size > len(raw):
        raise BadRequest(f"{tensor} comes with {len(raw)} bytes, too few for {elements} strings and their lengths")
    view, values, at = memoryview(raw), [], 0
    for _ in range(elements):
        start = at + _LENGTH.size
        at = start + _LENGTH.unpack_from(view, at)[0] if start <= len(view) else start
        if at > len(view):
            raise BadRequest(f"{tensor} has a string that ends {at - len(view)} bytes behind its {len(view)} bytes")
        values.append(bytes(view[start:at]))
    if at != len(view):
        raise BadRequest(f"{tensor} has {len(view) - at} bytes behind its last string")
    return strings(values)


def _pack(array: NDArray[Any]) -> bytes:
    parts: list[bytes] = []
    for value in array.reshape(-1).tolist():
        element = as_bytes(value)
        parts += (_LENGTH.pack(len(element)), element)
    return b"".join(parts)

"""Tensors on the wire: raw bytes (little-endian, row-major) and JSON `data` (nested as the shape is, or flat).

Source: Open Inference Protocol, "Binary Tensor Data" extension; `raw_input_contents` of the gRPC protocol.
"""

from __future__ import annotations

import math
import re
import secrets
import struct
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple, cast, get_args

import numpy as np
import orjson
from numpy.typing import NDArray

from stoker.artifacts.dtypes import dtype_of
from stoker.records import Datatype
from stoker.serving.refusals import BadRequest, TooLarge
from stoker.units import KIB

Buffer = bytes | bytearray | memoryview

MOST_DIMS = 32
"""Limit on a tensor's dimensions; NumPy's is 64."""
MOST_ELEMENTS = 2**40
"""Limit on the product of a shape, zeros counted as ones; sizes in bytes then fit 64 bits."""

_DATATYPES: frozenset[str] = frozenset(get_args(Datatype))
_LENGTH = struct.Struct("<I")


def datatype_named(value: object, tensor: str) -> Datatype:
    """A datatype by its name in the protocol.

    Raises:
        BadRequest: the name is unknown.
    """
    if not isinstance(value, str) or value not in _DATATYPES:
        raise BadRequest(f"{tensor} has datatype {value!r}; known: {', '.join(sorted(_DATATYPES))}")
    return cast("Datatype", value)


def checked_shape(shape: object, tensor: str) -> tuple[int, ...]:
    """A shape, checked.

    Raises:
        BadRequest: it is not a list of whole numbers from 0, or has too many dimensions or elements.
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
    """Number of elements [elements] of a tensor of this shape."""
    return math.prod(shape)


def from_raw(raw: Buffer, datatype: Datatype, shape: tuple[int, ...], tensor: str) -> NDArray[Any]:
    """The tensor in these bytes: a read-only view, perhaps unaligned; for BYTES an array of objects.

    `shape` must come from `checked_shape`.

    Raises:
        BadRequest: there are more or fewer bytes than the shape needs, or a BOOL is neither 0 nor 1.
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
    """The bytes of a tensor: a view if it is row-major, else a copy; each string after its length."""
    if array.dtype.kind in "OSU":
        parts: list[bytes] = []
        for value in array.reshape(-1).tolist():
            element = as_bytes(value)
            parts += (_LENGTH.pack(len(element)), element)
        return b"".join(parts)
    flat = array.reshape(-1)
    return np.ascontiguousarray(flat).view(np.uint8).data


def as_bytes(value: object) -> bytes:
    """An element of a BYTES tensor; text becomes UTF-8."""
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
    view, values, end = memoryview(raw), [], 0
    for _ in range(elements):
        start = end + _LENGTH.size
        end = start + _LENGTH.unpack_from(view, end)[0] if start <= len(view) else start
        if end > len(view):
            raise BadRequest(f"{tensor} has a string that ends {end - len(view)} bytes behind its {len(view)} bytes")
        values.append(bytes(view[start:end]))
    if end != len(view):
        raise BadRequest(f"{tensor} has {len(view) - end} bytes behind its last string")
    return strings(values)


BINARY_ONLY = frozenset[Datatype]({"FP16", "BF16"})
"""Element types that JSON does not carry, according to the protocol."""

LARGE_BYTES = 64 * KIB
"""Larger JSON is read in parts, so that the interpreter is not blocked for all of it at once."""
_MOST_LISTS, _MOST_VALUES = 100_000, 1_000_000
_LONG = re.compile(rb'(?<!\\)"data"\s*:\s*(\[[\[\]\d\s.,eE+\-]{%d,}\])' % LARGE_BYTES)
_OUT_OF_PLACE = re.compile(rb"[\d.]\s*\[|\]\s*[\d.\-]")
_NO_BRACKETS = bytes.maketrans(b"[]", b"  ")
_PART_BYTES = 256 * KIB


class Numbers(NamedTuple):
    """The text of a long `data` of numbers, nested or flat, not yet parsed."""

    text: bytes


def cut_out(text: bytes) -> tuple[bytes, dict[str, Numbers]]:
    """A JSON text with each long `data` of numbers replaced by a random string, and the numbers by that string.

    Parsed at once such a list takes thirty times its length in memory, and blocks the process.

    Raises:
        TooLarge: the rest has too many lists, objects or values.
    """
    token = secrets.token_hex(16)
    long: dict[str, Numbers] = {}

    def replaced(match: re.Match[bytes]) -> bytes:
        name = f"{token}{len(long)}"
        long[name] = Numbers(match[1])
        return b'"data":"%s"' % name.encode()

    rest = _LONG.sub(replaced, text)
    if rest.count(b"[") + rest.count(b"{") > _MOST_LISTS or rest.count(b",") > _MOST_VALUES:
        raise TooLarge(
            f"the JSON has more than {_MOST_LISTS:,} lists and objects, or {_MOST_VALUES:,} values that are no numbers "
            "of a `data`; send them as binary data"
        )
    return rest, long


def _from_long(numbers: Numbers, datatype: Datatype, shape: tuple[int, ...], tensor: str) -> NDArray[Any]:
    """The tensor in a long text: its brackets are compared with the shape's, its numbers parsed in parts."""
    text, elements = numbers.text, count(shape)
    values, lists = text.count(b",") + 1, text.count(b"[")
    if values != elements:
        raise BadRequest(f"{tensor} has shape {list(shape)}, of {elements} values; its data has {values}")
    nested = sum(count(shape[:depth]) for depth in range(len(shape)))
    is_flat = lists == 1
    is_valid = is_flat or lists == nested
    if is_valid:
        expected = b""  # the JSON without its numbers; no dimension is 0
        for size in reversed((elements,) if is_flat else shape):
            expected = b"[" + b",".join([expected] * size) + b"]"
        is_valid = text.translate(None, b"0123456789.eE+- \t\r\n") == expected and not _OUT_OF_PLACE.search(text)
    if not is_valid:
        raise BadRequest(f"{tensor} has shape {list(shape)}; its data is neither nested so nor flat")
    text = text.translate(_NO_BRACKETS)
    array = np.empty(elements, dtype_of(datatype))
    done = start = 0
    while start <= len(text):
        end = text.find(b",", start + _PART_BYTES)
        end = len(text) if end < 0 else end
        try:
            part = orjson.loads(b"[%s]" % text[start:end])
        except orjson.JSONDecodeError as error:
            raise BadRequest(f"the data of {tensor} is no JSON: {error}") from error
        if done + len(part) > elements:
            break
        array[done : done + len(part)] = _checked(part, datatype, tensor)
        done, start = done + len(part), end + 1
    if done != elements:
        raise BadRequest(f"{tensor} has shape {list(shape)}, of {elements} values; its data has {done}")
    return array.reshape(shape)


def from_json_data(data: object, datatype: Datatype, shape: tuple[int, ...], tensor: str) -> NDArray[Any]:
    """The tensor in `data`, copied.

    `shape` must come from `checked_shape`.

    Raises:
        BadRequest: more or fewer values than the shape has, another nesting, values of another type (a string or a
            boolean among numbers, a fraction among integers), values too large for the datatype, or FP16 or BF16.
    """
    if datatype in BINARY_ONLY:
        raise BadRequest(f"{tensor} is {datatype}, which JSON does not carry; send it as binary data")
    if isinstance(data, Numbers):
        return _from_long(data, datatype, shape, tensor)
    values = _flat(data, shape, tensor)
    if datatype == "BYTES":
        _checked_kinds(values, datatype, tensor)
        return strings([value.encode() for value in values]).reshape(shape)
    return _checked(values, datatype, tensor).reshape(shape)


def _checked_kinds(values: list[Any], datatype: Datatype, tensor: str) -> None:
    kinds: set[type] = {int, float} if datatype.startswith("FP") else {int}
    if datatype in {"BYTES", "BOOL"}:
        kinds = {str} if datatype == "BYTES" else {bool}
    foreign = set(map(type, values)) - kinds
    if foreign:
        names = ", ".join(sorted(_JSON_NAMES.get(kind, kind.__name__) for kind in foreign))
        raise BadRequest(f"{tensor} is {datatype} and has values of other kinds in its data: {names}")


def _checked(values: list[Any], datatype: Datatype, tensor: str) -> NDArray[Any]:
    """Numbers or booleans as an array of one dimension."""
    _checked_kinds(values, datatype, tensor)
    try:
        with np.errstate(over="ignore"):
            array = np.array(values, dtype_of(datatype))
    except OverflowError as error:
        raise BadRequest(f"{tensor} is {datatype} and has a value that does not fit: {error}") from error
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise BadRequest(f"{tensor} is {datatype} and has a value that is too large for it")
    return array


def to_json_data(array: NDArray[Any]) -> object:
    """The `data` to write, flat; orjson writes the array itself, and `null` for NaN and infinities."""
    flat = array.reshape(-1)
    if array.dtype.kind in "OSU":
        return [value.decode() if isinstance(value, bytes) else str(value) for value in flat.tolist()]
    return np.ascontiguousarray(flat)


_JSON_NAMES = {type(None): "null", bool: "boolean", str: "string", list: "list", dict: "object", float: "fraction"}


def _flat(data: Any, shape: tuple[int, ...], tensor: str) -> list[Any]:
    """The values in one list, in row-major order."""
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

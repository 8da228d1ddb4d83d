"""Element types: the Open Inference Protocol's names, NumPy's dtypes, and a tensor's bytes on the wire."""

from __future__ import annotations

import struct
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from stoker.records import Datatype

Arrays = dict[str, NDArray[Any]]
"""Tensors by name."""
Buffer = bytes | bytearray | memoryview
STRING_LENGTH = struct.Struct("<I")
"""Length [bytes] that stands before each string of a BYTES tensor."""

_DTYPES: dict[Datatype, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype("<u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("<i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "BYTES": np.dtype(object),
}
_DATATYPES = {dtype: name for name, dtype in _DTYPES.items()}


def dtype_of(datatype: Datatype) -> np.dtype[Any]:
    """NumPy's dtype of an element, little-endian; BYTES are objects, each of type bytes."""
    return _DTYPES[datatype]


def datatype_of(dtype: np.dtype[Any]) -> Datatype:
    """The protocol's name of a NumPy dtype; strings and objects are BYTES.

    Raises:
        KeyError: the protocol has none, as for complex numbers.
    """
    known = _DATATYPES.get(dtype)  # nearly always; called several times per request
    if known is not None:
        return known
    return "BYTES" if dtype.kind in "SUO" else _DATATYPES[dtype.newbyteorder("<")]


def to_raw(array: NDArray[Any]) -> Buffer:
    """The bytes of a little-endian tensor: a view if it is row-major, else a copy; each string after its length."""
    if array.dtype.kind in "OSU":
        parts: list[bytes] = []
        for value in array.reshape(-1).tolist():
            element = value if isinstance(value, bytes) else str(value).encode()
            parts += (STRING_LENGTH.pack(len(element)), element)
        return b"".join(parts)
    flat = array.reshape(-1)
    return np.ascontiguousarray(flat).view(np.uint8).data

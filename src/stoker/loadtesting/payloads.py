"""Inference requests as bytes, encoded once: the Open Inference Protocol over HTTP/1.1, tensors in binary.

Source: KServe, Open Inference Protocol v2, REST and its binary tensor data extension.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from stoker.artifacts import datatype_of
from stoker.artifacts.elements import Arrays
from stoker.errors import BadJob
from stoker.loadtesting.connection import Address
from stoker.loadtesting.driving import Payload

HEADER_LENGTH = "Inference-Header-Content-Length"


def infer_payload(
    address: Address, model: str, inputs: Arrays, *, version: str = "", headers: Mapping[str, str] | None = None
) -> Payload:
    """A request for these inputs, all outputs wanted in binary; rows are the first dimension's size.

    Raises:
        BadJob: an input has elements that the protocol has no name for.
    """
    tensors = {name: _tensor(name, array) for name, array in inputs.items()}
    document = json.dumps(
        {"inputs": [head for head, _ in tensors.values()], "parameters": {"binary_data_output": True}},
        separators=(",", ":"),
    ).encode()
    path = (
        f"/v2/models/{quote(model, safe='')}" + (f"/versions/{quote(version, safe='')}" if version else "") + "/infer"
    )
    body = b"".join([document, *(data for _, data in tensors.values())])
    kind = {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(len(document))}
    rows = min((len(array) if array.ndim else 1 for array in inputs.values()), default=1)
    return Payload(http_request(address, "POST", path, body, {**kind, **(headers or {})}), rows)


def http_request(
    address: Address, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> bytes:
    """A whole HTTP/1.1 request.

    Raises:
        BadJob: a header would break out of its line.
    """
    lines = [f"{method} {address.prefix}{path} HTTP/1.1", f"Host: {address.host}:{address.port}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    lines += [f"Content-Length: {len(body)}"] if body or method == "POST" else []
    if any("\r" in line or "\n" in line for line in lines):
        raise BadJob(f"a header or path has a line break: {lines}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def raw_bytes(array: NDArray[Any]) -> bytes:
    """An array as the binary extension sends it: little-endian, row-major; strings each after their length."""
    if datatype_of(array.dtype) == "BYTES":
        words = [word if isinstance(word, bytes) else str(word).encode() for word in array.ravel().tolist()]
        return b"".join(struct.pack("<I", len(word)) + word for word in words)
    return np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False)).tobytes()


def _tensor(name: str, array: NDArray[Any]) -> tuple[dict[str, Any], bytes]:
    try:
        datatype = datatype_of(array.dtype)
    except KeyError:
        raise BadJob(
            f"input {name!r} has elements of type {array.dtype}, which the protocol does not have",
            remedy="Convert it, to float32 for example.",
        ) from None
    data = raw_bytes(array)
    head = {
        "name": name,
        "shape": list(array.shape),
        "datatype": datatype,
        "parameters": {"binary_data_size": len(data)},
    }
    return head, data

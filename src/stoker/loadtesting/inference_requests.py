"""What is asked: rows of an exported model's golden inputs, of a file, or made up; of one size or of many.

Inference requests as bytes, encoded once: the Open Inference Protocol over HTTP/1.1, tensors in binary.

Source: KServe, Open Inference Protocol v2, REST and its binary tensor data extension.

What a model behind a URL takes, as it says itself.
"""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from stoker.artifacts import datatype_of, dtype_of
from stoker.artifacts.dtypes import Arrays
from stoker.errors import BadJob, ServiceError
from stoker.loadtesting.http_connection import Address, ask
from stoker.loadtesting.load_generator import Payload
from stoker.records import BATCH, TensorSpec, from_json

NUM_DRAWN = 64
"""Requests of different sizes that are drawn, and sent in turn."""


def from_file(path: Path) -> Arrays:
    """The arrays of a `.npz` file by name.

    Raises:
        BadJob: it cannot be read, or holds pickled objects.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, zipfile.BadZipFile, AttributeError) as error:
        raise BadJob(
            f"{path} cannot be read: {error}", remedy="Write it with numpy.savez(path, NAME=array, …)."
        ) from error


def made_up(specs: Sequence[TensorSpec], *, rows: int = 8, seed: int = 0) -> Arrays:
    """Inputs of the right form: floats drawn from the standard normal distribution, ones of any other type.

    Dimensions with a name get 16 elements, until `sized` gives them others. They say nothing of a model whose time
    depends on what it is given.
    """
    random = np.random.default_rng(seed)
    return {spec.name: _made_up(spec, rows, random) for spec in specs}


def _made_up(spec: TensorSpec, rows: int, random: np.random.Generator) -> NDArray[Any]:
    shape = tuple(rows if dim == BATCH else dim if isinstance(dim, int) else 16 for dim in spec.shape)
    if spec.datatype == "BYTES":
        return np.full(shape, b"1", dtype=object)
    drawn = random.standard_normal(shape) if spec.datatype in {"FP16", "BF16", "FP32", "FP64"} else np.ones(shape)
    return drawn.astype(dtype_of(spec.datatype))


def in_requests(arrays: Arrays, rows: int = 1) -> list[Arrays]:
    """The arrays cut into requests of so many rows; from the beginning again where there are too few.

    Raises:
        BadJob: `rows` is not positive, or arrays differ in how many rows they have.
    """
    if rows < 1:
        raise BadJob(f"--rows {rows}: wanted at least 1")
    sizes = {name: array.shape[:1] for name, array in arrays.items()}
    if len(set(sizes.values())) != 1 or () in sizes.values() or (0,) in sizes.values():
        raise BadJob(f"wanted inputs with equally many rows, at least one; their first dimensions are {sizes}")
    have = min(len(array) for array in arrays.values())
    starts = range(0, have - have % rows, rows) if have >= rows else range(1)
    return [
        {name: array.take(range(start, start + rows), axis=0, mode="wrap") for name, array in arrays.items()}
        for start in starts
    ]


def whole_requests(arrays: Arrays, specs: Sequence[TensorSpec], rows: int = 1) -> list[Arrays]:
    """Requests of a model without a batch: arrays of exactly its inputs' dimensions are one, of one more are many.

    Raises:
        BadJob: arrays are neither, or `rows` is not 1.
    """
    if rows != 1:
        raise BadJob(f"--rows {rows}: the model has no batch, and a request is one", remedy="Leave --rows out.")
    more = {spec.name: arrays[spec.name].ndim - len(spec.shape) for spec in specs}
    if set(more.values()) == {0}:
        return [arrays]
    counts = {array.shape[:1] for array in arrays.values()}
    if set(more.values()) != {1} or len(counts) != 1 or counts == {(0,)}:
        raise BadJob(
            "the model has no batch: wanted the whole inputs of one request, or of several, stacked: "
            + ", ".join(f"{spec.name} {list(spec.shape)} is {list(arrays[spec.name].shape)}" for spec in specs),
        )
    return [{name: array[at, ...] for name, array in arrays.items()} for at in range(counts.pop()[0])]


def sized(
    requests: Sequence[Arrays], specs: Sequence[TensorSpec], sizes: Mapping[str, Sequence[int]], *, seed: int = 0
) -> list[Arrays]:
    """As many requests as `NUM_DRAWN`, whose named dimensions have sizes drawn from `sizes`, all equally likely.

    A dimension is cut, or goes on from its beginning again. Without `sizes` the requests as they are.

    Raises:
        BadJob: the model has no dimension of such a name.
    """
    if not sizes:
        return list(requests)
    named = {dim for spec in specs for dim in spec.shape if isinstance(dim, str)} - {BATCH}
    if unknown := sizes.keys() - named:
        raise BadJob(f"--sizes: the model has no dimension {sorted(unknown)}; those that vary are {sorted(named)}")
    random = np.random.default_rng(seed)
    drawn = [{name: int(random.choice(options)) for name, options in sizes.items()} for _ in range(NUM_DRAWN)]
    by_name = {spec.name: spec for spec in specs}
    return [
        {name: _resized(array, by_name[name], wanted) for name, array in requests[number % len(requests)].items()}
        for number, wanted in enumerate(drawn)
    ]


def _resized(array: NDArray[Any], spec: TensorSpec, wanted: Mapping[str, int]) -> NDArray[Any]:
    for axis, dim in enumerate(spec.shape):
        if isinstance(dim, str) and dim in wanted:
            array = array.take(range(wanted[dim]), axis=axis, mode="wrap")
    return array


def sizes_of(word: str) -> dict[str, Sequence[int]]:
    """What `tokens=8-128` (all of them) or `tokens=8,16,64` (one of these) means.

    Raises:
        BadJob: it means neither.

    >>> sizes_of("tokens=8,16"), len(sizes_of("tokens=8-128")["tokens"])
    ({'tokens': (8, 16)}, 121)
    """
    name, _, text = word.partition("=")
    try:
        low, dash, high = text.partition("-")
        options: Sequence[int] = range(int(low), int(high) + 1) if dash else tuple(map(int, text.split(",")))
    except ValueError:
        options = ()
    if not name or not options or min(options) < 1:
        raise BadJob(f"--sizes {word}: wanted such as tokens=8-128 or tokens=16,64")
    return {name: options}


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


def input_specs(address: Address, model: str, headers: Mapping[str, str] | None = None) -> tuple[TensorSpec, ...]:
    """The inputs of a model, from its metadata.

    The protocol calls every dimension that varies -1: the first becomes the batch if it varies in every input and
    output, the others are named `dim1`, `dim2`, … by their place.

    Raises:
        ServiceError: there is no such model, or what came back is no metadata.
    """
    path = f"/v2/models/{quote(model, safe='')}"
    answer = ask(address, http_request(address, "GET", path, headers=headers))
    said = answer.body[:300].decode("utf-8", "replace")
    if answer.status != 200:
        raise ServiceError(
            f"the server has no metadata of model {model!r}: status {answer.status}: {said}",
            remedy="Name a model with --model; GET /v2/models or the repository's index tells which there are.",
        )
    try:
        document = json.loads(answer.body)
        tensors = [*document["inputs"], *document.get("outputs", ())]
        is_batched = all(one["shape"][:1] == [-1] for one in tensors)
        return tuple(_spec(one, is_batched=is_batched) for one in document["inputs"])
    except (ValueError, KeyError, TypeError) as error:
        raise ServiceError(f"the metadata of model {model!r} cannot be used ({error!r}): {said}") from error


def _spec(document: dict[str, Any], *, is_batched: bool) -> TensorSpec:
    shape = [
        (BATCH if place == 0 and is_batched else f"dim{place}") if size == -1 else size
        for place, size in enumerate(document["shape"])
    ]
    return from_json({"name": document["name"], "datatype": document["datatype"], "shape": shape}, TensorSpec)

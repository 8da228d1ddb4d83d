"""Requests of a load test: their inputs (a file's, golden, or random), cut to rows and sizes, encoded once as bytes.

Source: KServe, Open Inference Protocol v2, REST and its binary tensor data extension.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

import numpy as np

from stoker.artifacts import datatype_of, dtype_of
from stoker.artifacts.dtypes import Arrays, to_raw
from stoker.data.reading.array_files import BadArrayFile, npz_arrays
from stoker.errors import BadJob, ServiceError
from stoker.loadtesting.http_connection import Address, ask
from stoker.loadtesting.load_generator import Payload
from stoker.records import BATCH, TensorSpec, from_json
from stoker.records.codec import parsed

NUM_DRAWN = 64
"""Number of requests of random sizes; they are sent in turn."""


def from_file(path: Path) -> Arrays:
    """The arrays of a `.npz` file by name.

    Raises:
        BadJob: it cannot be read, or holds pickled objects.
    """
    try:
        return npz_arrays(path)
    except BadArrayFile as error:
        raise BadJob(f"{path} {error}", remedy="Write it with numpy.savez(path, NAME=array, …).") from error


def made_up(specs: Sequence[TensorSpec], *, rows: int = 8) -> Arrays:
    """Random inputs: floats from the standard normal distribution, ones for any other type.

    Named dimensions have 16 elements, until `sized` changes them. Not representative of a model whose time depends on
    the values.
    """
    random = np.random.default_rng(0)
    arrays: Arrays = {}
    for spec in specs:
        shape = tuple(rows if dim == BATCH else dim if isinstance(dim, int) else 16 for dim in spec.shape)
        if spec.datatype == "BYTES":
            arrays[spec.name] = np.full(shape, b"1", dtype=object)
            continue
        is_float = spec.datatype in {"FP16", "BF16", "FP32", "FP64"}
        values = random.standard_normal(shape) if is_float else np.ones(shape)
        arrays[spec.name] = values.astype(dtype_of(spec.datatype))
    return arrays


def in_requests(arrays: Arrays, rows: int = 1) -> list[Arrays]:
    """The arrays cut into requests of `rows` rows; rows repeat if there are too few.

    Raises:
        BadJob: `rows` is not positive, or arrays differ in their number of rows.
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
    """Requests of a model without a batch: one if arrays have its inputs' dimensions, several if they have one more.

    Raises:
        BadJob: the arrays have other dimensions, or `rows` is not 1.
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
            + ", ".join(f"{spec.name} {list(spec.shape)} is {list(arrays[spec.name].shape)}" for spec in specs)
        )
    return [{name: array[index, ...] for name, array in arrays.items()} for index in range(counts.pop()[0])]


def sized(requests: Sequence[Arrays], specs: Sequence[TensorSpec], sizes: Mapping[str, Sequence[int]]) -> list[Arrays]:
    """`NUM_DRAWN` requests whose named dimensions have sizes drawn uniformly from `sizes`; unchanged without `sizes`.

    A dimension is cut, or repeated from its beginning.

    Raises:
        BadJob: the model has no dimension of such a name.
    """
    if not sizes:
        return list(requests)
    named = {dim for spec in specs for dim in spec.shape if isinstance(dim, str)} - {BATCH}
    if unknown := sizes.keys() - named:
        raise BadJob(f"--sizes: the model has no dimension {sorted(unknown)}; those that vary are {sorted(named)}")
    random = np.random.default_rng(0)
    resized = []
    for number in range(NUM_DRAWN):
        drawn = {name: int(random.choice(options)) for name, options in sizes.items()}
        request = dict(requests[number % len(requests)])
        for spec in specs:
            for axis, dim in enumerate(spec.shape):
                if isinstance(dim, str) and dim in drawn:
                    request[spec.name] = request[spec.name].take(range(drawn[dim]), axis=axis, mode="wrap")
        resized.append(request)
    return resized


def sizes_of(word: str) -> dict[str, Sequence[int]]:
    """The sizes in `tokens=8-128` (a range) or `tokens=8,16,64` (a list), by dimension.

    Raises:
        BadJob: the text has another form.

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
    """A request with these inputs and binary outputs; its rows are the first dimension's size.

    Raises:
        BadJob: an input has an element type that the protocol lacks.
    """
    heads, contents = [], []
    for name, array in inputs.items():
        try:
            datatype = datatype_of(array.dtype)
        except KeyError:
            raise BadJob(
                f"input {name!r} has elements of type {array.dtype}, which the protocol does not have",
                remedy="Convert it, to float32 for example.",
            ) from None
        content = bytes(to_raw(array.astype(dtype_of(datatype), copy=False)))
        size = {"binary_data_size": len(content)}
        heads.append({"name": name, "shape": list(array.shape), "datatype": datatype, "parameters": size})
        contents.append(content)
    request = {"inputs": heads, "parameters": {"binary_data_output": True}}
    document = json.dumps(request, separators=(",", ":")).encode()
    path = (
        f"/v2/models/{quote(model, safe='')}" + (f"/versions/{quote(version, safe='')}" if version else "") + "/infer"
    )
    body = b"".join([document, *contents])
    kind = {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(len(document))}
    rows = min((len(array) if array.ndim else 1 for array in inputs.values()), default=1)
    return Payload(http_request(address, "POST", path, body, {**kind, **(headers or {})}), rows)


def http_request(
    address: Address, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> bytes:
    """A whole HTTP/1.1 request.

    Raises:
        BadJob: a header or the path has a line break.
    """
    lines = [f"{method} {address.prefix}{path} HTTP/1.1", f"Host: {address.host}:{address.port}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    lines += [f"Content-Length: {len(body)}"] if body or method == "POST" else []
    if any("\r" in line or "\n" in line for line in lines):
        raise BadJob(f"a header or path has a line break: {lines}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def input_specs(address: Address, model: str, headers: Mapping[str, str] | None = None) -> tuple[TensorSpec, ...]:
    """The inputs of a served model, from its metadata.

    The protocol calls every dimension that varies -1: the first becomes the batch if it varies in every input and
    output, the others are named `dim1`, `dim2`, … by their index.

    Raises:
        ServiceError: there is no such model, or the answer is not metadata.
    """
    path = f"/v2/models/{quote(model, safe='')}"
    answer = ask(address, http_request(address, "GET", path, headers=headers))
    text = answer.body[:300].decode("utf-8", "replace")
    if answer.status != 200:
        raise ServiceError(
            f"the server has no metadata of model {model!r}: status {answer.status}: {text}",
            remedy="Name a model with --model; GET /v2/models or the repository's index lists them.",
        )
    try:
        document = parsed(answer.body)
        tensors = [*document["inputs"], *document.get("outputs", ())]
        names = {0: BATCH} if all(tensor["shape"][:1] == [-1] for tensor in tensors) else {}
        specs = []
        for tensor in document["inputs"]:
            shape = [names.get(axis, f"dim{axis}") if size == -1 else size for axis, size in enumerate(tensor["shape"])]
            specs.append(
                from_json({"name": tensor["name"], "datatype": tensor["datatype"], "shape": shape}, TensorSpec)
            )
    except (ValueError, KeyError, TypeError) as error:
        raise ServiceError(f"the metadata of model {model!r} cannot be used ({error!r}): {text}") from error
    return tuple(specs)

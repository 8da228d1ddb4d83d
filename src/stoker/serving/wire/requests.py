"""Inference requests of REST: JSON, JSON with binary data behind it, or one tensor's bytes and nothing else.

Source: Open Inference Protocol, "Inference" and its extensions "Binary Tensor Data", "Classification", "Parameters".
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple, cast

import orjson

from stoker.artifacts.elements import Arrays, dtype_of
from stoker.records import BATCH, Datatype, Manifest
from stoker.serving.problems import BadRequest
from stoker.serving.service import Request, Wanted
from stoker.serving.wire import parameters as known
from stoker.serving.wire.forms import Form
from stoker.serving.wire.json_data import LARGE_BYTES, Numbers, cut_out, from_json
from stoker.serving.wire.tensors import checked_shape, datatype_named, from_raw

_ALL_JSON, _ALL_BINARY = Form(), Form(binary=True)
_MOST_KNOWN_BYTES = 4096
"""The JSON before binary data is remembered up to this length: who asks with tensors of one shape sends the same again
and again, and reading it takes longer than finding it."""


class _Described(NamedTuple):
    """An input as the JSON has it; without `num_bytes` its elements are in `data`."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    num_bytes: int | None
    data: object


class _Head(NamedTuple):
    """All that a request's JSON says. It is shared by the requests that say it, and never changed."""

    id: str
    inputs: tuple[_Described, ...]
    outputs: tuple[Wanted, ...]
    form: Form
    urgency: known.Urgency
    parameters: Mapping[str, Any]


def decode(
    body: bytes, *, json_bytes: int | None, model: str, version: str = "", caller: str = ""
) -> tuple[Request, Form]:
    """The request in a body, and in which form it wants its answer; inputs are views of the body where they can be.

    Args:
        body: not compressed any more.
        json_bytes: length of the JSON at its start (`Inference-Header-Content-Length`); None: all of it.
        model: as the path names it, like `version`.
        version: empty where the path names none.
        caller: name of the API key.

    Raises:
        BadRequest: it is malformed; whether it fits the model is not looked at.
        Unsupported: it needs shared memory or sequences.
    """
    view = memoryview(body).toreadonly()
    if json_bytes is None:
        json_bytes = len(view)
    elif json_bytes > len(view):
        raise BadRequest(
            f"Inference-Header-Content-Length is {json_bytes}, more than the {len(view)} bytes of the body"
        )
    is_short = json_bytes < len(view) and json_bytes <= _MOST_KNOWN_BYTES
    head = _known_head(bytes(view[:json_bytes])) if is_short else _head(view[:json_bytes])
    request = Request(
        model=model,
        version=version,
        id=head.id,
        inputs=_inputs(head.inputs, view[json_bytes:]),
        outputs=head.outputs,
        deadline_s=head.urgency.deadline_s,
        priority=head.urgency.priority,
        caller=caller,
        num_bytes=len(view),
        parameters=head.parameters,
    )
    return request, head.form


def decode_raw(
    body: bytes, *, manifest: Manifest, model: str, version: str = "", caller: str = ""
) -> tuple[Request, Form]:
    """The request in a body that is one tensor's bytes and nothing else (`Inference-Header-Content-Length: 0`).

    Its shape is the model's, with one sample; one other dimension may vary, and follows from the number of bytes.

    Raises:
        BadRequest: the model has several inputs or dimensions that vary, or the bytes do not divide.
    """
    if len(manifest.inputs) != 1:
        raise BadRequest(
            f"{manifest.name!r} has {len(manifest.inputs)} inputs; a body without JSON is for models of one"
        )
    spec = manifest.inputs[0]
    shape = [1 if size == BATCH else size for size in spec.shape]
    varying = [axis for axis, size in enumerate(shape) if isinstance(size, str)]
    if len(varying) > 1 or (varying and spec.datatype == "BYTES"):
        raise BadRequest(
            f"input {spec.name!r} has dimensions that vary; a body without JSON cannot say how large they are"
        )
    if varying:
        fixed = dtype_of(spec.datatype).itemsize
        for size in shape:
            fixed *= size if isinstance(size, int) else 1
        shape[varying[0]] = len(body) // max(1, fixed)
    array = from_raw(
        memoryview(body).toreadonly(), spec.datatype, cast("tuple[int, ...]", tuple(shape)), f"input {spec.name!r}"
    )
    request = Request(model=model, version=version, inputs={spec.name: array}, caller=caller, num_bytes=len(body))
    return request, _ALL_BINARY


def _head(text: bytes | memoryview) -> _Head:
    """What the JSON of a request says."""
    long: Mapping[str, Numbers] = {}
    if len(text) > LARGE_BYTES:
        text, long = cut_out(bytes(text))
    document = _document(text)
    parameters = known.checked(document.get("parameters"), "the request")
    urgency = known.urgency(parameters)
    outputs, form = _outputs(document.get("outputs"), parameters)
    identity = _identity(document.get("id"))
    return _Head(identity, _described(document.get("inputs"), long), outputs, form, urgency, parameters)


_known_head = lru_cache(maxsize=256)(_head)


def _document(text: bytes | memoryview) -> dict[str, Any]:
    try:
        document = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is no JSON: {error}") from error
    if not isinstance(document, dict):
        raise BadRequest("the body must be a JSON object with `inputs`")
    return document


def _identity(value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise BadRequest(f"the request's id must be a string, got {value!r}")
    return value


def _described(inputs: object, long: Mapping[str, Numbers]) -> tuple[_Described, ...]:
    """Each input as it is described, with its `data` or the length of its binary data."""
    if not isinstance(inputs, list) or not inputs:
        raise BadRequest("the request needs `inputs`: a list of tensors, each with name, shape, datatype and data")
    described: dict[str, _Described] = {}
    for one in inputs:
        name = _name(one, "input")
        tensor = f"input {name!r}"
        if name in described:
            raise BadRequest(f"{tensor} is given twice")
        datatype, shape = datatype_named(one.get("datatype"), tensor), checked_shape(one.get("shape"), tensor)
        parameters = known.checked(one.get("parameters"), tensor)
        known.refuse_shared_memory(parameters, tensor)
        is_binary = "binary_data_size" in parameters
        if is_binary and "data" in one:
            raise BadRequest(f"{tensor} has both `data` and binary_data_size; one of them has to go")
        size = known.whole(parameters, "binary_data_size", tensor) if is_binary else None
        described[name] = _Described(name, datatype, shape, size, _data(one.get("data"), long))
    return tuple(described.values())


def _data(value: object, long: Mapping[str, Numbers]) -> object:
    """An input's `data`; where it was cut out, what stood there."""
    return long.get(value, value) if long and isinstance(value, str) else value


def _inputs(described: tuple[_Described, ...], tail: memoryview) -> Arrays:
    """Each input by name: from its `data`, or from the bytes that follow those of the inputs before it."""
    arrays: Arrays = {}
    at = 0
    for name, datatype, shape, num_bytes, data in described:
        tensor = f"input {name!r}"
        if num_bytes is None:
            arrays[name] = from_json(data, datatype, shape, tensor)
            continue
        end = at + num_bytes
        if end > len(tail):
            raise BadRequest(f"{tensor} ends at byte {end} of the binary data, of which there are {len(tail)} bytes")
        arrays[name] = from_raw(tail[at:end], datatype, shape, tensor)
        at = end
    if at != len(tail):
        raise BadRequest(f"{len(tail)} bytes of binary data follow the JSON; its inputs claim {at} of them")
    return arrays


def _outputs(described: object, parameters: dict[str, Any]) -> tuple[tuple[Wanted, ...], Form]:
    """Which outputs are wanted, and in which form."""
    binary = known.flag(parameters, "binary_data_output", "the request", default=False)
    if described is None or described == []:
        return (), _ALL_BINARY if binary else _ALL_JSON
    if not isinstance(described, list):
        raise BadRequest("`outputs` must be a list of objects, each with a name")
    wanted: dict[str, Wanted] = {}
    forms: dict[str, bool] = {}
    for one in described:
        name = _name(one, "output")
        if name in wanted:
            raise BadRequest(f"output {name!r} is asked for twice")
        where = f"output {name!r}"
        own = known.checked(one.get("parameters"), where)
        known.refuse_shared_memory(own, where)
        wanted[name] = Wanted(name=name, classification=known.whole(own, "classification", where))
        forms[name] = known.flag(own, "binary_data", where, default=binary)
    return tuple(wanted.values()), Form(binary=binary, outputs=forms)


def _name(described: object, what: str) -> str:
    name = described.get("name") if isinstance(described, dict) else None
    if not isinstance(name, str) or not name:
        raise BadRequest(f"each {what} must be an object with a name")
    return name

"""Bodies of REST: inference requests decoded, responses encoded, and gzip and deflate in both directions.

A request is JSON, JSON followed by binary data, or the bytes of one tensor; a response is JSON, or JSON followed by the
outputs that were requested as binary data.

Source: Open Inference Protocol, "Inference" and its extensions "Binary Tensor Data", "Classification", "Parameters".
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, cast

import orjson

from stoker.artifacts.dtypes import Arrays, Buffer, datatype_of, dtype_of, to_raw
from stoker.records import BATCH, Datatype, Manifest
from stoker.serving import protocol
from stoker.serving.protocol import (
    BINARY_ONLY,
    LARGE_BYTES,
    checked_shape,
    cut_out,
    datatype_named,
    from_json_data,
    from_raw,
    to_json_data,
)
from stoker.serving.refusals import BadRequest, TooLarge, WrongFormat, shortened
from stoker.serving.service import InferenceRequest, InferenceResponse, RequestedOutput


@dataclass(frozen=True, kw_only=True)
class OutputForm:
    """Form of the outputs: `binary` is the default (`binary_data_output`), `outputs` are per name (`binary_data`)."""

    binary: bool = False
    outputs: Mapping[str, bool] = field(default_factory=dict)

    def is_binary(self, output: str) -> bool:
        """Whether this output is binary data after the JSON."""
        return self.outputs.get(output, self.binary)


def check_output_form(form: OutputForm, request: InferenceRequest, manifest: Manifest) -> None:
    """Check, before anything is computed, that JSON can carry the outputs requested in it.

    Raises:
        BadRequest: an FP16 or BF16 output is requested as JSON.
    """
    if form.binary and not form.outputs:
        return
    num_classes = {output.name: output.classification for output in request.outputs}
    for spec in manifest.outputs:
        if spec.datatype not in BINARY_ONLY or form.is_binary(spec.name):
            continue
        if not num_classes or num_classes.get(spec.name) == 0:
            raise BadRequest(
                f"output {spec.name!r} of {manifest.name!r} is {spec.datatype}, which JSON does not carry; ask for it "
                "with the parameter binary_data, or for all with binary_data_output"
            )


_ALL_JSON, _ALL_BINARY = OutputForm(), OutputForm(binary=True)
_MOST_KNOWN_BYTES = 4096
"""The parsed JSON before binary data is cached up to this length: clients with tensors of one shape repeat it, and
parsing takes longer than the lookup."""


class _Described(NamedTuple):
    """An input as described in the JSON; without `num_bytes` its elements are in `data`."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    num_bytes: int | None
    data: object


class _Head(NamedTuple):
    """The content of a request's JSON. Requests with equal JSON share it; it is never changed."""

    id: str
    inputs: tuple[_Described, ...]
    outputs: tuple[RequestedOutput, ...]
    form: OutputForm
    urgency: protocol.Urgency
    parameters: Mapping[str, Any]


def decode(
    body: bytes, *, json_bytes: int | None, model: str, version: str = "", caller: str = ""
) -> tuple[InferenceRequest, OutputForm]:
    """The request in a body, and the form of its answer; binary inputs are views of the body.

    Args:
        body: decompressed.
        json_bytes: length of the JSON at its start (`Inference-Header-Content-Length`); None: all of it.
        model: from the path, like `version`.
        version: empty if the path has none.
        caller: name of the API key.

    Raises:
        BadRequest: it is malformed; whether it fits the model is not checked here.
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
    request = InferenceRequest(
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
) -> tuple[InferenceRequest, OutputForm]:
    """The request in a body that is one tensor's bytes (`Inference-Header-Content-Length: 0`).

    Its shape is the model's, with one sample; one other dimension may vary, and follows from the number of bytes.

    Raises:
        BadRequest: the model has several inputs or varying dimensions, or the bytes do not divide evenly.
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
    request = InferenceRequest(
        model=model, version=version, inputs={spec.name: array}, caller=caller, num_bytes=len(body)
    )
    return request, _ALL_BINARY


def json_object(text: bytes | memoryview) -> tuple[dict[str, Any], Mapping[str, bytes]]:
    """The object in a body, and the texts of long lists of numbers, not yet parsed (see `cut_out`).

    Raises:
        BadRequest: it is not JSON, or not an object.
        TooLarge: it has too many lists, objects or values.
    """
    long: Mapping[str, bytes] = {}
    if len(text) > LARGE_BYTES:
        text, long = cut_out(bytes(text))
    try:
        document = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is no JSON: {error}") from error
    if not isinstance(document, dict):
        raise BadRequest("the body must be a JSON object")
    return document, long


def _head(text: bytes | memoryview) -> _Head:
    """Parse the JSON of a request."""
    document, long = json_object(text)
    parameters = protocol.checked_parameters(document.get("parameters"), "the request")
    urgency = protocol.urgency(parameters)
    outputs, form = _outputs(document.get("outputs"), parameters)
    identity = document.get("id")
    if not isinstance(identity, str | None):
        raise BadRequest(f"the request's id must be a string, got {identity!r}")
    return _Head(identity or "", _described(document.get("inputs"), long), outputs, form, urgency, parameters)


_known_head = lru_cache(maxsize=256)(_head)


def _described(inputs: object, long: Mapping[str, bytes]) -> tuple[_Described, ...]:
    """Each input's description, with its `data` or the length of its binary data."""
    if not isinstance(inputs, list) or not inputs:
        raise BadRequest("the request needs `inputs`: a list of tensors, each with name, shape, datatype and data")
    described: dict[str, _Described] = {}
    for given in inputs:
        name = _name(given, "input")
        tensor = f"input {name!r}"
        if name in described:
            raise BadRequest(f"{tensor} is given twice")
        datatype, shape = datatype_named(given.get("datatype"), tensor), checked_shape(given.get("shape"), tensor)
        parameters = protocol.checked_parameters(given.get("parameters"), tensor)
        protocol.refuse_shared_memory(parameters, tensor)
        is_binary = "binary_data_size" in parameters
        if is_binary and "data" in given:
            raise BadRequest(f"{tensor} has both `data` and binary_data_size; one of them has to go")
        size = protocol.whole_parameter(parameters, "binary_data_size", tensor) if is_binary else None
        data = given.get("data")
        if long and isinstance(data, str):  # it may stand for numbers that were cut out
            data = long.get(data, data)
        described[name] = _Described(name, datatype, shape, size, data)
    return tuple(described.values())


def _inputs(described: tuple[_Described, ...], tail: memoryview) -> Arrays:
    """Each input by name: from its `data`, or from the bytes that follow those of the inputs before it."""
    arrays: Arrays = {}
    start = 0
    for name, datatype, shape, num_bytes, data in described:
        tensor = f"input {name!r}"
        if num_bytes is None:
            arrays[name] = from_json_data(data, datatype, shape, tensor)
            continue
        end = start + num_bytes
        if end > len(tail):
            raise BadRequest(f"{tensor} ends at byte {end} of the binary data, of which there are {len(tail)} bytes")
        arrays[name] = from_raw(tail[start:end], datatype, shape, tensor)
        start = end
    if start != len(tail):
        raise BadRequest(f"{len(tail)} bytes of binary data follow the JSON; its inputs claim {start} of them")
    return arrays


def _outputs(described: object, parameters: dict[str, Any]) -> tuple[tuple[RequestedOutput, ...], OutputForm]:
    """The requested outputs, and their form."""
    binary = protocol.flag_parameter(parameters, "binary_data_output", "the request", default=False)
    if described is None or described == []:
        return (), _ALL_BINARY if binary else _ALL_JSON
    if not isinstance(described, list):
        raise BadRequest("`outputs` must be a list of objects, each with a name")
    outputs: dict[str, RequestedOutput] = {}
    forms: dict[str, bool] = {}
    for given in described:
        name = _name(given, "output")
        if name in outputs:
            raise BadRequest(f"output {name!r} is asked for twice")
        where = f"output {name!r}"
        own = protocol.checked_parameters(given.get("parameters"), where)
        protocol.refuse_shared_memory(own, where)
        num_classes = protocol.whole_parameter(own, "classification", where)
        outputs[name] = RequestedOutput(name=name, classification=num_classes)
        forms[name] = protocol.flag_parameter(own, "binary_data", where, default=binary)
    return tuple(outputs.values()), OutputForm(binary=binary, outputs=forms)


def _name(described: object, what: str) -> str:
    name = described.get("name") if isinstance(described, dict) else None
    if not isinstance(name, str) or not name:
        raise BadRequest(f"each {what} must be an object with a name")
    return name


class Encoded(NamedTuple):
    """A body, and the length of the JSON at its start if binary data follows (else None)."""

    body: bytes
    json_bytes: int | None


def encode(response: InferenceResponse, form: OutputForm) -> Encoded:
    """A response in the requested form; each byte of a row-major output is copied once, into the body."""
    tail: list[Buffer] = []
    outputs = []
    for name, array in response.outputs.items():
        output: dict[str, Any] = {"name": name, "datatype": datatype_of(array.dtype), "shape": array.shape}
        if form.is_binary(name):
            raw = to_raw(array)
            output["parameters"] = {"binary_data_size": len(raw)}
            tail.append(raw)
        else:
            output["data"] = to_json_data(array)
        outputs.append(output)
    document: dict[str, Any] = {"model_name": response.model, "model_version": response.version}
    if response.id:
        document["id"] = response.id
    document["outputs"] = outputs
    text = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    return Encoded(b"".join((text, *tail)), len(text)) if tail else Encoded(text, None)


LEAST_BYTES = 1024
"""Smaller answers are not compressed: they fit into one packet."""

_WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
_FASTEST = 1


def decompress(body: bytes, encoding: str, *, most_bytes: int) -> bytes:
    """The decompressed body; deflate is zlib's format, as HTTP defines it.

    Raises:
        BadRequest: it is damaged or incomplete, or bytes follow it.
        TooLarge: it would have more than `most_bytes`; no more were held.
        WrongFormat: the encoding is unknown.
    """
    encoding = encoding.strip().lower()
    if encoding in {"", "identity"}:
        return body
    if encoding not in _WINDOW_BITS:
        raise WrongFormat(f"Content-Encoding {shortened(encoding)} is not known; gzip and deflate are")
    stream = zlib.decompressobj(_WINDOW_BITS[encoding])
    try:
        whole = stream.decompress(body, most_bytes + 1)
    except zlib.error as error:
        raise BadRequest(f"the body is no {encoding}: {error}") from error
    if len(whole) > most_bytes:
        raise TooLarge(f"the body has more than {most_bytes} bytes once decompressed")
    if not stream.eof:
        raise BadRequest(f"the {encoding} body is cut off: {len(body)} bytes came")
    if stream.unused_data:
        raise BadRequest(f"{len(stream.unused_data)} bytes follow the {encoding} body")
    return whole


def accepted_encoding(accept_encoding: str) -> str:
    """The encoding of the answer: the one that `Accept-Encoding` names alone, or empty.

    HTTP libraries send lists such as `gzip, deflate` by default, and compressing tensors costs more than it saves near
    the server.
    """
    if not accept_encoding:
        return ""
    name, _, weight = accept_encoding.strip().lower().partition(";")
    if weight.replace(" ", "") in {"q=0", "q=0.0"}:
        return ""
    return name.strip() if name.strip() in {"gzip", "deflate"} else ""


def compress(body: bytes, encoding: str) -> bytes:
    """The body as `gzip` or `deflate`, at the fastest level."""
    stream = zlib.compressobj(_FASTEST, zlib.DEFLATED, _WINDOW_BITS[encoding])
    return stream.compress(body) + stream.flush()

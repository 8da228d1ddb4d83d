"""The Open Inference Protocol without its transport: tensors, documents, request parameters, input checks, classes.

Tensors are raw bytes (little-endian, row-major) or JSON `data` (nested as the shape is, or flat). Documents are JSON;
gRPC's messages have the same fields. A model's settings are given as Triton's model configuration, which clients and
load tools ask for.

Source: KServe, Open Inference Protocol v2, its "Binary Tensor Data" extension, and `raw_input_contents` of its gRPC
form; Triton Inference Server, `model_config.proto` (sizes that vary are -1, and `dims` has no batch).
"""

from __future__ import annotations

import dataclasses
import math
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, cast, get_args

import numpy as np
import orjson
from numpy.typing import NDArray

from stoker.artifacts.dtypes import STRING_LENGTH, Arrays, Buffer, datatype_of, dtype_of
from stoker.engines import engine_record
from stoker.errors import nearest
from stoker.records import BATCH, Datatype, DynamicDim, Manifest, ServiceSettings, TensorSpec
from stoker.records.codec import JSON
from stoker.serving.refusals import BadRequest, TooLarge, Unsupported
from stoker.serving.service import InferenceRequest, InferenceResponse, Parameter, RepositoryEntry, ServerContext
from stoker.units import KIB

EXTENSIONS = (
    "binary_tensor_data",
    "classification",
    "model_configuration",
    "parameters",
    "schedule_policy",
    "statistics",
)
"""Extensions of every server."""
ADMIN_EXTENSIONS = ("model_repository",)
"""Further extensions of the admin port."""


def server_metadata(*, name: str, version: str, is_admin: bool) -> dict[str, Any]:
    """Name, version and extensions."""
    return {"name": name, "version": version, "extensions": [*EXTENSIONS, *(ADMIN_EXTENSIONS if is_admin else ())]}


def model_metadata(model: str, manifest: Manifest, versions: Iterable[str]) -> dict[str, Any]:
    """A model's inputs and outputs; -1 for each dimension that varies."""
    record = engine_record(manifest.engine)
    return {
        "name": model,
        "versions": list(versions),
        "platform": manifest.engine if record is None else record.platform,
        "inputs": [_tensor_metadata(spec) for spec in manifest.inputs],
        "outputs": [_tensor_metadata(spec) for spec in manifest.outputs],
    }


def index_document(entries: Iterable[RepositoryEntry]) -> list[dict[str, str]]:
    """The repository's index."""
    return [dataclasses.asdict(entry) for entry in entries]


STATE: dict[str, Callable[[ServerContext, str, str], Any]] = {
    "live": lambda _edge, _model, _version: {"live": True},
    "ready": lambda edge, _model, _version: {"ready": edge.service.is_ready()},
    "model_ready": lambda edge, model, version: {"name": model, "ready": edge.service.is_model_ready(model, version)},
    "models": lambda edge, _model, _version: {
        "models": list(dict.fromkeys(entry.name for entry in edge.service.index(ready_only=True)))
    },
    "server": lambda edge, _model, _version: server_metadata(
        name=edge.name, version=edge.version, is_admin=edge.is_admin
    ),
    "metadata": lambda edge, model, version: model_metadata(
        model, edge.service.manifest(model, version), edge.service.versions(model)
    ),
    "config": lambda edge, model, version: edge.service.config(model, version),
    "statistics": lambda edge, model, version: {"model_stats": edge.service.statistics(model, version)},
}
"""Documents that only report the state, of the server or of a model and version; HTTP and gRPC give the same ones."""


def _tensor_metadata(spec: TensorSpec) -> dict[str, Any]:
    shape = [size if isinstance(size, int) else -1 for size in spec.shape]
    return {"name": spec.name, "datatype": spec.datatype, "shape": shape}


def triton_config(manifest: Manifest, settings: ServiceSettings, versions: tuple[int, ...]) -> JSON:
    """Triton's model configuration of one version; `versions` are all that serve."""
    return {
        "name": manifest.name,
        "platform": f"{manifest.engine}_{manifest.precision}",
        "backend": manifest.engine,
        "version_policy": {"specific": {"versions": list(versions)}},
        "max_batch_size": settings.max_batch_rows if manifest.is_batched else 0,
        "input": [_triton_tensor(spec, is_batched=manifest.is_batched) for spec in manifest.inputs],
        "output": [_triton_tensor(spec, is_batched=manifest.is_batched) for spec in manifest.outputs],
        "instance_group": [{"name": manifest.name, "kind": "KIND_CPU", "count": settings.instances or 1}],
        "dynamic_batching": {
            "preferred_batch_size": [],
            "max_queue_delay_microseconds": round(settings.max_delay_s * 1e6),
            "default_queue_policy": {
                "default_timeout_microseconds": round((settings.deadline_s or 0) * 1e6),
                "allow_timeout_override": True,
                "max_queue_size": settings.max_queue_rows,
            },
        },
        "parameters": {"threads": {"string_value": str(settings.threads or 1)}},
    }


def _triton_tensor(spec: TensorSpec, *, is_batched: bool) -> JSON:
    dims = spec.shape[1:] if is_batched and spec.shape[:1] == (BATCH,) else spec.shape
    return {
        "name": spec.name,
        "data_type": "TYPE_STRING" if spec.datatype == "BYTES" else f"TYPE_{spec.datatype}",
        "dims": [size if isinstance(size, int) else -1 for size in dims],
    }


_SEQUENCE = frozenset({"sequence_id", "sequence_start", "sequence_end"})
_SHARED_MEMORY = "shared_memory_region"
_NONE: dict[str, Parameter] = {}


class Urgency(NamedTuple):
    """Deadline of a request [s after its arrival] and priority: 1 for the most urgent, 0 for the default."""

    deadline_s: float | None = None
    priority: int = 0


def checked_parameters(parameters: object, where: str) -> dict[str, Any]:
    """Parameters, checked to be strings, numbers and booleans.

    Raises:
        BadRequest: they are of another type.
    """
    if parameters is None:
        return _NONE
    if not isinstance(parameters, dict):
        raise BadRequest(f"the parameters of {where} must be an object")
    for name, value in parameters.items():
        if not isinstance(value, str | int | float | bool):
            raise BadRequest(f"parameter {name!r} of {where} must be a string, a number or a boolean")
    return parameters


def urgency(parameters: Mapping[str, Parameter]) -> Urgency:
    """Deadline and priority of a request; a `timeout` is in microseconds, and 0 is none.

    Raises:
        BadRequest: they are not whole numbers from 0.
        Unsupported: the request is part of a sequence.
    """
    if not parameters:
        return Urgency()
    for name in _SEQUENCE & parameters.keys():
        if parameters[name]:
            raise Unsupported(f"the parameter {name} asks for a sequence; this server keeps no state between requests")
    timeout_us = whole_parameter(parameters, "timeout", "the request")
    return Urgency(timeout_us / 1e6 if timeout_us else None, whole_parameter(parameters, "priority", "the request"))


def whole_parameter(parameters: Mapping[str, Parameter], name: str, where: str) -> int:
    """Value of a parameter [its own unit] that is a whole number from 0; 0 if it is absent.

    Raises:
        BadRequest: it is of another type.
    """
    value = parameters.get(name, 0)
    if type(value) is not int or value < 0:
        raise BadRequest(f"parameter {name!r} of {where} must be a whole number from 0, got {value!r}")
    return value


def flag_parameter(parameters: Mapping[str, Parameter], name: str, where: str, *, default: bool) -> bool:
    """Value of a parameter that is true or false.

    Raises:
        BadRequest: it is of another type.
    """
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise BadRequest(f"parameter {name!r} of {where} must be true or false, got {value!r}")
    return value


def refuse_shared_memory(parameters: Mapping[str, Parameter], where: str) -> None:
    """Refuse tensors in shared memory.

    Raises:
        Unsupported: a region of shared memory is named.
    """
    if _SHARED_MEMORY in parameters:
        raise Unsupported(f"{where} names a region of shared memory, which this server has none of; send it as data")


_UNLIMITED = DynamicDim(name="any")


def fit(request: InferenceRequest, manifest: Manifest, *, max_rows: int | None = None) -> Arrays:
    """The request's inputs in the manifest's order, checked against it.

    Raises:
        BadRequest: an input is missing, unknown, of another datatype or shape, has no rows, or a dimension that varies
            is too small or differs between inputs; a string is not UTF-8, or no word of its category in training; or a
            requested output does not exist.
        TooLarge: there are more rows than `max_rows`, or a dimension is larger than the manifest allows.
    """
    inputs = request.inputs
    if inputs.keys() != {spec.name for spec in manifest.inputs}:
        raise BadRequest(_names_differ(inputs, manifest))
    sizes: dict[str, int] = {}
    for spec in manifest.inputs:
        _fit_tensor(inputs, spec, manifest.name, sizes)
    _check_sizes(sizes, manifest, max_rows)
    if request.outputs:
        names = [spec.name for spec in manifest.outputs]
        for output in request.outputs:
            if output.name not in names:
                raise BadRequest(f"{manifest.name!r} has no output {output.name!r}. {nearest(output.name, names)}")
    return {spec.name: _with_numbers(inputs[spec.name], spec) for spec in manifest.inputs}


def _with_numbers(array: NDArray[Any], spec: TensorSpec) -> NDArray[Any]:
    """The tensor, with the numbers of categories where words were sent; strings are checked to be UTF-8."""
    if array.dtype != object:
        return array
    _require_utf8(array, spec.name)
    if spec.datatype == "BYTES":
        return array
    numbers = np.empty(array.shape, dtype_of(spec.datatype))
    for (row, index), word in np.ndenumerate(array):
        try:
            numbers[row, index] = spec.columns[index].number_of(word.decode())
        except ValueError as error:
            raise BadRequest(f"row {row} of input {spec.name!r}: {spec.columns[index].name!r} {error}") from error
    return numbers


def _require_utf8(strings: NDArray[Any], name: str) -> None:
    for index, value in enumerate(strings.reshape(-1).tolist()):
        try:
            value.decode()
        except UnicodeDecodeError as error:
            raise BadRequest(
                f"string {index} of input {name!r} is not UTF-8: {error.reason} at byte {error.start}"
            ) from error


def _fit_tensor(inputs: Arrays, spec: TensorSpec, model: str, sizes: dict[str, int]) -> None:
    """Compare a tensor with its description; collect the sizes of named dimensions in `sizes`."""
    array = inputs[spec.name]
    datatype, shape = datatype_of(array.dtype), array.shape
    is_type = datatype == spec.datatype or (datatype == "BYTES" and spec.takes_words)
    if not is_type or len(shape) != len(spec.shape):
        raise BadRequest(_tensor_differs(spec, model, datatype, shape))
    for dim, size in zip(spec.shape, shape, strict=True):
        if isinstance(dim, int):
            if size != dim:
                raise BadRequest(_tensor_differs(spec, model, datatype, shape))
        elif sizes.setdefault(dim, size) != size:
            raise BadRequest(
                f"input {spec.name!r} of {model!r} has {size} where dimension {dim!r} is, another input has "
                f"{sizes[dim]}; they must be equal"
            )


def _check_sizes(sizes: dict[str, int], manifest: Manifest, max_rows: int | None) -> None:
    limits = {dim.name: dim for dim in manifest.dims}
    for name, size in sizes.items():
        dim = limits.get(name, _UNLIMITED)
        if size < dim.low:
            raise BadRequest(f"dimension {name!r} of {manifest.name!r} is {size} in this request, less than {dim.low}")
        if dim.high is not None and size > dim.high:
            raise TooLarge(f"dimension {name!r} of {manifest.name!r} is {size} in this request, more than {dim.high}")
    rows = sizes.get(BATCH, 1)
    if max_rows is not None and rows > max_rows:
        raise TooLarge(f"this request has {rows} rows; {manifest.name!r} takes at most {max_rows}: send it in parts")


def _names_differ(inputs: Arrays, manifest: Manifest) -> str:
    names = [spec.name for spec in manifest.inputs]
    missing = [repr(name) for name in names if name not in inputs]
    unknown = [repr(name) for name in inputs if name not in names]
    parts = [f"misses {', '.join(missing)}"] if missing else []
    parts += [f"has unknown {', '.join(unknown)}"] if unknown else []
    return f"{manifest.name!r} takes {', '.join(map(repr, names))}; this request {' and '.join(parts)}"


def _tensor_differs(spec: TensorSpec, model: str, datatype: str, shape: tuple[int, ...]) -> str:
    expected = ", ".join(map(str, spec.shape))
    words = ", or BYTES with the words of its categories" if spec.takes_words else ""
    return (
        f"input {spec.name!r} of {model!r} is {spec.datatype} [{expected}]{words}; this request has {datatype} "
        f"[{', '.join(map(str, shape))}]"
    )


MOST_CLASSES = 16_384
"""Limit on the strings of an output; they are made one by one on the event loop."""


def classify(response: InferenceResponse, request: InferenceRequest) -> InferenceResponse:
    """The response with outputs requested as classes replaced by `value:index:label` strings: BYTES [batch, k].

    Labels are those of the response. The first dimension is the batch, unless there is no other. Equal values are
    ordered by index, and NaN comes last.

    Raises:
        BadRequest: classes of a BYTES output are requested, or more than `MOST_CLASSES`.
    """
    num_classes = {output.name: output.classification for output in request.outputs if output.classification}
    if not num_classes:
        return response
    outputs = {
        name: _top(array, num_classes[name], response.labels.get(name, ()), name) if name in num_classes else array
        for name, array in response.outputs.items()
    }
    return response._replace(outputs=outputs)


def _top(array: NDArray[Any], most: int, labels: Sequence[str], name: str) -> NDArray[Any]:
    if array.dtype.kind in "OSU":
        raise BadRequest(f"output {name!r} is BYTES; only numbers have largest values, so ask without classification")
    rows = array.reshape(array.shape[0], -1) if array.ndim > 1 else array.reshape(1, -1)
    most = min(most, rows.shape[1])
    if len(rows) * most > MOST_CLASSES:
        raise BadRequest(
            f"output {name!r} would be {len(rows) * most:,} classes, at most {MOST_CLASSES:,} are written; ask for "
            "fewer, or for the numbers as binary data"
        )
    elements = []
    for row in rows:
        for index in _largest(row, most):
            label = f":{labels[index]}" if index < len(labels) else ""
            elements.append(f"{row[index]}:{index}{label}".encode())
    return strings(elements).reshape((rows.shape[0], most) if array.ndim > 1 else (most,))


def _largest(row: NDArray[Any], most: int) -> NDArray[np.intp]:
    """Indices of the `most` largest values, descending and NaN last; equal values in the order of their indices."""
    if row.dtype.kind not in "biu":
        row = row if row.dtype.kind == "f" else row.astype(np.float32)
        is_nan = np.isnan(row)
        if is_nan.any():
            known = np.flatnonzero(~is_nan)
            return np.concatenate([known[_largest(row[known], most)], np.flatnonzero(is_nan)])[:most]
    indices = np.arange(len(row))
    if 0 < most < len(row):  # sort only these
        indices = indices[row >= np.partition(row, len(row) - most)[len(row) - most]]
    chosen = row[indices]
    return indices[len(chosen) - 1 - np.argsort(chosen[::-1], kind="stable")[::-1]][:most]


MOST_DIMS = 32
"""Limit on a tensor's dimensions; NumPy's is 64."""
MOST_ELEMENTS = 2**40
"""Limit on the product of a shape, zeros counted as ones; sizes in bytes then fit 64 bits."""

_DATATYPES: frozenset[str] = frozenset(get_args(Datatype))


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


def from_raw(raw: Buffer, datatype: Datatype, shape: tuple[int, ...], tensor: str) -> NDArray[Any]:
    """The tensor in these bytes: a read-only view, perhaps unaligned; for BYTES an array of objects.

    `shape` must come from `checked_shape`.

    Raises:
        BadRequest: there are more or fewer bytes than the shape needs, or a BOOL is neither 0 nor 1.
    """
    elements = math.prod(shape)
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


def strings(values: Sequence[bytes]) -> NDArray[Any]:
    """A BYTES tensor of one dimension."""
    array = np.empty(len(values), object)
    array[:] = values
    return array


def _unpack(raw: Buffer, elements: int, tensor: str) -> NDArray[Any]:
    """Strings, each after its length in four bytes."""
    if elements * STRING_LENGTH.size > len(raw):
        raise BadRequest(f"{tensor} comes with {len(raw)} bytes, too few for {elements} strings and their lengths")
    view, values, end = memoryview(raw), [], 0
    for _ in range(elements):
        start = end + STRING_LENGTH.size
        end = start + STRING_LENGTH.unpack_from(view, end)[0] if start <= len(view) else start
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


def cut_out(text: bytes) -> tuple[bytes, dict[str, bytes]]:
    """A JSON text with each long `data` of numbers replaced by a random string, and the numbers by that string.

    Parsed at once such a list takes thirty times its length in memory, and blocks the process.

    Raises:
        TooLarge: the rest has too many lists, objects or values.
    """
    token = secrets.token_hex(16)
    long: dict[str, bytes] = {}

    def replaced(match: re.Match[bytes]) -> bytes:
        name = f"{token}{len(long)}"
        long[name] = match[1]
        return b'"data":"%s"' % name.encode()

    rest = _LONG.sub(replaced, text)
    if rest.count(b"[") + rest.count(b"{") > _MOST_LISTS or rest.count(b",") > _MOST_VALUES:
        raise TooLarge(
            f"the JSON has more than {_MOST_LISTS:,} lists and objects, or {_MOST_VALUES:,} values that are no numbers "
            "of a `data`; send them as binary data"
        )
    return rest, long


def _from_long(text: bytes, datatype: Datatype, shape: tuple[int, ...], tensor: str) -> NDArray[Any]:
    """The tensor in a long text: its brackets are compared with the shape's, its numbers parsed in parts."""
    elements = math.prod(shape)
    values, lists = text.count(b",") + 1, text.count(b"[")
    if values != elements:
        raise BadRequest(f"{tensor} has shape {list(shape)}, of {elements} values; its data has {values}")
    nested = sum(math.prod(shape[:depth]) for depth in range(len(shape)))
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
    if isinstance(data, bytes):  # the text of a long list; parsed JSON has no bytes
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
    elements = math.prod(shape)
    if not (data and isinstance(data[0], list)):
        if len(data) != elements:
            raise BadRequest(f"{tensor} has shape {list(shape)}, of {elements} values; its data has {len(data)}")
        return data
    level: list[Any] = [data]
    for dim, size in enumerate(shape):
        for part in level:
            if type(part) is not list or len(part) != size:
                kind = f"{len(part)} values" if isinstance(part, list) else "no list"
                raise BadRequest(f"{tensor} has shape {list(shape)}; its data has {kind} where dimension {dim} is")
        level = list(chain.from_iterable(level))
    return level

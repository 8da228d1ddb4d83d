"""The Open Inference Protocol without its transport: documents, request parameters, input checks, classification.

Documents are JSON; gRPC's messages have the same fields. A model's settings are given as Triton's model configuration,
which clients and load tools ask for.

Source: KServe, Open Inference Protocol v2; Triton Inference Server, `model_config.proto` (sizes that vary are -1, and
`dims` has no batch).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.artifacts.dtypes import Arrays, datatype_of
from stoker.engines import engine_record
from stoker.errors import nearest
from stoker.records import BATCH, DynamicDim, Manifest, ServiceSettings, TensorSpec
from stoker.records.codec import JSON
from stoker.serving.refusals import BadRequest, TooLarge, Unsupported
from stoker.serving.service import (
    InferenceRequest,
    InferenceResponse,
    ModelStatistics,
    Parameter,
    RepositoryEntry,
    Total,
)
from stoker.serving.tensor_codec import strings

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

_COMPUTE = ("compute_input", "compute_infer", "compute_output")


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


def statistics_document(models: Iterable[ModelStatistics]) -> dict[str, Any]:
    """Statistics of models, in the statistics extension's form."""
    documents = []
    for model in models:
        totals = {name: _total(getattr(model, name)) for name in ("success", "fail", "queue", *_COMPUTE)}
        batches = [
            {"batch_size": batch.batch_size, **{name: _total(getattr(batch, name)) for name in _COMPUTE}}
            for batch in model.batches
        ]
        documents.append(
            {
                "name": model.name,
                "version": model.version,
                "last_inference": model.last_inference_ms,
                "inference_count": model.inference_count,
                "execution_count": model.execution_count,
                "inference_stats": {**totals, "cache_hit": _total(Total()), "cache_miss": _total(Total())},
                "batch_stats": batches,
            }
        )
    return {"model_stats": documents}


def index_document(entries: Iterable[RepositoryEntry]) -> list[dict[str, str]]:
    """The repository's index."""
    return [dataclasses.asdict(entry) for entry in entries]


def _tensor_metadata(spec: TensorSpec) -> dict[str, Any]:
    shape = [size if isinstance(size, int) else -1 for size in spec.shape]
    return {"name": spec.name, "datatype": spec.datatype, "shape": shape}


def _total(total: Total) -> dict[str, int]:
    return {"count": total.count, "ns": total.ns}


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
            is too small or differs between inputs; a string is not UTF-8; or a requested output does not exist.
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
    for spec in manifest.inputs:
        if spec.datatype == "BYTES":
            _require_utf8(inputs[spec.name], spec.name)
    return {spec.name: inputs[spec.name] for spec in manifest.inputs}


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
    if datatype != spec.datatype or len(shape) != len(spec.shape):
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
    return (
        f"input {spec.name!r} of {model!r} is {spec.datatype} [{expected}]; this request has {datatype} "
        f"[{', '.join(map(str, shape))}]"
    )


MOST_CLASSES = 16_384
"""Limit on the strings of an output; they are made one by one on the event loop."""


def classify(
    response: InferenceResponse, request: InferenceRequest, labels: Mapping[str, Sequence[str]]
) -> InferenceResponse:
    """The response with outputs requested as classes replaced by `value:index:label` strings: BYTES [batch, k].

    `labels` are those of the model's outputs (`Manifest.labels`). The first dimension is the batch, unless there is no
    other. Equal values are ordered by index, and NaN comes last.

    Raises:
        BadRequest: classes of a BYTES output are requested, or more than `MOST_CLASSES`.
    """
    num_classes = {output.name: output.classification for output in request.outputs if output.classification}
    if not num_classes:
        return response
    outputs = {
        name: _top(array, num_classes[name], labels.get(name, ()), name) if name in num_classes else array
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
    """Indices of the `most` largest values, descending; equal values in the order of their indices."""
    if row.dtype.kind not in "biu":
        row = np.where(np.isnan(row), -np.inf, row)
    indices = np.arange(len(row))
    if 0 < most < len(row):  # sort only these
        indices = indices[row >= np.partition(row, len(row) - most)[len(row) - most]]
    chosen = row[indices]
    return indices[len(chosen) - 1 - np.argsort(chosen[::-1], kind="stable")[::-1]][:most]

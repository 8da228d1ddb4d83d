"""Does a request fit the model?"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from numpy.typing import NDArray

from stoker.artifacts.elements import Arrays, datatype_of
from stoker.errors import nearest
from stoker.records import BATCH, DynamicDim, Manifest, TensorSpec
from stoker.serving.problems import BadRequest, TooLarge
from stoker.serving.service import Request

_UNLIMITED = DynamicDim(name="any")


def fit(request: Request, manifest: Manifest, *, max_rows: int | None = None) -> Arrays:
    """The request's inputs in the manifest's order, each of them fitting it.

    Raises:
        BadRequest: an input is missing, unknown, of another datatype or shape, has no rows, or a dimension that varies
            is too small or differs between inputs; a string is not UTF-8, or a number not finite; or an output is
            wanted that the model has not.
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
        _check_outputs((one.name for one in request.outputs), manifest)
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
    """Compare a tensor with its description; `sizes` gathers how large the dimensions that vary are."""
    array = inputs[spec.name]
    datatype, shape = datatype_of(array.dtype), array.shape
    if datatype != spec.datatype or len(shape) != len(spec.shape):
        raise BadRequest(_tensor_differs(spec, model, datatype, shape))
    for wanted, size in zip(spec.shape, shape, strict=True):
        if isinstance(wanted, int):
            if size != wanted:
                raise BadRequest(_tensor_differs(spec, model, datatype, shape))
        elif sizes.setdefault(wanted, size) != size:
            raise BadRequest(
                f"input {spec.name!r} of {model!r} has {size} where dimension {wanted!r} is, another input has "
                f"{sizes[wanted]}; they must be equal"
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


def _check_outputs(wanted: Iterable[str], manifest: Manifest) -> None:
    names = [spec.name for spec in manifest.outputs]
    for name in wanted:
        if name not in names:
            raise BadRequest(f"{manifest.name!r} has no output {name!r}. {nearest(name, names)}")


def _names_differ(inputs: Arrays, manifest: Manifest) -> str:
    names = [spec.name for spec in manifest.inputs]
    missing = [repr(name) for name in names if name not in inputs]
    unknown = [repr(name) for name in inputs if name not in names]
    parts = [f"misses {', '.join(missing)}"] if missing else []
    parts += [f"has unknown {', '.join(unknown)}"] if unknown else []
    return f"{manifest.name!r} takes {', '.join(map(repr, names))}; this request {' and '.join(parts)}"


def _tensor_differs(spec: TensorSpec, model: str, datatype: str, shape: tuple[int, ...]) -> str:
    wanted = ", ".join(map(str, spec.shape))
    return (
        f"input {spec.name!r} of {model!r} is {spec.datatype} [{wanted}]; this request has {datatype} "
        f"[{', '.join(map(str, shape))}]"
    )

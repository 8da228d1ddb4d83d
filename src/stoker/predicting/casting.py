"""Numbers as the element type a model takes; one that would not survive is refused, never bent."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.artifacts.elements import dtype_of
from stoker.records import Datatype


def cast(values: NDArray[Any], datatype: Datatype, *, allow_nan: bool) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """The values as `datatype`, and which of them it cannot hold (those are 0 then).

    Rounding to a shorter float is no reason to refuse; a fraction or too large a number for an integer is, and so are
    NaN and infinities unless allowed.
    """
    dtype = dtype_of(datatype)
    if datatype == "BOOL":
        refused = ~((values == 0) | (values == 1))
    elif dtype.kind in "iu":
        refused = _no_integer(values, np.iinfo(dtype))
    else:
        return _as_float(values, dtype, allow_nan=allow_nan)
    return np.where(refused, 0, values).astype(dtype), refused


def why_refused(value: Any, datatype: Datatype) -> str:
    """What to say of a value that `cast` refused."""
    dtype = dtype_of(datatype)
    number = float(value)
    if not np.isfinite(number):
        return f"is {number}"
    if dtype.kind in "iu" and number != int(number):
        return f"is {value}, which is no whole number ({datatype})"
    return f"is {value}, which {datatype} cannot hold"


def _no_integer(values: NDArray[Any], limits: np.iinfo[Any]) -> NDArray[np.bool_]:
    if values.dtype.kind == "b":
        return np.zeros(values.shape, np.bool_)
    if values.dtype.kind == "f":  # limits as floats: 2**63 itself is no int64, and is the nearest float to its largest
        values = values.astype(np.float64)
        inside = (values >= float(limits.min)) & (values < float(limits.max) + (1.0 if limits.bits < 64 else 0.0))
        return np.asarray(~(inside & (np.floor(values) == values)))
    low, high = np.iinfo(values.dtype).min, np.iinfo(values.dtype).max
    refused = np.zeros(values.shape, np.bool_)
    if limits.min > low:
        refused |= values < limits.min
    if limits.max < high:
        refused |= values > limits.max
    return refused


def _as_float(values: NDArray[Any], dtype: np.dtype[Any], *, allow_nan: bool) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    with np.errstate(over="ignore"):
        result = values.astype(dtype)
    is_finite = np.isfinite(values)
    refused = is_finite & ~np.isfinite(result)
    if not allow_nan:
        refused |= ~is_finite
    if refused.any():
        result[refused] = 0
    return result, refused

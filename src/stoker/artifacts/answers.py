"""Whether two answers to one request are the same answer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.artifacts.elements import Arrays
from stoker.records import Tolerance

_FILLED, _APART = 1e4, 100.0
"""A value that is filled in is at least so large, and so many times as large as all others."""


def excess(found: Arrays, wanted: Arrays, tolerance: Tolerance) -> float:
    """The largest difference of any element as a share of what is allowed for it: at most 1, and they are the same.

    Infinite where an output is missing, has another shape, differs in a string or a whole number, which names something
    (the next class, or token, is another), or is NaN in one of them alone.

    >>> wanted = {"y": np.array([1.0, 2.0])}
    >>> round(excess({"y": np.array([1.0, 2.1])}, wanted, Tolerance(absolute=0.1, relative=0.05)), 6)
    0.5
    """
    return max(
        (
            math.inf if difference is None else _largest(difference, tolerance.absolute + tolerance.relative * size)
            for difference, size in _differences(found, wanted)
        ),
        default=0.0,
    )


def difference(found: Arrays, wanted: Arrays) -> float:
    """The largest difference of any element, as a share of its output's largest value; infinite as for `excess`.

    What a model fills in, such as -1e9 for classes that are masked, is no measure of the others, and left aside.

    >>> difference({"y": np.array([1.0, 2.5])}, {"y": np.array([1.0, 2.0])})
    0.25
    """
    worst = 0.0
    for apart, size in _differences(found, wanted):
        if apart is None:
            return math.inf
        scale = _scale(size)
        worst = max(worst, _largest(apart, np.asarray(scale if scale > 0 else 1.0)))
    return worst


def scales_of(outputs: Arrays) -> tuple[float, ...]:
    """The largest finite size of any number in each output, what is filled in aside; 0 of whole numbers and strings."""
    return tuple(_scale(size) for _, size in _differences(outputs, outputs))


def filled_in(sizes: NDArray[Any]) -> NDArray[np.bool_]:
    """Which of an output's values, of these sizes, a model fills in, such as -1e9 for classes that are masked.

    Where the largest occurs several times and nothing else comes near it, it says nothing of how large answers are.

    >>> filled_in(np.array([2.0, 1e9, 0.5, 1e9])).tolist()
    [False, True, False, True]
    """
    largest = float(sizes.max(initial=0.0))
    is_far = sizes >= largest / _APART
    is_alone = 1 < np.count_nonzero(is_far) < sizes.size and bool((sizes[is_far] == largest).all())
    return is_far if is_alone and largest >= _FILLED else np.zeros(sizes.shape, np.bool_)


def has_nan(outputs: Arrays) -> bool:
    """Whether any element is not a number."""
    return any(bool(np.isnan(_numbers(one)).any()) for one in outputs.values() if not one.dtype.hasobject)


def _differences(found: Arrays, wanted: Arrays) -> Iterator[tuple[NDArray[Any] | None, NDArray[Any]]]:
    """|found - wanted| and |wanted| of each output; the former is None where no number says how far they lie apart."""
    for name, right in wanted.items():
        left, nothing = found.get(name), np.zeros(0)
        if left is None or left.shape != right.shape or left.dtype != right.dtype:
            yield None, nothing
        elif right.dtype.hasobject or right.dtype.kind in "biu":
            yield (nothing if bool((left == right).all()) else None), nothing
        else:
            a, b = _numbers(left), _numbers(right)
            same = (a == b) | (np.isnan(a) & np.isnan(b))
            is_finite = np.isfinite(a) & np.isfinite(b)
            if not bool((same | is_finite).all()):
                yield None, nothing
                continue
            yield np.abs(np.subtract(a, b, where=is_finite, out=np.zeros_like(a))), np.abs(np.where(is_finite, b, 0))


def _scale(sizes: NDArray[Any]) -> float:
    return float(sizes[~filled_in(sizes)].max(initial=0.0))


def _numbers(array: NDArray[Any]) -> NDArray[Any]:
    return array.astype(np.float64)


def _largest(apart: NDArray[Any], allowed: NDArray[Any]) -> float:
    """The largest `apart / allowed`; what is equal is no difference, though nothing be allowed."""
    with np.errstate(divide="ignore", over="ignore"):  # by nothing, or next to nothing: infinitely far
        shares = np.divide(apart, allowed, where=apart > 0, out=np.zeros_like(apart))
    return float(shares.max(initial=0.0))

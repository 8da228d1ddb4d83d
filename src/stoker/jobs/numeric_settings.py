"""Numbers in settings: NumPy's scalars become Python's own, and each check raises BadSetting with the value.

So a setting compares and is described equally whatever computed it. NumPy is not imported: its scalars register with
`numbers`.
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Sequence
from typing import Any, TypeGuard

from stoker.errors import BadSetting


def plain_number(value: Any) -> Any:
    """A NumPy scalar as a Python number; anything else unchanged.

    >>> from fractions import Fraction
    >>> plain_number(Fraction(1, 4)), plain_number(32), plain_number("32"), plain_number(True)
    (0.25, 32, '32', True)
    """
    if isinstance(value, int):
        return value
    if isinstance(value, numbers.Integral):
        return operator.index(value)
    return float(value) if isinstance(value, numbers.Real) else value


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a number of Python or NumPy, and not a bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_whole(value: object) -> TypeGuard[int]:
    """Whether it is an integer of Python or NumPy, and not a bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_count(value: object) -> TypeGuard[int]:
    """Whether it is a positive Python integer, and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


Interval = tuple[float, float]
"""Lowest and highest value."""


def require_probability(p: object) -> None:
    """Refuse anything but a probability."""
    if not (is_number(p) and 0 <= p <= 1):
        raise BadSetting(f"p is a probability, in [0, 1], got {p!r}")


def require_interval(name: str, values: object, *, most: float = float("inf")) -> None:
    """Refuse anything but an interval of numbers above 0 and up to `most`."""
    ends: Sequence[Any] = values if isinstance(values, tuple | list) else ()
    if not (len(ends) == 2 and all(map(is_number, ends)) and 0 < ends[0] <= ends[1] <= most):
        limits = "above 0" if most == float("inf") else f"above 0, at most {most:g}"
        raise BadSetting(f"{name} is an interval (low, high) of numbers {limits}, got {values!r}")


def require_amount(name: str, what: str, value: object, *, most: float = float("inf")) -> None:
    """Refuse a negative amount, or one above `most`."""
    if not (is_number(value) and 0 <= value <= most):
        limits = "0 or more" if most == float("inf") else f"from 0 to {most:g}"
        raise BadSetting(f"{name} is {what}, {limits}, got {value!r}")


def require_size(name: str, what: str, value: object) -> None:
    """Refuse anything but a positive integer [pixels]."""
    if not (is_whole(value) and value >= 1):
        raise BadSetting(f"{name} is {what}, a whole number of pixels, got {value!r}")

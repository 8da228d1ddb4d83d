"""Settings of transforms that can be meant; each check raises BadSetting with the value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stoker.errors import BadSetting
from stoker.jobs.plain_numbers import is_number, is_whole

Interval = tuple[float, float]
"""The lowest and the highest value."""


def require_probability(p: object) -> None:
    """Refuse what is no probability."""
    if not (is_number(p) and 0 <= p <= 1):
        raise BadSetting(f"p is a probability, in [0, 1], got {p!r}")


def require_interval(name: str, values: object, *, least: float = 0.0, most: float = float("inf")) -> None:
    """Refuse what is no interval of numbers above `least` and up to `most`."""
    ends: Sequence[Any] = values if isinstance(values, tuple | list) else ()
    if not (len(ends) == 2 and all(map(is_number, ends)) and least < ends[0] <= ends[1] <= most):
        limits = f"above {least:g}" if most == float("inf") else f"above {least:g}, at most {most:g}"
        raise BadSetting(f"{name} is an interval (low, high) of numbers {limits}, got {values!r}")


def require_amount(name: str, what: str, value: object, *, most: float = float("inf")) -> None:
    """Refuse a negative amount, or one above `most`."""
    if not (is_number(value) and 0 <= value <= most):
        limits = "0 or more" if most == float("inf") else f"from 0 to {most:g}"
        raise BadSetting(f"{name} is {what}, {limits}, got {value!r}")


def require_size(name: str, what: str, value: object) -> None:
    """Refuse a size that is no whole number of at least one pixel."""
    if not (is_whole(value) and value >= 1):
        raise BadSetting(f"{name} is {what}, a whole number of pixels, got {value!r}")

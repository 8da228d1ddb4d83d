"""Settings of transforms that can be meant; each check raises ValueError with the value."""

from __future__ import annotations

Interval = tuple[float, float]
"""The lowest and the highest value."""


def require_probability(p: float) -> None:
    """Refuse what is no probability."""
    if not 0 <= p <= 1:
        raise ValueError(f"p is a probability, in [0, 1], got {p}")


def require_interval(name: str, values: Interval, *, least: float = 0.0, most: float = float("inf")) -> None:
    """Refuse what is no interval of numbers above `least` and up to `most`."""
    low, high = values
    if not least < low <= high <= most:
        limits = f"above {least:g}" if most == float("inf") else f"above {least:g}, at most {most:g}"
        raise ValueError(f"{name} is an interval (low, high) of numbers {limits}, got {values}")


def require_amount(name: str, what: str, value: float, *, most: float = float("inf")) -> None:
    """Refuse a negative amount, or one above `most`."""
    if not 0 <= value <= most:
        limits = "0 or more" if most == float("inf") else f"from 0 to {most:g}"
        raise ValueError(f"{name} is {what}, {limits}, got {value}")


def require_size(name: str, what: str, value: object) -> None:
    """Refuse a size that is no whole number of at least one pixel."""
    if not (isinstance(value, int) and value >= 1):
        raise ValueError(f"{name} is {what}, a whole number of pixels, got {value}")

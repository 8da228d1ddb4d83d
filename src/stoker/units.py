"""Quantities with units, and how they are written for people."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from stoker.errors import BadJob, BadSetting

KIB, MIB, GIB = 2**10, 2**20, 2**30
_BYTES = {"mb": 1e6, "gb": 1e9, "tb": 1e12, "mib": 2.0**20, "gib": 2.0**30, "tib": 2.0**40}
_SECONDS = {"s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

DurationUnit = Literal["epochs", "samples", "updates", "seconds"]


@dataclass(frozen=True)
class Duration:
    """A length of training, or an interval within it, in a stated unit."""

    value: float
    unit: DurationUnit

    def __post_init__(self) -> None:
        if not (math.isfinite(self.value) and self.value > 0):
            raise BadSetting(f"a duration must be a positive number of {self.unit}, got {self.value!r}")

    def __str__(self) -> str:
        """As people write it: `5 epochs`."""
        return f"{self.value:g} {self.unit}"


def epochs(value: float) -> Duration:
    """`value` passes over the training data; a fraction ends inside a pass.

    Args:
        value: passes, above 0.

    Raises:
        BadSetting: it is no positive number.
    """
    return _duration(value, "epochs")


def samples(value: float) -> Duration:
    """Until at least `value` samples were trained on (whole updates).

    Args:
        value: number of samples, above 0.

    Raises:
        BadSetting: it is no positive number.
    """
    return _duration(value, "samples")


def updates(value: float) -> Duration:
    """Exactly `value` optimiser updates.

    Args:
        value: number of updates, above 0.

    Raises:
        BadSetting: it is no positive number.
    """
    return _duration(value, "updates")


def seconds(value: float) -> Duration:
    """About `value` seconds of training, turned into samples once, from the plan's forecast.

    Args:
        value: seconds, above 0.

    Raises:
        BadSetting: it is no positive number.
    """
    return _duration(value, "seconds")


def _duration(value: float, unit: DurationUnit) -> Duration:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise BadSetting(f"a duration is a number of {unit}, got {value!r}") from None
    return Duration(number, unit)


def require_duration(name: str, value: object) -> None:
    """Refuses a bare number, which says no unit.

    Raises:
        BadSetting: `value` is no Duration.
    """
    if not isinstance(value, Duration):
        raise BadSetting(f"{name} is a length such as stoker.epochs(5), got {value!r}")


def parse_money(text: str, option: str = "--max-cost") -> float:
    """US dollars; `option` is what the text was given for.

    >>> [parse_money(text) for text in ("20usd", "$3.50", "7")]
    [20.0, 3.5, 7.0]
    """
    match = re.fullmatch(r"\$?\s*(\d+(?:\.\d+)?)\s*(?:usd|\$)?", text.strip().lower())
    if not match:
        raise BadJob(f"{option} {text}: wanted US dollars, such as 20usd", remedy="Other currencies are not known.")
    return _positive(float(match.group(1)), f"{option} {text}", "20usd")


def parse_memory(text: str, option: str = "--memory") -> float:
    """Bytes; `option` is what the text was given for.

    >>> [parse_memory(text) for text in ("6GB", "512 MiB")]
    [6000000000.0, 536870912.0]
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if not match or match.group(2) not in _BYTES:
        raise BadJob(f"{option} {text}: wanted an amount with its unit (MB, GB, TB, MiB, GiB or TiB), such as 6GB")
    return _positive(float(match.group(1)) * _BYTES[match.group(2)], f"{option} {text}", "6GB")


def parse_duration(text: str, option: str = "--deadline") -> float:
    """Seconds; `option` is what the text was given for.

    >>> [parse_duration(text) for text in ("12h", "90 min", "1d", "2h30min")]
    [43200.0, 5400.0, 86400.0, 9000.0]
    """
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*(min|[smhd])", text.strip().lower())
    rest = re.sub(r"(\d+(?:\.\d+)?)\s*(min|[smhd])", "", text.strip().lower()).strip()
    total = sum(float(value) * _SECONDS[unit] for value, unit in parts)
    if rest or not parts:
        raise BadJob(f"{option} {text}: wanted a time with its unit (s, min, h or d), such as 12h or 90min")
    return _positive(total, f"{option} {text}", "12h")


def _positive(value: float, what: str, example: str) -> float:
    if not value > 0:
        raise BadJob(f"{what}: wanted more than nothing, such as {example}")
    return value


def format_bytes(num_bytes: float) -> str:
    """Bytes in binary units.

    >>> format_bytes(3 * 2**30)
    '3.0 GiB'
    >>> format_bytes(512)
    '512 B'
    """
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def format_seconds(duration_s: float) -> str:
    """Seconds as a person would say them.

    >>> [format_seconds(s) for s in (0.0000123, 0.0456, 2.5, 75, 18600, 200000)]
    ['12.3 µs', '45.6 ms', '2.5 s', '1 min 15 s', '5 h 10 min', '2 d 7 h']
    """
    if not math.isfinite(duration_s):
        return "unknown"
    if duration_s < 0.9995e-3:
        return f"{duration_s * 1e6:.3g} µs"
    if duration_s < 0.9995:
        return f"{duration_s * 1e3:.3g} ms"
    if duration_s < 59.95:
        return f"{duration_s:.1f} s"
    whole = round(duration_s)
    for size, big, small_size, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = (whole % size) // small_size
            return f"{whole // size} {big} {rest} {small}" if rest else f"{whole // size} {big}"
    return f"{whole} s"


def format_count(count: float) -> str:
    """A count with at most four figures.

    >>> [format_count(n) for n in (950, 54000, 1_650_000)]
    ['950', '54.0 k', '1.65 M']
    """
    for size, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e4, " k")):
        if abs(count) >= size:
            scaled = count / (1e3 if unit == " k" else size)
            return f"{scaled:.3g}{unit}" if unit != " k" else f"{scaled:.1f}{unit}"
    return f"{count:g}"


def format_money(usd: float) -> str:
    """US dollars.

    >>> [format_money(usd) for usd in (0.004, 3.6, 128.4, 20500)]
    ['<$0.01', '$3.60', '$128', '$20,500']
    """
    if usd >= 100:
        return f"${usd:,.0f}"
    return f"${usd:.2f}" if usd >= 0.01 or usd == 0 else "<$0.01"


def format_rate(per_second: float, what: str = "samples") -> str:
    """A rate with its unit.

    >>> format_rate(2718.28)
    '2,718 samples/s'
    """
    return f"{per_second:,.0f} {what}/s" if per_second >= 100 else f"{per_second:.3g} {what}/s"

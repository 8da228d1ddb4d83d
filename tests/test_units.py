from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.units import (
    Duration,
    epochs,
    format_bytes,
    format_count,
    format_rate,
    format_seconds,
    samples,
    seconds,
    updates,
)

SECONDS = {"µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
BYTES = {unit: 1024.0**power for power, unit in enumerate(("B", "KiB", "MiB", "GiB", "TiB"))}
COUNTS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def read(text: str, units: dict[str, float]) -> float:
    """The quantity that a text such as `5 h 10 min` states."""
    parts = re.findall(r"(-?[\d.]+(?:e[+-]?\d+)?) ?([A-Za-zµ]*)", text)
    return sum(float(number) * units[unit] for number, unit in parts)


@pytest.mark.parametrize("make", [epochs, samples, updates, seconds])
@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf])
def test_a_duration_is_positive_and_finite(make, value: float) -> None:
    """Training for no time, or for ever, cannot be meant; the error has the value and the unit."""
    with pytest.raises(ValueError, match=f"positive number of {make.__name__}, got {float(value)!r}"):
        make(value)


def test_a_duration_reads_as_people_write_it() -> None:
    """Value and unit, without a needless decimal point."""
    assert [str(one) for one in (epochs(5), samples(54_000), updates(3), seconds(1.5))] == [
        "5 epochs",
        "54000 samples",
        "3 updates",
        "1.5 seconds",
    ]
    assert epochs(5) == Duration(5.0, "epochs")


@given(st.floats(1e-6, 30 * 86400))
def test_seconds_in_words_are_the_seconds(duration_s: float) -> None:
    """What is shown differs from what is meant by the rounding of its smaller unit, at most 4 %."""
    assert read(format_seconds(duration_s), SECONDS) == pytest.approx(duration_s, rel=0.042)


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        (0.0, "0 µs"),
        (59.94, "59.9 s"),
        (59.96, "1 min"),
        (3599.6, "1 h"),
        (86_399.0, "23 h 59 min"),
        (math.nan, "unknown"),
        (math.inf, "unknown"),
    ],
)
def test_seconds_at_the_borders_of_units(duration_s: float, text: str) -> None:
    """Rounding never gives `60.0 s` or `60 min`; what is not known is said to be unknown."""
    assert format_seconds(duration_s) == text


@given(st.integers(0, 2**50))
def test_bytes_in_words_are_the_bytes(num_bytes: int) -> None:
    """Binary units, to one decimal."""
    assert read(format_bytes(num_bytes), BYTES) == pytest.approx(num_bytes, rel=0.051)


@given(st.integers(0, 10**15))
def test_counts_in_words_are_the_counts(count: int) -> None:
    """Below ten thousand every figure is shown, above about three."""
    assert read(format_count(count), COUNTS) == pytest.approx(count, rel=0 if count < 10_000 else 0.006)


def test_rates_have_their_unit() -> None:
    """Thousands are separated, small rates keep three figures, and what is counted is named."""
    assert format_rate(123_456.7) == "123,457 samples/s"
    assert format_rate(1.2345, "updates") == "1.23 updates/s"

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.records import Estimate
from tests.records.strategies import record_of

NUMBERS = st.floats(-1e100, 1e100)


def estimate(low: float, value: float, high: float) -> Estimate:
    """Seconds, measured."""
    return Estimate(value=value, low=low, high=high, unit="s", basis="measured here")


@pytest.mark.parametrize("ends", [(2.0, 1.0, 3.0), (0.0, 4.0, 3.0), (float("nan"), 1.0, 2.0), (0.0, float("nan"), 1.0)])
def test_a_value_lies_within_its_interval(ends: tuple[float, float, float]) -> None:
    """An estimate that contradicts itself is not made."""
    with pytest.raises(ValueError, match="lies within its interval"):
        estimate(*ends)


@given(st.tuples(NUMBERS, NUMBERS, NUMBERS).map(sorted), st.floats(-1e100, 1e100))
def test_scaling_keeps_the_interval_around_the_value(ends: list[float], factor: float) -> None:
    """Whatever the factor and its sign: rounding does not push the value out of its interval."""
    scaled = estimate(*ends).scaled(factor)
    assert scaled.low <= scaled.value <= scaled.high
    assert scaled.value == ends[1] * factor


@given(record_of(Estimate))
def test_scaling_by_one_changes_nothing_but_the_unit(original: Estimate) -> None:
    """The unit is kept unless another is given; the basis always is."""
    assert original.scaled(1.0) == original
    other = original.scaled(1.0, "samples/s")
    assert (other.unit, other.basis) == ("samples/s", original.basis)

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import BadJob
from stoker.loadtesting.load_generator import constant, poisson


@given(st.floats(1, 5000), st.floats(1, 20), st.integers(0, 100))
def test_a_schedule_has_the_rate_asked_for_in_order(rate: float, seconds: float, seed: int) -> None:
    """Both schedules ask rate × seconds times within the time, never backwards."""
    for due in (poisson(rate, seconds, seed=seed), constant(rate, seconds)):
        assert len(due) == round(rate * seconds)
        assert due[0] >= 0
        assert due[-1] <= seconds + 1 / rate
        assert (np.diff(due) >= 0).all()


def test_gaps_of_independent_callers_are_exponential() -> None:
    """Their mean is 1/rate, and so is their standard deviation; a metronome's is 0."""
    gaps = np.diff(poisson(1000, 50, seed=1))
    assert gaps.mean() == pytest.approx(1e-3, rel=0.02)
    assert gaps.std() == pytest.approx(1e-3, rel=0.03)
    assert np.diff(constant(1000, 2)).std() < 1e-12


@pytest.mark.parametrize(("rate", "seconds"), [(0, 5), (-1, 5), (5, 0), (1e6, 60), (float("nan"), 5), (0.01, 1)])
def test_schedules_of_nothing_or_too_much_are_refused(rate: float, seconds: float) -> None:
    """The text has the number of requests that were asked for."""
    with pytest.raises(BadJob, match="requests/s"):
        poisson(rate, seconds)

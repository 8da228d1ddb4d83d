import numpy as np
import pytest

from stoker.planning.model.gpu_times import descend, typical


def test_the_parameters_of_a_law_are_found() -> None:
    """Points of t = a + n / b give back a and b."""
    n = np.logspace(3, 9, 40)
    measured = 2e-5 + n / 3e11
    found = descend(
        lambda values: typical(np.log((values["a"] + n / values["b"]) / measured)),
        {"a": 1e-6, "b": 1e11},
        {"a": (1e-7, 1e-3), "b": (1e10, 1e12)},
        rounds=60,
    )
    assert found["a"] == pytest.approx(2e-5, rel=0.05)
    assert found["b"] == pytest.approx(3e11, rel=0.05)


def test_parameters_stay_within_their_ranges() -> None:
    """A loss that falls without end stops at the range's end, and a start outside is moved in."""
    assert descend(lambda values: -values["x"], {"x": 9.0}, {"x": (1.0, 4.0)}) == {"x": 4.0}


def test_a_broken_point_counts_for_so_much_and_no_more() -> None:
    """An error of a factor of e^9 among ten counts as the limit."""
    assert typical(np.array([0.0] * 9 + [9.0])) == pytest.approx(0.05)

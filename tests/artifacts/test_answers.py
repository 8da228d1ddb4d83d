"""Whether two answers are the same answer."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as of_numpy

from stoker.artifacts import difference, dtype_of, excess
from stoker.records import Tolerance

FLOATS = of_numpy.arrays(
    np.float32, of_numpy.array_shapes(max_dims=2, max_side=4), elements=st.floats(-1e3, 1e3, width=32)
)


@given(FLOATS, st.floats(0, 1), st.floats(0, 1))
def test_what_is_allowed_is_what_numpy_calls_close(wanted: np.ndarray, absolute: float, relative: float) -> None:
    """At most 1 exactly where np.allclose agrees, whose rule this is."""
    found = wanted + np.float32(0.25)
    share = excess({"y": found}, {"y": wanted}, Tolerance(absolute=absolute, relative=relative))
    exact = np.abs(found.astype(float) - wanted) <= absolute + relative * np.abs(wanted.astype(float))
    assert (share <= 1) == bool(exact.all())


@given(FLOATS)
def test_an_answer_is_itself(wanted: np.ndarray) -> None:
    """An answer has no distance to itself, even if none is allowed."""
    assert excess({"y": wanted}, {"y": wanted}, Tolerance(absolute=0, relative=0)) == 0
    assert difference({"y": wanted}, {"y": wanted}) == 0


def test_a_difference_is_a_share_of_its_own_output() -> None:
    """An output of large numbers does not hide what is wrong in one of small numbers."""
    wanted = {"large": np.array([1000.0]), "small": np.array([0.001])}
    assert difference({**wanted, "small": np.array([0.0015])}, wanted) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        ({}, {"y": np.zeros(2)}),
        ({"y": np.zeros(3)}, {"y": np.zeros(2)}),
        ({"y": np.zeros(2, np.float32)}, {"y": np.zeros(2)}),
        ({"y": np.array([math.nan])}, {"y": np.array([1.0])}),
        ({"y": np.array([1.0])}, {"y": np.array([math.inf])}),
        ({"y": np.array([b"a"], object)}, {"y": np.array([b"b"], object)}),
        ({"y": np.array([50_000])}, {"y": np.array([50_001])}),
        ({"y": np.array([True])}, {"y": np.array([False])}),
    ],
)
def test_what_no_number_can_say_is_infinitely_far(found: dict, wanted: dict) -> None:
    """Missing outputs, other shapes or types, NaN or infinity in one alone, other strings, other tokens."""
    assert excess(found, wanted, Tolerance(absolute=1e9, relative=1e9)) == math.inf
    assert difference(found, wanted) == math.inf


@given(st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=6), st.sampled_from([-1e9, 1e30, -3.4028235e38]))
def test_what_a_model_fills_in_is_no_measure(numbers: list[float], fill: float) -> None:
    """Logits of masked classes: what differs counts as if they were not there, and they have to be equal."""
    plain = np.array(numbers, np.float32)
    masked = np.append(plain, np.float32([fill, fill]))
    off = masked + np.where(np.abs(masked) < 100, np.float32(0.5), np.float32(0))
    assert difference({"y": off}, {"y": masked}) == pytest.approx(
        difference({"y": plain + np.float32(0.5)}, {"y": plain})
    )
    assert difference({"y": masked * np.float32(0.5)}, {"y": masked}) > 1e-3


def test_a_largest_value_that_is_no_filling_is_the_measure() -> None:
    """One outlier, values of like size, and what is filled in alone."""
    for wanted in ([1e6, 1.0], [1e6, 1e6, 2e4], [1e6, 1e6], [1.0, 1.0, 1e-9]):
        found = np.array(wanted) + 1
        assert difference({"y": found}, {"y": np.array(wanted)}) == pytest.approx(1 / max(wanted))


def test_infinities_and_strings_that_are_equal_are_equal() -> None:
    """A masked logit of minus infinity is an answer like others."""
    same = {"y": np.array([-math.inf, math.nan, 1.0]), "text": np.array([b"a"], object)}
    assert excess(same, same, Tolerance(absolute=0, relative=0)) == 0


def test_answers_without_dimensions_are_compared() -> None:
    """A model without a batch may give a single number."""
    one, other = {"y": np.array(1.5, np.float32)}, {"y": np.array(1.0, np.float32)}
    assert (difference(one, other), difference(one, one)) == (0.5, 0)
    assert difference({"y": np.array(math.nan)}, {"y": np.array(1.0)}) == math.inf


def test_answers_in_bfloat16_and_in_bytes_are_compared_as_numbers() -> None:
    """Types that NumPy cannot subtract, or would wrap around in."""
    one, two = np.array([1, 255]), np.array([1, 0])
    for dtype in (dtype_of("BF16"), np.dtype(np.uint8)):
        assert difference({"y": one.astype(dtype)}, {"y": two.astype(dtype)}) > 200

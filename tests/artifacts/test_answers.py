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
    """Nothing lies between an answer and itself, though nothing be allowed."""
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
    ],
)
def test_what_no_number_can_say_is_infinitely_far(found: dict, wanted: dict) -> None:
    """Missing outputs, other shapes or types, NaN or infinity in one alone, other strings."""
    assert excess(found, wanted, Tolerance(absolute=1e9, relative=1e9)) == math.inf
    assert difference(found, wanted) == math.inf


def test_infinities_and_strings_that_are_equal_are_equal() -> None:
    """A masked logit of minus infinity is an answer like others."""
    same = {"y": np.array([-math.inf, math.nan, 1.0]), "text": np.array([b"a"], object)}
    assert excess(same, same, Tolerance(absolute=0, relative=0)) == 0


def test_answers_in_bfloat16_and_in_bytes_are_compared_as_numbers() -> None:
    """Types that NumPy cannot subtract, or would wrap around in."""
    one, two = np.array([1, 255]), np.array([1, 0])
    for dtype in (dtype_of("BF16"), np.dtype(np.uint8)):
        assert difference({"y": one.astype(dtype)}, {"y": two.astype(dtype)}) > 200

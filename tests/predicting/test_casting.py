from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.predicting.input_conversion import cast, why_refused


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1), st.sampled_from(["INT8", "UINT8", "INT32", "UINT64"]))
def test_an_integer_survives_or_is_refused(values: list[int], datatype: Any) -> None:
    """Whatever is not refused is the very same number."""
    array = np.array(values, np.int64)
    found, refused = cast(array, datatype, allow_nan=False)
    assert [int(value) for value in found[~refused]] == [int(value) for value in array[~refused]]
    limits = np.iinfo(found.dtype)
    assert refused.tolist() == [not limits.min <= value <= limits.max for value in values]


@given(st.lists(st.floats(), min_size=1), st.sampled_from(["INT8", "UINT16", "INT64"]))
def test_a_float_becomes_an_integer_only_if_it_is_one(values: list[float], datatype: Any) -> None:
    """Fractions, NaN, infinities and what is too large are refused; the rest is equal."""
    array = np.array(values)
    found, refused = cast(array, datatype, allow_nan=True)
    limits = np.iinfo(found.dtype)
    for value, result, is_refused in zip(values, found, refused, strict=True):
        fits = np.isfinite(value) and value == int(value) and limits.min <= int(value) <= limits.max
        assert is_refused != fits
        assert is_refused or int(result) == int(value)


@pytest.mark.parametrize("datatype", ["FP16", "BF16", "FP32", "FP64"])
def test_nan_is_refused_unless_allowed(datatype: Any) -> None:
    """NaN and infinities reach the model only if someone asked for it."""
    array = np.array([1.5, np.nan, np.inf])
    assert cast(array, datatype, allow_nan=False)[1].tolist() == [False, True, True]
    found, refused = cast(array, datatype, allow_nan=True)
    assert not refused.any()
    assert np.isnan(found[1].astype(np.float32))


def test_a_float_too_large_for_its_type_is_refused() -> None:
    """A finite number does not become infinite on its way, even if infinities are allowed."""
    assert cast(np.array([1e30, 65504.0]), "FP16", allow_nan=True)[1].tolist() == [True, False]


def test_booleans_are_zero_and_one() -> None:
    """Other numbers are no truth values."""
    found, refused = cast(np.array([0, 1, 2]), "BOOL", allow_nan=False)
    assert found.tolist() == [False, True, False]
    assert refused.tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("value", "datatype", "words"),
    [
        (np.nan, "FP32", "is nan"),
        (1.5, "INT8", "is 1.5, which is no whole"),
        (300, "INT8", "is 300, which INT8 cannot"),
    ],
)
def test_the_reason_names_the_value(value: float, datatype: Any, words: str) -> None:
    """The error quotes the value, so that the file can be mended."""
    assert why_refused(value, datatype).startswith(words)

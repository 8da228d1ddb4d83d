from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.predicting.column_mapping import Input
from stoker.predicting.input_conversion import InputSamples, elements, numbers
from stoker.records import DynamicDim
from tests.predicting.builders import tokens, vector


def _read(column: Any, one: Input, *, allow_nan: bool = False) -> InputSamples:
    return numbers(column, one, allow_nan=allow_nan)


def _lists(found: InputSamples) -> list[Any]:
    return [None if row in found.bad else found[row].tolist() for row in range(len(found.values))]


@given(st.lists(st.none() | st.lists(st.none() | st.integers(-5, 200), max_size=4), max_size=12))
def test_arrow_and_python_values_are_read_alike(values: list[Any]) -> None:
    """A Parquet column of lists and the same lists from JSON give the same tensors and the same bad rows."""
    one = vector("INT8", 3)
    from_arrow, from_json = _read(pa.array(values, pa.list_(pa.int64())), one), _read(values, one)
    assert _lists(from_arrow) == _lists(from_json)
    assert set(from_arrow.bad) == set(from_json.bad)


@given(st.lists(st.lists(st.integers(-5, 5), min_size=0, max_size=10), max_size=10))
def test_lengths_may_vary_within_the_models_limits(values: list[list[int]]) -> None:
    """Rows of 1 to 8 tokens are good, others bad, from Arrow as from Python."""
    for column in (values, pa.array(values, pa.list_(pa.int32()))):
        found = _read(column, tokens(1, 8))
        assert _lists(found) == [row if 1 <= len(row) <= 8 else None for row in values]


def test_nested_lists_of_the_inputs_shape() -> None:
    """Lists in lists are taken by their shape, a flat list row by row; another shape is bad."""
    one = Input("x", "FP32", (2, 2), None)
    found = _read([[[1, 2], [3, 4]], [1, 2, 3, 4], [[1, 2, 3, 4]], [[1, 2], [3]]], one)
    assert _lists(found) == [[[1, 2], [3, 4]], [[1, 2], [3, 4]], None, None]
    fixed = pa.array([[[1, 2], [3, 4]], None], pa.list_(pa.list_(pa.float32(), 2), 2))
    assert _lists(_read(fixed, one)) == [[[1, 2], [3, 4]], None]


@given(st.lists(st.lists(st.tuples(st.integers(-9, 9), st.integers(-9, 9)), max_size=4), max_size=8))
def test_lists_of_pairs_have_the_rows_own_lengths(values: list[list[tuple[int, int]]]) -> None:
    """Of two rows with two pairs and none, the first has both: pairs are distinguished by rows, not by their number."""
    one = Input("pairs", "INT64", ("n", 2), None, (DynamicDim(name="n", low=1),))
    found = _read(pa.array(values, pa.list_(pa.list_(pa.int64(), 2))), one)
    assert _lists(found) == [[list(pair) for pair in row] or None for row in values]


def test_lists_of_lists_keep_their_shape() -> None:
    """Six pairs are no three lists of four, though they have as many numbers; two lists of two are both dimensions."""
    pairs = pa.array([[[1, 2]] * 3, [[1, 2]] * 6], pa.list_(pa.list_(pa.int64(), 2)))
    found = _read(pairs, Input("x", "INT64", (3, "m"), None, (DynamicDim(name="m", low=1),)))
    assert _lists(found) == [[[1, 2]] * 3, None]
    both = Input("x", "INT64", ("n", "m"), None, (DynamicDim(name="n", low=1), DynamicDim(name="m", low=1)))
    assert _lists(_read(pairs, both)) == [[[1, 2]] * 3, [[1, 2]] * 6]
    assert _lists(_read(pairs, Input("x", "INT64", (2, 3), None))) == [None, None]


def test_a_slice_of_a_column_is_read_from_its_own_start() -> None:
    """Arrow's views into a longer array do not lead to the wrong rows."""
    column = pa.array([[0, 0], [1, 1], [2, 2], [3, 3]], pa.list_(pa.int64(), 2))[1:3]
    assert _lists(_read(column, vector())) == [[1, 1], [2, 2]]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "null"),
        ([1.0], "has 1 numbers, wanted 2"),
        ([1.0, float("nan")], "element 1 is nan"),
        ([1.0, None], "null"),
        ([1.0, "a"], "no number"),
        ([[1.0], [2.0, 3.0]], "several lengths"),
        ("text", "no number and no JSON array"),
        ({"a": 1}, "no number"),
    ],
)
def test_a_bad_value_is_told(value: Any, reason: str) -> None:
    """The reason says what is wrong, and the row before is read all the same."""
    found = _read([[1.0, 2.0], value], vector())
    assert list(found.bad) == [1]
    assert reason in found.bad[1]
    assert found[0].tolist() == [1, 2]


def test_nulls_in_arrow_lists_are_told_with_their_place() -> None:
    """A null element is no zero."""
    found = _read(pa.array([[1, 2], [None, 4], None, [5, 6]], pa.list_(pa.int64())), vector())
    assert found.bad == {1: "element 0 is null", 2: "is null"}
    assert _lists(found) == [[1, 2], None, None, [5, 6]]


def test_cells_of_csv_are_numbers_or_json_arrays() -> None:
    """Text is parsed; what is no number is bad, and so is nothing."""
    scalar = Input("x", "FP32", (), None)
    found = _read(["1.5", " 2 ", "", "abc", "nan", "1e3"], scalar)
    assert _lists(found) == [1.5, 2.0, None, None, None, 1000.0]
    assert found.bad[3] == "is 'abc', which is no number"
    assert _lists(_read(["1_000", "2"], scalar)) == [None, 2.0]  # as training reads it
    assert _lists(_read(["1_000", "2"], Input("x", "INT64", (), None))) == [None, 2]
    assert _lists(_read(["[1, 2]", "[3]", "7"], vector())) == [[1, 2], None, None]


def test_numbers_and_texts_may_share_a_column() -> None:
    """As lines of JSON have them; a text that is no number, or nests without end, is a bad row and not the end."""
    found = _read(["1", 2, None, "x", "[" * 100_000, "[" * 300 + "]" * 300], vector("INT8", 1))
    assert _lists(found) == [[1], [2], None, None, None, None]
    assert "no number and no JSON array" in found.bad[4]
    assert "no number and no JSON array" in found.bad[5]


def test_whole_numbers_in_text_keep_all_their_digits() -> None:
    """An id above 2**53 does not pass through a float; a decimal point is fine if nothing follows it."""
    one = Input("id", "INT64", (), None)
    large = str(2**53 + 1)
    assert _lists(_read([large, "3"], one)) == [2**53 + 1, 3]
    found = _read([large, "3.0", "3.5", "x"], one)
    assert _lists(found) == [2**53 + 1, 3, None, None]
    assert found.bad[3] == "is 'x', which is no number"
    assert _read(["", "Oslo"], one).bad == {0: "is empty", 1: "is 'Oslo', which is no number"}


def test_one_column_for_each_element() -> None:
    """Columns are put side by side; the reason names the column that is bad."""
    columns = [["1", "2", "x"], pa.array([4.0, None, 6.0])]
    found = elements(columns, ["a", "b"], vector(), allow_nan=False)
    assert _lists(found) == [[1, 4], None, None]
    assert found.bad == {1: "b is null", 2: "a is 'x', which is no number"}


def test_strings_become_bytes() -> None:
    """A model of text gets UTF-8, whatever the file held it as."""
    one = Input("text", "BYTES", (), None)
    assert [found.item() for found in _read(["ä", b"b"], one)] == ["ä".encode(), b"b"]
    assert [found.item() for found in _read(pa.array(["c", "d"]), one)] == [b"c", b"d"]
    assert _read(["a", None, 3], one).bad == {1: "is null", 2: "holds something that is no string"}


@pytest.mark.parametrize(
    "column",
    [
        ["1.5", "", "NA", " nan "],
        [1.5, None, None, float("nan")],
        [1.5, None, "NA", float("nan")],
        pa.array([1.5, None, None, np.nan]),
        pa.array([1.5, None, None, np.nan], pa.float32()),
    ],
)
def test_a_missing_number_is_nan_if_that_is_allowed(column: Any) -> None:
    """What pandas writes for NaN, an empty cell or null; without --allow-nan such a row is bad."""
    one = Input("x", "FP32", (), None)
    found = _read(column, one, allow_nan=True)
    assert not found.bad
    assert np.array_equal(np.asarray(found.values), [1.5, np.nan, np.nan, np.nan], equal_nan=True)
    assert sorted(_read(column, one).bad) == [1, 2, 3]


def test_a_whole_number_is_never_missing() -> None:
    """There is no NaN among integers."""
    column = pa.array([1, None])
    assert list(_read(column, Input("x", "INT64", (), None), allow_nan=True).bad) == [1]
    assert np.isnan(_read(column, Input("x", "FP32", (), None), allow_nan=True)[1])


def test_large_whole_numbers_next_to_missing_ones_are_rounded() -> None:
    """As they are where none is missing: the model takes floats."""
    one = Input("x", "FP32", (), None)
    for column in (pa.array([2**53 + 1, 7]), pa.array([2**53 + 1, None])):
        found = _read(column, one, allow_nan=True)
        assert not found.bad
        assert found[0] == np.float32(2**53)


def test_nan_passes_if_allowed() -> None:
    """With --allow-nan the model gets NaN, and null is bad as ever."""
    found = _read(pa.array([[np.nan, 1.0], [None, 1.0]], pa.list_(pa.float32(), 2)), vector(), allow_nan=True)
    assert np.isnan(found[0][0])
    assert list(found.bad) == [1]

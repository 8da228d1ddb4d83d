from __future__ import annotations

import pyarrow as pa
import pytest

from stoker.errors import BadJob
from stoker.predicting.column_mapping import Input, misfit, parse_mapping, resolve
from stoker.predicting.row_source import SourceColumn
from tests.predicting.builders import tokens, vector

NUMBER, TEXT = pa.float64(), pa.string()


def _fields(**types: pa.DataType | None) -> dict[str, list[SourceColumn]]:
    return {"in.parquet": [SourceColumn(name, kind) for name, kind in types.items()]}


def _csv(*names: str) -> dict[str, list[SourceColumn]]:
    return {"in.csv": [SourceColumn(name, TEXT, is_text=True) for name in names]}


def test_a_mapping_names_one_column_several_or_a_range() -> None:
    """`--map` takes a column, columns with commas between them, and numbered columns from … to."""
    found = parse_mapping(["a=pixels", "b=p,q", "c=x8..x11", "d=x08..x10"])
    assert found == {
        "a": ("pixels",),
        "b": ("p", "q"),
        "c": ("x8", "x9", "x10", "x11"),
        "d": ("x08", "x09", "x10"),
    }


@pytest.mark.parametrize("words", [["x"], ["=a"], ["x="], ["x=a", "x=b"], ["x=p3..p0"]])
def test_a_mapping_of_another_form_is_refused(words: list[str]) -> None:
    """A word without both sides, an input given twice, or columns counted down, which are none, is an error."""
    with pytest.raises(BadJob, match="--map"):
        parse_mapping(words)


def test_a_column_of_the_inputs_name_is_taken() -> None:
    """The name decides, whatever else would fit."""
    fields = _fields(y=pa.list_(NUMBER, 2), x=pa.list_(NUMBER, 2))
    assert resolve([vector()], fields, {}, ()) == {"x": ("x",)}


def test_the_only_fitting_column_is_taken() -> None:
    """A model with one input needs no name where one column alone fits."""
    fields = _fields(id=pa.int64(), words=TEXT, pixels=pa.list_(NUMBER, 2), other=pa.list_(NUMBER, 3))
    assert resolve([vector()], fields, {}, ()) == {"x": ("pixels",)}


@pytest.mark.parametrize("first", [0, 1])
def test_numbered_columns_are_put_in_the_order_of_their_numbers(first: int) -> None:
    """Columns p0, p1, … become one vector, also if they count from 1; those of the input's own name in any order."""
    names = [f"p{first + number}" for number in range(12)]
    assert resolve([vector(count=12)], _csv("id", *names, "last"), {}, ()) == {"x": tuple(names)}
    own = [f"x{first + number}" for number in range(12)]
    assert resolve([vector(count=12)], _csv("id", *sorted(own)), {}, ()) == {"x": tuple(own)}


def test_numbered_columns_that_stand_in_another_order_are_not_guessed() -> None:
    """A model trained on a table whose header is p0, p1, p10, p11, p2, … took its features as they stood there."""
    names = [f"p{number}" for number in range(12)]
    with pytest.raises(BadJob, match="without guessing"):
        resolve([vector(count=12)], _csv(*sorted(names)), {}, ())
    assert resolve([vector(count=12)], _csv(*sorted(names)), {"x": tuple(names)}, ()) == {"x": tuple(names)}


@pytest.mark.parametrize(
    "fields",
    [
        _fields(a=pa.list_(NUMBER, 2), b=pa.list_(NUMBER, 2)),
        _fields(a=NUMBER, b=NUMBER),
        _csv("width", "height"),
        _fields(a=None, b=None),
    ],
)
def test_what_could_be_meant_in_two_ways_is_refused(fields: dict[str, list[SourceColumn]]) -> None:
    """Two columns that fit, or columns of unknown order, are not guessed."""
    with pytest.raises(BadJob, match="without guessing") as caught:
        resolve([vector()], fields, {}, ())
    assert "--map x=" in str(caught.value)


def test_a_column_that_is_kept_is_not_taken_for_the_input() -> None:
    """What is copied is left out of the guess."""
    fields = _fields(a=pa.list_(NUMBER, 2), b=pa.list_(NUMBER, 2))
    assert resolve([vector()], fields, {}, ("a",)) == {"x": ("b",)}


def test_a_column_that_is_not_there_names_the_nearest() -> None:
    """A typing error in --map or --keep is answered with what it was probably meant to be."""
    with pytest.raises(BadJob, match="no column 'pixel'") as caught:
        resolve([vector()], _fields(pixels=pa.list_(NUMBER, 2)), {"x": ("pixel",)}, ())
    assert "'pixels'" in str(caught.value)
    with pytest.raises(BadJob, match="no input 'y'"):
        resolve([vector()], _fields(x=pa.list_(NUMBER, 2)), {"y": ("x",)}, ())


def test_every_source_must_have_the_columns() -> None:
    """A file that lacks one is named before anything is computed."""
    fields = _fields(x=pa.list_(NUMBER, 2)) | {"other.parquet": [SourceColumn("z", NUMBER)]}
    with pytest.raises(BadJob, match=r"other\.parquet has no column 'x'"):
        resolve([vector()], fields, {}, ())


def test_a_kept_column_has_one_type() -> None:
    """Parts of one output cannot have a column as numbers and as text."""
    x = SourceColumn("x", pa.list_(NUMBER, 2))
    fields = {"a": [x, SourceColumn("id", pa.int64())], "b": [x, SourceColumn("id", TEXT)]}
    with pytest.raises(BadJob, match="several types"):
        resolve([vector()], fields, {}, ("id",))


@pytest.mark.parametrize(
    ("kind", "one", "problem"),
    [
        (pa.list_(NUMBER, 3), vector(), "has 3 numbers a row, wanted 2"),
        (pa.list_(NUMBER), vector(), ""),
        (pa.list_(pa.list_(NUMBER, 3), 2), Input("x", "FP32", (2, 3), None), ""),
        (pa.list_(pa.list_(NUMBER, 2), 3), Input("x", "FP32", (2, 3), None), "shape"),
        (pa.list_(NUMBER, 6), Input("x", "FP32", (2, 3), None), ""),
        (TEXT, vector(), "no image fits"),
        (TEXT, Input("x", "FP32", (1, 8, 8), None), ""),
        (pa.binary(), Input("x", "UINT8", (8, 8, 3), None), ""),
        (TEXT, Input("text", "BYTES", (), None), ""),
        (NUMBER, Input("text", "BYTES", (), None), "wanted strings"),
        (pa.date32(), vector(count=1), "wanted numbers"),
        (NUMBER, tokens(), "wanted lists"),
        (pa.list_(pa.int32()), tokens(), ""),
        (pa.dictionary(pa.int8(), TEXT), Input("text", "BYTES", (), None), ""),
    ],
)
def test_types_that_cannot_fit_are_known_before_a_row_is_read(kind: pa.DataType, one: Input, problem: str) -> None:
    """A column's type alone shows that it holds something else, or too many of it."""
    found = misfit(SourceColumn("c", kind), one)
    assert problem in found
    assert bool(found) == bool(problem)


def test_as_many_columns_as_elements() -> None:
    """An input of two numbers is not made of three columns, nor of columns that hold lists."""
    fields = _fields(a=NUMBER, b=NUMBER, c=NUMBER, v=pa.list_(NUMBER, 2))
    with pytest.raises(BadJob, match="3 columns are given"):
        resolve([vector()], fields, {"x": ("a", "b", "c")}, ())
    with pytest.raises(BadJob, match="wanted one number"):
        resolve([vector()], fields, {"x": ("a", "v")}, ())

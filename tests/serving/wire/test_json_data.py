from __future__ import annotations

import json
import re
import tracemalloc

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from stoker.artifacts.dtypes import dtype_of
from stoker.records import Datatype
from stoker.serving.http.bodies import decode
from stoker.serving.protocol import from_json_data, to_json_data
from stoker.serving.refusals import BadRequest, Refusal

IN_JSON: tuple[Datatype, ...] = (
    "BOOL",
    "UINT8",
    "UINT16",
    "UINT32",
    "UINT64",
    "INT8",
    "INT16",
    "INT32",
    "INT64",
    "FP32",
    "FP64",
)


@st.composite
def tensors(draw: st.DrawFn) -> tuple[Datatype, np.ndarray]:
    """A tensor of finite numbers or booleans."""
    datatype = draw(st.sampled_from(IN_JSON))
    dtype = dtype_of(datatype)
    finite = {"allow_nan": False, "allow_infinity": False} if dtype.kind == "f" else {}
    shape = draw(arrays_of.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=4))
    return datatype, draw(arrays_of.arrays(dtype, shape, elements=arrays_of.from_dtype(dtype, **finite)))


@given(tensors(), st.booleans())
def test_tensors_come_back_as_they_went(one: tuple[Datatype, np.ndarray], is_nested: bool) -> None:
    """Nested or flat, every number comes back with its last bit."""
    datatype, array = one
    sent = array if is_nested else to_json_data(array)
    data = orjson.loads(orjson.dumps(sent, option=orjson.OPT_SERIALIZE_NUMPY))
    found = from_json_data(data, datatype, array.shape, "input 'x'")
    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found, array)


def test_flat_data_of_another_length_are_told_with_both() -> None:
    """Not by the dimension of a nested list that they are not."""
    with pytest.raises(BadRequest, match=re.escape("has shape [1, 2], of 2 values; its data has 3")):
        from_json_data([1, 2, 3], "FP32", (1, 2), "input 'x'")


def test_strings_are_utf8() -> None:
    """A BYTES tensor in JSON is text, on both ways."""
    array = from_json_data([["é"], [""]], "BYTES", (2, 1), "input 'x'")
    assert array.tolist() == [["é".encode()], [b""]]
    assert to_json_data(array) == ["é", ""]


@pytest.mark.parametrize(
    ("data", "datatype", "shape"),
    [
        (None, "FP32", (1,)),
        (None, "FP32", ()),
        ("1", "FP32", (1,)),
        ([1, 2, 3], "FP32", (2,)),
        ([[1, 2], [3]], "FP32", (2, 2)),
        ([[1, 2], 3], "FP32", (2, 2)),
        ([[[1], [2]]], "FP32", (1, 2)),
        ([[1], [2]], "FP32", (2,)),
        ([1, True], "FP32", (2,)),
        ([1, "2"], "FP32", (2,)),
        ([1, None], "FP32", (2,)),
        ([{}], "FP32", (1,)),
        ([1.5], "INT32", (1,)),
        ([1.0], "INT32", (1,)),
        ([128], "INT8", (1,)),
        ([-1], "UINT8", (1,)),
        ([2**64], "UINT64", (1,)),
        ([0], "BOOL", (1,)),
        ([1e39], "FP32", (1,)),
        ([10**400], "FP64", (1,)),
        ([1], "BYTES", (1,)),
        ([1.0], "FP16", (1,)),
        ([1.0], "BF16", (1,)),
    ],
)
def test_what_does_not_fit_is_refused(data: object, datatype: Datatype, shape: tuple[int, ...]) -> None:
    """Other shapes, other kinds of values, numbers too large: never taken for something near."""
    with pytest.raises(BadRequest, match="input 'x'"):
        from_json_data(data, datatype, shape, "input 'x'")


def test_a_single_value_needs_no_list() -> None:
    """A tensor without dimensions is a number."""
    assert from_json_data(2.5, "FP64", (), "input 'x'") == np.float64(2.5)


def test_numbers_that_are_none_are_null() -> None:
    """JSON has no NaN and no infinity; an answer stays JSON that every parser reads."""
    written = orjson.dumps(to_json_data(np.array([1.0, np.nan, np.inf], np.float32)), option=orjson.OPT_SERIALIZE_NUMPY)
    assert written == b"[1.0,null,null]"


@pytest.mark.parametrize("shape", [(20_000,), (4, 5_000), (200, 25, 4), (20_000, 1)])
@pytest.mark.parametrize("is_flat", [False, True])
def test_long_data_are_read_in_parts_as_they_are_at_once(shape: tuple[int, ...], is_flat: bool) -> None:
    """The same tensor as from the whole list, nested or flat; only the list of numbers is not read as JSON at once."""
    array = np.random.default_rng(0).standard_normal(shape).astype(np.float64)
    data = (array.reshape(-1) if is_flat else array).tolist()
    document = {"inputs": [{"name": "x", "shape": list(shape), "datatype": "FP64", "data": data}], "id": "a"}
    request, _ = decode(json.dumps(document).encode(), json_bytes=None, model="m")
    assert request.id == "a"
    assert np.array_equal(request.inputs["x"], array)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("[[", "["), "nested"),
        (("]]", ",1]]"), "values"),
        (("0.5, 0.5", "0.5 0.5"), "values"),
        (("[[0.5,", "[0.5[,"), "nested"),
        (("0.5, 0.5", "0.5.5, 0.5"), "no JSON"),
        (("0.5, 0.5", "1e999, 0.5"), "too large|no JSON"),
        (("[0.5,", "[,"), "no JSON"),
    ],
)
def test_long_data_that_are_wrong_are_refused(change: tuple[str, str], message: str) -> None:
    """Brackets in other places than the shape has them, too many values, numbers that are none."""
    document = {"inputs": [{"name": "x", "shape": [2, 20_000], "datatype": "FP32", "data": [[0.5] * 20_000] * 2}]}
    text = json.dumps(document).replace(change[0], change[1], 1)
    with pytest.raises(BadRequest, match=message):
        decode(text.encode(), json_bytes=None, model="m")


@pytest.mark.parametrize("unit", [b"[],", b'{"a":1},', b'"",'])
def test_json_of_nothing_but_lists_or_objects_is_refused_before_it_is_read(unit: bytes) -> None:
    """Two megabytes of them take thirty times that as Python objects; little is allocated here."""
    head = b'{"inputs":[{"name":"x","shape":[1,8],"datatype":"FP32","data":['
    body = head + unit * (4 * 2**20 // len(unit)) + unit[:-1] + b"]}]}"
    tracemalloc.start()
    try:
        with pytest.raises(Refusal):
            decode(body, json_bytes=None, model="m")
        assert tracemalloc.get_traced_memory()[1] < 6 * len(body)
    finally:
        tracemalloc.stop()

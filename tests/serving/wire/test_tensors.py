from __future__ import annotations

import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from stoker.artifacts.dtypes import datatype_of, dtype_of, to_raw
from stoker.records import Datatype
from stoker.serving.protocol import MOST_ELEMENTS, checked_shape, datatype_named, from_raw, strings
from stoker.serving.refusals import BadRequest

NUMBERS: tuple[Datatype, ...] = (
    "BOOL",
    "UINT8",
    "UINT16",
    "UINT32",
    "UINT64",
    "INT8",
    "INT16",
    "INT32",
    "INT64",
    "FP16",
    "BF16",
    "FP32",
    "FP64",
)
shapes = arrays_of.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)


@given(st.sampled_from(NUMBERS), shapes, st.randoms(use_true_random=False))
def test_numbers_come_back_as_they_went(datatype: Datatype, shape: tuple[int, ...], random: object) -> None:
    """What `to_raw` writes `from_raw` reads: the same bits, shape and datatype, NaN and all."""
    size = math.prod(shape) * dtype_of(datatype).itemsize
    bits = bytes(random.randrange(2 if datatype == "BOOL" else 256) for _ in range(size))
    array = from_raw(bits, datatype, shape, "input 'x'")
    assert (array.shape, datatype_of(array.dtype)) == (shape, datatype)
    assert bytes(to_raw(array)) == bits


@given(st.lists(st.binary(max_size=20), max_size=12))
def test_strings_come_back_as_they_went(values: list[bytes]) -> None:
    """BYTES hold any bytes, none at all too, each after its length."""
    raw = to_raw(strings(values))
    assert from_raw(raw, "BYTES", (len(values),), "input 'x'").tolist() == values


def test_a_tensor_is_a_view_of_the_body() -> None:
    """Reading copies nothing, and what was received cannot be written to."""
    body = np.arange(6, dtype=np.float32).tobytes()
    array = from_raw(memoryview(body), "FP32", (2, 3), "input 'x'")
    assert np.shares_memory(array, np.frombuffer(body, np.uint8))
    assert not array.flags.writeable


def test_what_is_not_row_major_is_written_row_by_row() -> None:
    """A transposed output goes out in the order that its shape says."""
    array = np.arange(6, dtype=np.int32).reshape(2, 3).T
    assert np.frombuffer(bytes(to_raw(array)), np.int32).tolist() == [0, 3, 1, 4, 2, 5]


def test_text_is_written_in_utf8() -> None:
    """An engine may give strings of Python or NumPy; on the wire they are bytes."""
    assert bytes(to_raw(np.array(["é"]))) == struct.pack("<I", 2) + "é".encode()


@pytest.mark.parametrize("num_bytes", [0, 11, 13])
def test_sizes_that_lie_are_refused(num_bytes: int) -> None:
    """Three FP32 are twelve bytes; the message has both numbers."""
    with pytest.raises(BadRequest, match=f"comes with {num_bytes} bytes.* has 12"):
        from_raw(bytes(num_bytes), "FP32", (3,), "input 'x'")


@pytest.mark.parametrize(
    ("raw", "elements"),
    [
        (struct.pack("<I", 5) + b"abcd", 1),
        (struct.pack("<I", 2**32 - 1) + b"abcd", 1),
        (struct.pack("<I", 1) + b"a" + b"more", 1),
        (struct.pack("<I", 4) + b"abcd", 2),
        (b"", 10**9),
        (b"\0\0\0\0\0\0", 1),
    ],
)
def test_lengths_of_strings_that_lie_are_refused(raw: bytes, elements: int) -> None:
    """A length that leads out of the bytes, or leaves some over, is found before anything of that size is made."""
    with pytest.raises(BadRequest, match="input 'x'"):
        from_raw(raw, "BYTES", (elements,), "input 'x'")


def test_a_boolean_is_zero_or_one() -> None:
    """Any other byte would be a boolean that is neither true nor false."""
    with pytest.raises(BadRequest, match="other than 0 and 1"):
        from_raw(b"\0\2", "BOOL", (2,), "input 'x'")


@pytest.mark.parametrize(
    "shape",
    [None, "12", 3, [1.0], [True], [-1], ["2"], [2**63, 2**63], [0, 2**62, 2**62], [MOST_ELEMENTS + 1], [1] * 33],
)
def test_shapes_that_no_tensor_has_are_refused(shape: object) -> None:
    """Negative sizes, products that overflow (behind a zero too), fractions, booleans, too many dimensions."""
    with pytest.raises(BadRequest, match="input 'x'"):
        checked_shape(shape, "input 'x'")


@pytest.mark.parametrize("datatype", [None, 3, "float32", "fp32", ""])
def test_unknown_datatypes_are_refused(datatype: object) -> None:
    """The message lists those that there are."""
    with pytest.raises(BadRequest, match="known: BF16, BOOL"):
        datatype_named(datatype, "input 'x'")

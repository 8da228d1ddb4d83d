from __future__ import annotations

import numpy as np
import pytest

from stoker.serving.protocol import classify, strings
from stoker.serving.refusals import BadRequest
from stoker.serving.service import InferenceRequest, InferenceResponse, RequestedOutput


def classes(array: np.ndarray, most: int, labels: tuple[str, ...] = ()) -> np.ndarray:
    """The largest values of one output."""
    response = InferenceResponse(model="m", version="1", id="", outputs={"y": array, "z": array}, labels={"y": labels})
    request = InferenceRequest(
        model="m", inputs={}, outputs=(RequestedOutput(name="y", classification=most), RequestedOutput(name="z"))
    )
    found = classify(response, request)
    assert found.outputs["z"] is array
    return found.outputs["y"]


def test_each_row_has_its_largest_values() -> None:
    """Value, index and label, largest first; equal values in the order of their indices."""
    found = classes(np.array([[1, 3, 2], [5, 5, 4]], np.float32), 2, ("a", "b"))
    assert found.tolist() == [[b"3.0:1:b", b"2.0:2"], [b"5.0:0:a", b"5.0:1:b"]]


def test_more_than_there_are_is_all_of_them() -> None:
    """And an output of one dimension is one row."""
    assert classes(np.array([1, 2], np.int64), 10).tolist() == [b"2:1", b"1:0"]


def test_what_is_no_number_comes_last() -> None:
    """A NaN is not the best class."""
    assert classes(np.array([[np.nan, -1, 0]], np.float32), 3).tolist() == [[b"0.0:2", b"-1.0:1", b"nan:0"]]
    masked = np.array([[np.nan, -np.inf, 1, np.nan]], np.float32)
    assert classes(masked, 2).tolist() == [[b"1.0:2", b"-inf:1"]]
    assert classes(masked, 4).tolist() == [[b"1.0:2", b"-inf:1", b"nan:0", b"nan:3"]]


def test_unsigned_numbers_are_not_turned_round() -> None:
    """The largest UINT8 is 255, though minus it is 1."""
    assert classes(np.array([[0, 255, 1]], np.uint8), 1).tolist() == [[b"255:1"]]


def test_strings_have_no_largest() -> None:
    """That is the caller's mistake, and said."""
    with pytest.raises(BadRequest, match="is BYTES"):
        classes(strings([b"a"]), 1)


def test_nothing_wanted_is_nothing_done() -> None:
    """The common case gives back what it was given."""
    response = InferenceResponse(model="m", version="1", id="", outputs={})
    assert classify(response, InferenceRequest(model="m", inputs={})) is response


def test_a_few_bytes_do_not_ask_for_a_million_strings() -> None:
    """They are made on the event loop: 10^9 of a million classes are refused, the ten largest are given."""
    scores = np.zeros((1, 2**20), np.float32)
    scores[0, [5, 2**19]] = 1.0

    def asked(most: int) -> InferenceResponse:
        response = InferenceResponse(model="m", version="1", id="", outputs={"y": scores})
        request = InferenceRequest(model="m", inputs={}, outputs=(RequestedOutput(name="y", classification=most),))
        return classify(response, request)

    with pytest.raises(BadRequest, match="would be 1,048,576 classes, at most 16,384"):
        asked(10**9)
    assert [value.decode() for value in asked(4).outputs["y"][0]] == ["1.0:5", "1.0:524288", "0.0:0", "0.0:1"]

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import BadJob
from stoker.loadtesting.inference_requests import (
    NUM_DRAWN,
    from_file,
    in_requests,
    made_up,
    sized,
    sizes_of,
    whole_requests,
)
from stoker.records import TensorSpec

TOKENS = (
    TensorSpec(name="ids", datatype="INT64", shape=("batch", "tokens"), pad=0.0),
    TensorSpec(name="mask", datatype="INT64", shape=("batch", "tokens"), pad=0.0),
)


@given(st.integers(1, 9), st.integers(1, 12))
def test_requests_have_the_rows_asked_for(have: int, rows: int) -> None:
    """Each has exactly so many, none is split, and where there are too few they begin again."""
    requests = in_requests({"x": np.arange(have), "y": np.arange(have) * 2}, rows)
    assert len(requests) == max(1, have // rows)
    for request in requests:
        assert len(request["x"]) == rows
        assert (request["y"] == 2 * request["x"]).all()
    assert requests[0]["x"].tolist() == [n % have for n in range(rows)]


def test_sizes_are_drawn_alike_for_all_inputs() -> None:
    """Equal names have equal sizes in one request; every size drawn is one of those asked for, and they differ."""
    arrays = {"ids": np.arange(10).reshape(1, 10), "mask": np.ones((1, 10), dtype=np.int64)}
    requests = sized(in_requests(arrays), TOKENS, {"tokens": range(8, 129)})
    assert len(requests) == NUM_DRAWN
    lengths = [one["ids"].shape[1] for one in requests]
    assert lengths == [one["mask"].shape[1] for one in requests]
    assert len(set(lengths)) > 20
    assert all(8 <= length <= 128 for length in lengths)
    longest = max(requests, key=lambda one: one["ids"].shape[1])["ids"][0]
    assert (longest == np.arange(len(longest)) % 10).all()  # goes on from its beginning


def test_a_dimension_that_is_not_there_is_named() -> None:
    """The text has both what was asked for and what there is."""
    with pytest.raises(BadJob, match=r"words.*tokens"):
        sized([], TOKENS, {"words": (3,)})


@pytest.mark.parametrize("word", ["tokens", "tokens=", "=3", "tokens=a-b", "tokens=0-4", "tokens=9-8", "tokens=4,-1"])
def test_sizes_that_mean_nothing_are_refused(word: str) -> None:
    """With the word and an example."""
    with pytest.raises(BadJob, match="tokens=8-128"):
        sizes_of(word)


def test_files_are_read_without_pickle(tmp_path: Path) -> None:
    """Arrays come back; pickled objects and no file at all are refused."""
    good, pickled = tmp_path / "a.npz", tmp_path / "c.npz"
    np.savez(good, x=np.ones((3, 2)))
    np.savez(pickled, x=np.array([{}], dtype=object))
    assert from_file(good)["x"].shape == (3, 2)
    for path in (pickled, tmp_path / "none.npz"):
        with pytest.raises(BadJob, match=path.name):
            from_file(path)


@pytest.mark.parametrize("other", [np.ones(2), np.ones(()), np.ones((0, 2))])
def test_rows_that_do_not_go_together_are_refused(other: np.ndarray) -> None:
    """Uneven, a single number, or none at all."""
    with pytest.raises(BadJob, match="equally many rows"):
        in_requests({"x": np.ones((0, 3) if other.shape == (0, 2) else 3), "y": other})


WHOLE = (
    TensorSpec(name="x", datatype="FP32", shape=("n", 4)),
    TensorSpec(name="k", datatype="FP32", shape=()),
)


def test_inputs_of_a_model_without_a_batch_are_one_request_or_several_stacked() -> None:
    """Arrays of exactly its dimensions are one; of one more, as many as there are."""
    one = {"x": np.ones((3, 4), np.float32), "k": np.float32(2)}
    assert whole_requests(one, WHOLE) == [one]
    several = whole_requests({"x": np.arange(24).reshape(2, 3, 4), "k": np.arange(2)}, WHOLE)
    assert [(request["x"].shape, int(request["k"])) for request in several] == [((3, 4), 0), ((3, 4), 1)]
    made = whole_requests(made_up(WHOLE), WHOLE)
    assert [{name: array.shape for name, array in request.items()} for request in made] == [{"x": (16, 4), "k": ()}]
    with pytest.raises(BadJob, match=r"k \[\] is \[3\]"):
        whole_requests({"x": np.ones((3, 4)), "k": np.ones(3)}, WHOLE)
    with pytest.raises(BadJob, match="no batch"):
        whole_requests(one, WHOLE, rows=2)


def test_made_up_inputs_have_the_form_of_the_model() -> None:
    """Shapes with rows and sizes filled in, types as named; whole numbers are ones, which every vocabulary has."""
    specs = (*TOKENS, TensorSpec(name="x", datatype="FP32", shape=("batch", 3)))
    arrays = made_up(specs, rows=4)
    assert {name: array.shape for name, array in arrays.items()} == {"ids": (4, 16), "mask": (4, 16), "x": (4, 3)}
    assert arrays["ids"].dtype == np.int64
    assert (arrays["ids"] == 1).all()
    assert arrays["x"].std() > 0

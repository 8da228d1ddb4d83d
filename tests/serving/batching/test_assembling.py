"""Batches out of parts, answers out of batches."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.artifacts.dtypes import Arrays
from stoker.records import Manifest, TensorSpec
from stoker.serving.batching.queue import RequestPart, Shapes
from stoker.serving.batching.workers import Assembler, join_answers
from tests.serving.batching.models import FIXED, TOKENS, TokenEngine, manifest, token_inputs


def _part(inputs: Arrays, model: Manifest = TOKENS) -> RequestPart:
    rows, shape = Shapes(model).measure(inputs)
    return RequestPart(None, 0, inputs, rows, 1, shape, "", 0.0, math.inf, 0.0)


def _assembler(model: Manifest = TOKENS) -> Assembler:
    return Assembler(model, Shapes(model).padded_dims)


def test_a_whole_batch_is_passed_through() -> None:
    """One request without padding is not copied."""
    part = _part(token_inputs(3, 7))
    inputs = _assembler().inputs([part], (7,))
    assert inputs["input_ids"] is part.inputs["input_ids"]


def test_a_view_that_engines_cannot_read_is_copied() -> None:
    """As from an odd place in the body of a request, or a strided one."""
    body = b"\x00" * 3 + np.arange(8, dtype=np.float32).tobytes()
    askew = np.frombuffer(body, np.float32, offset=3).reshape(2, 4)
    assert not askew.flags.aligned
    given_ = _assembler(FIXED).inputs([_part({"x": askew}, FIXED)], ())["x"]
    assert given_.flags.aligned
    np.testing.assert_array_equal(given_, askew)
    strided = np.ones((2, 8), np.float32)[:, ::2]
    assert _assembler(FIXED).inputs([_part({"x": strided}, FIXED)], ())["x"].flags.c_contiguous


def test_shorter_samples_are_padded_with_what_the_manifest_says() -> None:
    """Each input with its own value, behind the sample."""
    padded = manifest(
        (
            TensorSpec(name="input_ids", datatype="INT64", shape=("batch", "tokens"), pad=7),
            TensorSpec(name="attention_mask", datatype="INT64", shape=("batch", "tokens"), pad=0),
        ),
        (),
    )
    inputs = _assembler(padded).inputs([_part(token_inputs(1, 3)), _part(token_inputs(1, 2, first=50))], (4,))
    assert inputs["input_ids"].tolist() == [[1, 2, 3, 7], [50, 51, 7, 7]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 0, 0]]


def test_strings_are_put_together_as_objects() -> None:
    """BYTES have no memory of fixed size to be copied to."""
    words = manifest((TensorSpec(name="word", datatype="BYTES", shape=("batch", 1)),), ())
    parts = [_part({"word": np.array([[word]], dtype=object)}, words) for word in (b"a", b"bcd")]
    assert _assembler(words).inputs(parts, ())["word"].tolist() == [[b"a"], [b"bcd"]]


def test_memory_is_used_again_and_never_shows_an_older_batch() -> None:
    """A smaller batch after a larger one holds nothing of it."""
    assembler = _assembler()
    first = assembler.inputs([_part(token_inputs(4, 9, first=1000)), _part(token_inputs(1, 5))], (9,))["input_ids"]
    second = assembler.inputs([_part(token_inputs(1, 3)), _part(token_inputs(1, 2))], (3,))["input_ids"]
    assert np.shares_memory(first, second)
    assert second.tolist() == [[1, 2, 3], [1, 2, 0]]


def test_outputs_of_another_number_of_rows_are_refused() -> None:
    """An engine that answers for 2 of 3 rows would give someone the answer of another."""
    parts = [_part(token_inputs(2, 4)), _part(token_inputs(1, 4))]
    with pytest.raises(ValueError, match=r"output 'mean' has the shape \[2\], for a batch of 3 rows"):
        _assembler().answers({"mean": np.zeros(2)}, parts, (4,))


REQUESTS = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 20), st.integers(1, 1000)), min_size=1, max_size=8)


@given(REQUESTS, st.integers(0, 5))
def test_answers_are_those_of_each_part_alone(requests: list[tuple[int, int, int]], extra: int) -> None:
    """Assembled, padded, computed and split: the same as each alone, shapes included."""
    engine, assembler = TokenEngine(), _assembler()
    parts = [_part(token_inputs(rows, length, first=first)) for rows, length, first in requests]
    sizes = (max(length for _, length, _ in requests) + extra,)
    outputs = engine.run(assembler.inputs(parts, sizes))
    for part, answer in zip(parts, assembler.answers(outputs, parts, sizes), strict=True):
        _assert_same(answer, engine.run(part.inputs))


@given(st.integers(1, 9), st.integers(1, 4))
def test_parts_of_a_split_request_join_to_its_answer(rows: int, piece: int) -> None:
    """Rows come back in their order."""
    engine, whole = TokenEngine(), token_inputs(rows, 3)
    answers = [
        engine.run({name: array[start : start + piece] for name, array in whole.items()})
        for start in range(0, rows, piece)
    ]
    _assert_same(join_answers(answers), engine.run(whole))


def _assert_same(answer: Arrays, alone: dict[str, Any]) -> None:
    assert answer.keys() == alone.keys()
    for name, array in answer.items():
        np.testing.assert_array_equal(array, alone[name])

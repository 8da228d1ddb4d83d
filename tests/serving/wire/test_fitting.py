from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stoker.artifacts.dtypes import Arrays
from stoker.records import DynamicDim, InputColumn, TensorSpec
from stoker.serving.protocol import fit
from stoker.serving.refusals import BadRequest, TooLarge
from stoker.serving.service import InferenceRequest, RequestedOutput
from tests.serving.fakes import DIGITS, TWO, manifest_of


def request_of(inputs: Arrays, *outputs: str) -> InferenceRequest:
    """A request for `digits` or `two`; `fit` looks at neither name."""
    return InferenceRequest(model="m", inputs=inputs, outputs=tuple(RequestedOutput(name=name) for name in outputs))


def pair(rows: int = 2, tokens: int = 3, **changes: Any) -> Arrays:
    """Inputs that fit `two`, unless they are changed."""
    return {"b": np.ones((rows, tokens), np.int64), "a": np.ones((rows, tokens), np.int64)} | changes


def test_what_fits_comes_in_the_manifests_order() -> None:
    """Whatever order it was sent in, and without a copy."""
    inputs = pair()
    found = fit(request_of(inputs, "sum"), TWO)
    assert list(found) == ["a", "b"]
    assert found["a"] is inputs["a"]


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({}, "misses 'a', 'b'"),
        ({"a": np.ones((1, 1), np.int64)}, "misses 'b'"),
        (pair(c=np.ones((1, 1), np.int64)), "has unknown 'c'"),
        ({"a": pair()["a"], "c": pair()["b"]}, "misses 'b' and has unknown 'c'"),
        (
            pair(a=np.ones((2, 3), np.int32)),
            r"'a' of 'two' is INT64 \[batch, tokens\]; this request has INT32 \[2, 3\]",
        ),
        (pair(a=np.ones((2, 3, 1), np.int64)), r"has INT64 \[2, 3, 1\]"),
        (pair(a=np.ones((1, 3), np.int64)), "'b' of 'two' has 2 where dimension 'batch' is, another input has 1"),
        (pair(a=np.ones((2, 4), np.int64)), "dimension 'tokens'"),
        (pair(rows=0), "dimension 'batch' of 'two' is 0 in this request, less than 1"),
        (pair(tokens=0), "'tokens' of 'two' is 0"),
    ],
)
def test_what_does_not_fit_is_told(inputs: Arrays, said: str) -> None:
    """Names, datatypes, ranks and sizes, with what was wanted and what came."""
    with pytest.raises(BadRequest, match=said):
        fit(request_of(inputs), TWO)


def test_a_fixed_dimension_is_fixed() -> None:
    """An image of another size is none for this model."""
    with pytest.raises(BadRequest, match=r"FP32 \[batch, 8, 8\]; this request has FP32 \[1, 8, 9\]"):
        fit(request_of({"image": np.ones((1, 8, 9), np.float32)}), DIGITS)


def test_an_unknown_output_is_told() -> None:
    """With the one that was meant."""
    with pytest.raises(BadRequest, match="Did you mean 'sum'"):
        fit(request_of(pair(), "sums"), TWO)


def test_limits_are_kept() -> None:
    """Rows above the server's limit, and dimensions above or below the manifest's."""
    assert fit(request_of(pair(rows=4)), TWO, max_rows=4)
    with pytest.raises(TooLarge, match="has 5 rows; 'two' takes at most 4"):
        fit(request_of(pair(rows=5)), TWO, max_rows=4)
    with pytest.raises(TooLarge, match="'tokens' of 'two' is 17 in this request, more than 16"):
        fit(request_of(pair(tokens=17)), TWO)
    wide = manifest_of("wide", TWO.inputs, TWO.outputs, dims=(DynamicDim(name="tokens", low=4),))
    with pytest.raises(BadRequest, match="less than 4"):
        fit(request_of(pair(tokens=3)), wide)


def test_strings_fit_as_strings() -> None:
    """NumPy's own strings are BYTES as well."""
    words = manifest_of("w", tuple(manifest_of("w", TWO.inputs[:1], ()).inputs), ())
    with pytest.raises(BadRequest, match="this request has BYTES"):
        fit(request_of({"a": np.array([["x"]])}), words)


WORDS = manifest_of(
    "words",
    (
        TensorSpec(
            name="categories",
            datatype="INT64",
            shape=("batch", 2),
            columns=(
                InputColumn(name="city", words=("Bern", "Rom"), missing_word="Rom"),
                InputColumn(name="size", words=("L", "M", "S")),
            ),
        ),
    ),
    (TensorSpec(name="sum", datatype="INT64", shape=("batch",)),),
)


def _words(*rows: tuple[str, str]) -> Arrays:
    values = np.empty((len(rows), 2), object)
    values[:] = [[word.encode() for word in row] for row in rows]
    return {"categories": values}


def test_words_become_the_numbers_that_they_had_in_training() -> None:
    """Each by its own column; an empty one is what stood in for it; numbers are taken as they are."""
    found = fit(request_of(_words(("Rom", "L"), ("Bern", "S"), ("", "M"))), WORDS)
    assert found["categories"].dtype == np.int64
    assert found["categories"].tolist() == [[1, 0], [0, 2], [1, 1]]
    numbers = {"categories": np.array([[1, 2]], np.int64)}
    assert fit(request_of(numbers), WORDS)["categories"] is numbers["categories"]


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (
            _words(("Bern", "L"), ("Oslo", "L")),
            "row 1 of input 'categories': 'city' is 'Oslo', a word that training did not have; known: 'Bern', 'Rom'",
        ),
        (_words(("Bern", "")), "row 0 of input 'categories': 'size' is empty"),
        ({"categories": np.array([[b"Bern"]], object)}, "or BYTES with the words of its categories"),
        ({"categories": np.array([[b"\xff", b"L"]], object)}, "is not UTF-8"),
    ],
)
def test_words_that_training_did_not_have_are_refused_by_name(inputs: Arrays, said: str) -> None:
    """The refusal names row, column and word, and lists the known ones."""
    with pytest.raises(BadRequest, match=said):
        fit(request_of(inputs), WORDS)

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.artifacts.dtypes import Arrays
from stoker.errors import RunFailed
from stoker.predicting.batched_inference import PredictionModel, RowOutputs, answer
from stoker.predicting.column_mapping import inputs_of, most_rows
from stoker.predicting.input_conversion import Filled, numbers
from stoker.records import TensorSpec
from tests.predicting.builders import manifest, summing, sums

ROWS = st.lists(st.lists(st.integers(-20, 20), min_size=1, max_size=6), max_size=20)


def _answers(rows: list[list[int]], batch_rows: int = 4, pad: float | None = 0, run: Any = sums) -> RowOutputs:
    model = summing(batch_rows, pad=pad)
    samples = numbers(rows, model.inputs[0], allow_nan=False)
    return answer(Filled({"ids": samples}), len(rows), model, run)


@given(ROWS, st.integers(1, 5), st.sampled_from([0, None]))
def test_every_row_gets_the_answer_it_gets_alone(rows: list[list[int]], batch_rows: int, pad: float | None) -> None:
    """In any batch, padded or not, among rows that fail: the sum and the doubles of the row itself, in its order."""
    found = _answers(rows, batch_rows, pad)
    good = [row for row, ids in enumerate(rows) if 13 not in ids]
    assert found.rows == good
    assert [int(value) for value in found.outputs["sum"]] == [sum(rows[row]) for row in good]
    assert [value.tolist() for value in found.outputs["twice"]] == [[2 * one for one in rows[row]] for row in good]


@given(ROWS)
def test_a_row_the_engine_fails_on_is_bad_alone(rows: list[list[int]]) -> None:
    """A failing batch is halved until the rows at fault are found; the reason is the engine's first line."""
    found = _answers(rows)
    assert found.bad == {row: ("", "cannot be computed: thirteen") for row, ids in enumerate(rows) if 13 in ids}


def test_padding_is_counted() -> None:
    """Two rows of one and three tokens in one batch: two of six elements are padding."""
    work = _answers([[1], [1, 2, 3]]).work
    assert (work.num_batches, work.num_rows, work.num_elements, work.num_padding) == (1, 2, 6, 2)


@pytest.mark.parametrize(
    "spoil", [lambda out: out.pop("sum"), lambda out: out.update(sum=out["sum"][:1])], ids=["absent", "short"]
)
def test_outputs_that_are_not_the_manifests_end_the_job(spoil: Any) -> None:
    """An engine that gives too little is an error, not a shifted answer."""

    def run(inputs: Any) -> Any:
        outputs = sums(inputs)
        spoil(outputs)
        return outputs

    with pytest.raises(RunFailed, match="output sum"):
        _answers([[1], [2]], run=run)


def test_what_is_told_after_a_batch_may_end_the_work() -> None:
    """Stopping is noticed after each batch."""
    seen = []

    def stop(rows: int) -> None:
        seen.append(rows)
        raise KeyboardInterrupt

    model = summing(2)
    samples = numbers([[1], [2], [3]], model.inputs[0], allow_nan=False)
    with pytest.raises(KeyboardInterrupt):
        answer(Filled({"ids": samples}), 3, model, sums, stop)
    assert seen == [2]


def test_a_model_without_a_batch_dimension_gets_row_by_row() -> None:
    """Where samples cannot be stacked, each is run alone and its outputs are put together."""
    spec = TensorSpec(name="x", datatype="FP32", shape=(1, 2))
    found = manifest([spec], [TensorSpec(name="y", datatype="FP32", shape=(1,))])
    shapes = []

    def run(inputs: Arrays) -> Arrays:
        shapes.append(inputs["x"].shape)
        return {"y": inputs["x"].sum(axis=1)}

    model = PredictionModel(found, inputs_of(found), most_rows(found) or 0)
    samples = numbers([[1.0, 2.0], [3.0, 4.0]], model.inputs[0], allow_nan=False)
    answers = answer(Filled({"x": samples}), 2, model, run)
    assert shapes == [(1, 2)] * 2
    assert np.asarray(answers.outputs["y"]).tolist() == [[3.0], [7.0]]

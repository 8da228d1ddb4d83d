"""Rows of a search: dealt out, held against the signature, cut to their own length."""

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.compressing.rows import (
    EvaluationData,
    EvaluationRows,
    batches,
    check_fit,
    cut_to,
    read_rows,
    row_lengths,
    split_rows,
)
from stoker.errors import BadJob
from stoker.records import Manifest
from stoker.testing.tiny_models import tiny_artifact, tiny_inputs


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """The signature of a model of tokens."""
    return tiny_artifact(tmp_path_factory.mktemp("models"), kind="tokens").manifest


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """The signature of a model of numbers."""
    return tiny_artifact(tmp_path_factory.mktemp("models")).manifest


def numbered(count: int) -> EvaluationRows:
    """Rows that know their number."""
    return EvaluationRows({"x": np.arange(count, dtype=np.float32)[:, None]}, np.arange(count))


@given(st.integers(12, 300), st.integers(0, 5), st.booleans())
def test_no_row_has_two_uses(count: int, seed: int, has_training: bool) -> None:
    """Parts are disjoint, all rows are dealt out, and the same seed gives the same parts."""
    training = numbered(50) if has_training else None
    found = split_rows(training, numbered(count), seed=seed, calibration=30)
    again = split_rows(training, numbered(count), seed=seed, calibration=30)
    parts = [found.selection, found.acceptance, *([] if has_training else [found.calibration])]
    every = np.concatenate([part.targets for part in parts])
    assert sorted(every) == list(range(count))
    assert np.array_equal(found.acceptance.targets, again.acceptance.targets)


def test_a_handful_of_rows_is_refused() -> None:
    """Nothing can be chosen by one row and accepted by another."""
    with pytest.raises(BadJob, match="3 rows are too few"):
        split_rows(None, numbered(3), seed=0, calibration=10)


def test_numbers_that_are_not_finite_are_for_models_that_take_them(numbers: Manifest) -> None:
    """A model of a table with missing numbers takes NaN; others are told how to say so."""
    rows = EvaluationRows({"x": np.full((4, 8), np.nan, np.float32)})
    assert np.isnan(check_fit(rows, numbers, "rows.npz", allow_nan=True).inputs["x"]).all()
    with pytest.raises(BadJob) as raised:
        check_fit(rows, numbers, "rows.npz")
    assert "allow_nan" in str(raised.value.remedy)


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ({"z": np.zeros((4, 8), np.float32)}, "the model takes x, the data has z"),
        ({"x": np.zeros((4, 7), np.float32)}, r"shape \[4, 7\], the model takes \['batch', 8\]"),
        ({"x": np.zeros((4, 8), complex)}, "complex128, the model takes FP32"),
        ({"x": np.full((4, 8), np.nan, np.float32)}, "not finite"),
        ({"x": np.zeros((5, 8), np.float32)}, "different numbers of rows: 4, 5"),
    ],
)
def test_data_that_does_not_fit_is_refused(numbers: Manifest, inputs: dict, says: str) -> None:
    """Each misfit is named with what was found and what is wanted."""
    with pytest.raises(BadJob, match=says):
        check_fit(EvaluationRows(inputs, np.zeros(4)), numbers, "rows.npz")


def test_whole_numbers_do_not_wrap(numbers: Manifest) -> None:
    """Those that a shorter type holds are taken; another would become a different number."""
    spec = dataclasses.replace(numbers.inputs[0], datatype="INT32")
    wanted = dataclasses.replace(numbers, inputs=(spec,))
    assert check_fit(EvaluationRows({"x": np.full((2, 8), 7)}), wanted, "rows.npz").inputs["x"].dtype == np.int32
    with pytest.raises(BadJob, match="x has numbers that INT32 cannot hold"):
        check_fit(EvaluationRows({"x": np.full((2, 8), 2**31)}), wanted, "rows.npz")


@pytest.mark.parametrize("kind", [".npz", ".parquet"])
def test_images_of_bytes_are_read_from_either_kind_of_file(kind: str, tmp_path: Path) -> None:
    """A table gives whole numbers as int64: those that are bytes are taken, others are refused, none wraps."""
    manifest = tiny_artifact(tmp_path, kind="images").manifest
    manifest = dataclasses.replace(manifest, inputs=(dataclasses.replace(manifest.inputs[0], datatype="UINT8"),))
    images = np.arange(4 * 64).reshape(4, 1, 8, 8)
    for array, fits in ((images, True), (images + 1, False), (images - 1, False)):
        path = tmp_path / f"rows{kind}"
        if kind == ".npz":
            np.savez(path, image=array, target=np.arange(4))
        else:
            pq.write_table(pa.table({"image": array.tolist(), "target": np.arange(4)}), path)
        rows = read_rows(path, manifest)
        if fits:
            found = check_fit(rows, manifest, path.name)
            assert found.inputs["image"].dtype == np.uint8
            assert (found.inputs["image"] == images).all()
            assert np.array_equal(found.targets, np.arange(4))
        else:
            with pytest.raises(BadJob, match="image has numbers that UINT8 cannot hold"):
                check_fit(rows, manifest, path.name)


def test_doubles_stand_for_floats(numbers: Manifest) -> None:
    """Data in float64 becomes what the model takes."""
    found = check_fit(EvaluationRows({"x": np.ones((2, 8))}), numbers, "rows.npz")
    assert found.inputs["x"].dtype == np.float32


def test_batches_are_cut_to_their_longest_row(tokens: Manifest) -> None:
    """Rows of like length share a batch; filling beyond the longest is not computed."""
    ids = np.zeros((5, 9), np.int64)
    for row, length in enumerate((7, 2, 9, 3, 1)):
        ids[row, :length] = 1
    rows = EvaluationRows({"input_ids": ids, "attention_mask": (ids > 0).astype(np.int64)})
    assert row_lengths(rows, tokens).tolist() == [7, 2, 9, 3, 1]
    found = [(chosen.tolist(), inputs["input_ids"].shape) for chosen, inputs in batches(rows, tokens, 2)]
    assert found == [([4, 1], (2, 2)), ([3, 0], (2, 7)), ([2], (1, 9))]


def test_an_id_that_is_masked_in_is_no_filling(tokens: Manifest) -> None:
    """A place counts as filled up only where every input holds its pad: id 0 with mask 1 is a token."""
    rows = EvaluationRows({"input_ids": np.array([[3, 0, 0]]), "attention_mask": np.array([[1, 1, 0]])})
    assert row_lengths(rows, tokens).tolist() == [2]


def test_nothing_is_cut_below_the_least_size(tokens: Manifest) -> None:
    """A dimension keeps the least size that the manifest names."""
    low = dataclasses.replace(tokens, dims=(dataclasses.replace(tokens.dims[0], low=4),))
    assert cut_to(tiny_inputs("tokens", rows=2, tokens=6), low, 2)["input_ids"].shape == (2, 4)


@pytest.mark.parametrize(("is_held_out", "acceptance"), [(True, 70 + 12 + 20), (False, 70 + 12)])
def test_rows_that_other_uses_leave_over_accept(is_held_out: bool, acceptance: int) -> None:
    """Those of selection and, where the model was not trained on them, of calibration; none has two uses."""
    numbers = {
        name: EvaluationRows({"x": np.arange(start, stop)}, np.arange(start, stop))
        for name, start, stop in (("calibration", 0, 30), ("selection", 30, 62), ("acceptance", 62, 132))
    }
    material = EvaluationData(**numbers, seed=0, is_held_out=is_held_out)
    few = material.limited(selection=20, acceptance=1000, calibration=10)
    assert (len(few.calibration), len(few.selection), len(few.acceptance)) == (10, 20, acceptance)
    used = np.concatenate([part.inputs["x"] for part in (few.calibration, few.selection, few.acceptance)])
    assert len(set(used.tolist())) == len(used)
    assert isinstance(few.acceptance.targets, np.ndarray)
    assert (few.acceptance.targets == few.acceptance.inputs["x"]).all()
    assert len(material.limited(selection=20, acceptance=75, calibration=10).acceptance) == 75

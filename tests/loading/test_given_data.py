"""Data as users give them: lists that were meant as columns, and types that PyTorch does not compute with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import stoker
from stoker.errors import BadJob
from stoker.loading.dataset_adapters import as_samples

ROWS = np.arange(3)


@pytest.mark.parametrize(
    "given", [([[1.0, 2.0]] * 64, [0, 1] * 32), ([[1.0]] * 64, [[2.0]] * 64, [0.5] * 64)], ids=["two", "three"]
)
def test_lists_beside_each_other_are_no_arrays(given: tuple[list[object], ...]) -> None:
    """They were taken for so many samples, and reported in a line of thousands of shapes."""
    with pytest.raises(BadJob, match=rf"data is a tuple of {len(given)} lists of 64: a list") as told:
        as_samples(given, what="data")
    assert "torch.tensor(inputs)" in str(told.value.remedy)
    assert len(str(told.value)) < 400


class DataFrame:
    """As that of pandas: columns by name, and numbers by a method."""

    __module__ = "pandas"

    def __len__(self) -> int:
        return 3

    def __getitem__(self, name: str) -> list[float]:
        return {"age": [1.0, 2.0, 3.0]}[name]

    def to_numpy(self) -> np.ndarray:
        """The numbers."""
        return np.arange(3.0)


@pytest.mark.parametrize(
    "given", [DataFrame(), (DataFrame(), ROWS), {"x": DataFrame(), "y": ROWS}], ids=["alone", "tuple", "dict"]
)
def test_a_frame_comes_with_what_to_give_instead(given: object) -> None:
    """It was a dataset whose sample 0 is no column, one sample of two, or a KeyError."""
    with pytest.raises(BadJob, match="data has a DataFrame of pandas, wanted arrays") as told:
        as_samples(given, what="data")
    assert "to_numpy('float32')" in str(told.value.remedy)


def test_lists_of_samples_stay_samples() -> None:
    """A list of them, or a tuple whose lists are of different lengths."""
    assert as_samples([[1.0, 2.0], [3.0, 4.0]], what="data").fetch(np.arange(2), 0)[0].tolist() == [1.0, 3.0]
    assert len(as_samples(([1.0, 2.0], [3.0]), what="data")) == 2


def test_samples_that_hold_unlike_many_numbers_are_told_in_a_line() -> None:
    """How many, and not which."""
    with pytest.raises(BadJob, match=r"samples 0 and 1 differ in how much they hold: 500 and 499 numbers") as told:
        as_samples([[0.0] * 500, [0.0] * 499], what="data").fetch(np.arange(2), 0)
    assert len(str(told.value)) < 200


@pytest.mark.parametrize(("given", "wanted"), [("uint16", "int32"), ("uint32", "int64"), ("uint64", "int64")])
@pytest.mark.parametrize("kind", ["array", "tensor"])
def test_wide_unsigned_numbers_become_signed_ones(given: str, wanted: str, kind: str) -> None:
    """Exactly: the largest of each stays what it is; PyTorch has next to no operations for the unsigned ones."""
    largest = min(np.iinfo(given).max, np.iinfo("int64").max)
    values = np.array([[0, 1], [2, largest], [3, 4]], dtype=given)
    data = values if kind == "array" else torch.from_numpy(values)
    inputs, _ = as_samples((data, torch.arange(3)), what="data").fetch(ROWS, 0)
    assert inputs.dtype is getattr(torch, wanted)
    assert inputs.tolist() == values.tolist()


def test_bytes_stay_bytes() -> None:
    """PyTorch computes with those."""
    inputs, _ = as_samples((np.zeros((3, 2), np.uint8), torch.arange(3)), what="data").fetch(ROWS, 0)
    assert inputs.dtype is torch.uint8


def test_numbers_that_no_signed_type_holds_are_refused() -> None:
    """Rather than turned negative."""
    with pytest.raises(BadJob, match=r"data\[0\] is uint64 with values up to 1\.84e\+19, which int64 does not hold"):
        as_samples((np.array([2**64 - 1], np.uint64), torch.arange(1)), what="data")


def test_masked_values_are_not_taken_for_what_lies_under_the_mask() -> None:
    """A value that is marked as missing is not learned from; an array of which nothing is masked is an array."""
    values = np.ma.masked_array([[1.0], [-999.0]], mask=[[False], [True]])
    with pytest.raises(BadJob, match=r"data\[0\] is an array with masked values"):
        as_samples((values, np.zeros(2)), what="data")
    assert len(as_samples((np.ma.masked_array([[1.0], [2.0]]), np.zeros(2)), what="data")) == 2


def test_a_mapped_file_is_not_read_into_memory_to_be_widened(tmp_path: Path) -> None:
    """It may be larger than memory; the remedy is a dataset."""
    mapped = np.memmap(tmp_path / "x.bin", np.uint16, "w+", shape=(3, 2))
    with pytest.raises(BadJob, match=r"data\[0\] is a mapped file of uint16") as told:
        as_samples((mapped, torch.arange(3)), what="data")
    assert "__getitem__" in str(told.value.remedy)


@pytest.mark.parametrize(
    "given",
    [(torch.zeros(3, 2), torch.zeros(3)), {"x": np.zeros((3, 2))}, torch.zeros(3), stoker.data.digits()[0]],
    ids=["tuple", "dict", "tensor", "of stoker.data"],
)
def test_arrays_with_a_collate_function_are_refused(given: object) -> None:
    """Rows are taken all at once: it would never be called."""
    with pytest.raises(
        BadJob, match=r"stoker.Fields\(collate=…\) makes batches of single samples, and valid are arrays"
    ):
        as_samples(given, what="valid", collate=list)

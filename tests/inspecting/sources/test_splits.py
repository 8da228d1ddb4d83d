from __future__ import annotations

import pytest

from stoker.inspecting.findings import AGAINST, are_splits, rank, split_of


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train", "train"),
        ("Training", "train"),
        ("cifar-val", "valid"),
        ("dev_0001", "valid"),
        ("x_test", "test"),
        ("t10k-images", "test"),
        ("contest", ""),
        ("trainer", ""),
        ("", ""),
    ],
)
def test_the_split_is_told_by_a_whole_word(name: str, split: str) -> None:
    """A word that merely contains the name of a split says nothing."""
    assert split_of(name) == split


def test_folders_are_splits_only_if_all_are() -> None:
    """A class called `test` among other classes is a class."""
    assert are_splits(["train", "val"])
    assert are_splits(["train"])
    assert not are_splits(["test", "cat", "dog"])
    assert not are_splits(["test"])
    assert not are_splits([])


def test_what_measures_keeps_its_samples() -> None:
    """Training gives way to validation, validation to test, and all to another set."""
    assert rank("train") == rank("") < rank("valid") < rank("test") < rank(AGAINST)

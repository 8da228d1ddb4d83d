"""What identifies a dataset to be packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

import stoker
from stoker.data.packed_source import identity_of


def rows(changed: int | None = None) -> torch.Tensor:
    """A thousand rows, one of which may be another."""
    made = torch.zeros(1000, 4)
    if changed is not None:
        made[changed] = 1
    return made


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((rows(),), (rows(501),)),
        ({"x": rows().numpy()}, {"x": rows(501).numpy()}),
        (TensorDataset(rows()), TensorDataset(rows(501))),
        (Subset(TensorDataset(rows()), [1, 2]), Subset(TensorDataset(rows()), [1, 3])),
        (Subset(TensorDataset(rows()), [1, 2]), Subset(TensorDataset(rows(501)), [1, 2])),
    ],
    ids=["tuple", "dict", "tensors", "indices", "within"],
)
def test_any_row_in_memory_counts(one: Any, other: Any) -> None:
    """Whether or not it is among the samples that are looked at."""
    assert identity_of(one) == identity_of(one)
    assert identity_of(one) != identity_of(other)


def test_a_mapped_file_counts_by_its_time(tmp_path: Path) -> None:
    """Since a row that is not looked at may have been written."""
    np.save(tmp_path / "x.npy", rows().repeat(10, 1).numpy())
    first = identity_of((np.load(tmp_path / "x.npy", mmap_mode="r"),))
    assert identity_of((np.load(tmp_path / "x.npy", mmap_mode="r"),)) == first
    np.save(tmp_path / "x.npy", rows(501).repeat(10, 1).numpy())
    assert identity_of((np.load(tmp_path / "x.npy", mmap_mode="r"),)) != first


def test_other_arrays_are_not_read_from_what_was_packed(tmp_path: Path) -> None:
    """In one folder, a changed row in the middle is packed again."""
    for changed in (None, 501):
        source = stoker.data.packed((rows(changed), torch.arange(1000)), tmp_path / "p", tell=lambda _: None)
        assert torch.equal(source.sample(501)[0], rows(changed)[501])

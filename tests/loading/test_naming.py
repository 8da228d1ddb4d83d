"""What data call their samples, wherever those come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import stoker
from stoker.jobs import Holdout
from stoker.loading.dataset_adapters import as_samples
from stoker.loading.datasets import data_indices, datasets_of, sample_name
from stoker.loading.samples import hold_out
from tests.data.files.making import folder_source
from tests.stepping.models import make_job


def test_samples_of_files_are_called_by_them(tmp_path: Path) -> None:
    """Also those that are held out, which are counted again."""
    source = folder_source(tmp_path)
    samples = as_samples(source, what="data")
    assert sample_name(samples, 2) == source.sample_id(2)
    _, aside = hold_out(samples, Holdout(0.3))
    assert [sample_name(aside, at) for at in range(len(aside))] == [source.sample_id(int(at)) for at in aside.indices]


def test_rows_of_tables_have_names_and_arrays_have_none(tmp_path: Path) -> None:
    """A file and the row in it; nothing at all."""
    (tmp_path / "t.csv").write_text("a,y\n1,0\n2,1\n")
    table = as_samples(stoker.data.csv(tmp_path / "t.csv", target="y"), what="data")
    assert sample_name(table, 1) == "t.csv:1"
    assert sample_name(as_samples((torch.zeros(3, 2), torch.zeros(3)), what="data"), 1) == ""


WAYS: dict[str, dict[str, Any]] = {
    "held out": {},
    "drawn": {"sampling": stoker.sampling.weighted(np.arange(40) % 3)},
    "stratified": {"sampling": stoker.sampling.stratified(targets=np.arange(40) % 2)},
    "bucketed": {"sampling": stoker.lengths.bucketed(length_of=np.arange(40) % 5 + 1)},
    "packed": {"sampling": stoker.lengths.packed(12, length_of=np.full(40, 2))},
    "by tokens": {"batch": stoker.tokens(8, length_of=np.full(40, 2))},
}


@pytest.mark.parametrize("way", WAYS)
def test_samples_are_found_again_in_the_data_that_was_given(way: str) -> None:
    """However an epoch takes what a holdout leaves of it."""
    tokens = torch.arange(1, 41)[:, None].expand(40, 2)  # from 1: rows are padded with 0
    job = make_job(lambda: nn.Linear(1, 1), data=(tokens, tokens % 2), **{"valid": stoker.holdout(0.5), **WAYS[way]})
    samples, rows = datasets_of(job).train, np.array([3, 0])
    taken = torch.cat([item[0].flatten() for item in samples.items(rows, 1)])
    assert (data_indices(samples, rows, 1) + 1).tolist() == taken[taken > 0][::2].tolist()

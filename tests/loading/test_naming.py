"""What data call their samples, wherever those come from."""

from __future__ import annotations

from pathlib import Path

import torch

import stoker
from stoker.jobs import Holdout
from stoker.loading import as_samples, hold_out
from stoker.loading.naming import sample_name
from tests.data.files.making import folder_source


def test_samples_of_files_are_called_by_them(tmp_path: Path) -> None:
    """Also those that are held out, which are counted anew."""
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

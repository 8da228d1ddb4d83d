"""Batches copied to a GPU one ahead, and data that lie there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stoker.errors import BadJob
from stoker.jobs import holdout
from stoker.loading.batches import copied_ahead
from stoker.loading.dataset_adapters import as_samples
from stoker.loading.samples import hold_out

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none")


def _fetched(count: int):
    for number in range(count):
        yield number, (torch.full((4,), number), {"target": torch.full((2,), -number)})


def test_without_a_gpu_batches_are_given_back_as_they_are() -> None:
    """The same generator: nothing is fetched before it is asked for."""
    fetched = _fetched(3)
    assert copied_ahead(fetched, torch.device("cpu")) is fetched


@pytest.mark.gpu
@on_gpu
def test_every_batch_arrives_whole_and_in_order() -> None:
    """While the host fills the next one, and its memory is used again."""
    arrived = list(copied_ahead(_fetched(20), torch.device("cuda:0")))
    assert [place for place, _ in arrived] == list(range(20))
    for number, (inputs, fields) in arrived:
        assert inputs.is_cuda
        assert inputs.tolist() == [number] * 4
        assert fields["target"].tolist() == [-number] * 2


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=[pytest.mark.gpu, on_gpu])])
def test_arrays_on_the_device_give_the_same_batches(device: str) -> None:
    """A part of them too: rows are those of the host's arrays."""
    whole = as_samples((torch.arange(60).view(20, 3), torch.arange(20)), what="data")
    for samples in (whole, hold_out(whole, holdout(0.25))[0]):
        indices = np.array([3, 0, 11])
        for mine, theirs in zip(
            samples.on(torch.device(device)).fetch(indices, 0), samples.fetch(indices, 0), strict=True
        ):
            assert mine.device == torch.device(device)
            assert torch.equal(mine.cpu(), theirs)
        assert samples.num_bytes == 80 * 8


def test_items_cannot_lie_on_a_device() -> None:
    """A dataset that is fetched item by item says so, with the loaders that do."""
    items = as_samples([(torch.zeros(2), 0)] * 3, what="data")
    assert items.num_bytes is None
    with pytest.raises(BadJob, match="item by item") as problem:
        items.on(torch.device("cpu"))
    assert "inline" in str(problem.value.remedy)

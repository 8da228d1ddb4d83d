"""Rows of the job behind a model."""

from typing import Any

import pytest
import torch
from torch import nn

import stoker
from stoker.compressing.source_job import _rows
from stoker.exporting import job_inputs
from stoker.loading.samples import ItemSamples


class Stored(ItemSamples):
    """Samples `[i, i]` with the target `i`; prepared, they are halves. What is read and prepared is kept."""

    def __init__(self, count: int) -> None:
        items = [(torch.tensor([index, index]), torch.tensor(index)) for index in range(count)]
        super().__init__(items, None, seed=0)
        self.read_items, self.prepared_rows = list[int](), list[int]()

    def read(self, index: int) -> Any:
        self.read_items.append(index)
        return super().read(index)

    def prepare(self, content: Any) -> Any:
        self.prepared_rows.append(len(content[0]))
        return content[0] / 2, content[1]


@pytest.mark.parametrize("is_prepared", [False, True], ids=["stored", "prepared"])
def test_samples_that_are_read_are_read_once_and_prepared_in_pieces(is_prepared: bool) -> None:
    """20,000 images are decoded once: twice takes twice as long, and as floats all at once no memory holds them."""
    samples = Stored(2500)
    job = stoker.Job(
        model=lambda: nn.Linear(2, 1), data=samples, loss="mse", optimizer=stoker.SGD(lr=0.1), batch=2,
        until=stoker.epochs(1),
    )  # fmt: skip
    inputs = job_inputs(job, nn.Linear(2, 1), samples)
    samples.read_items.clear()
    found = _rows(inputs.prepared() if is_prepared else inputs, samples, 2100, seed=0)
    assert sorted(set(samples.read_items)) == sorted(samples.read_items)
    assert max(samples.prepared_rows) <= 1024
    (values,) = found.inputs.values()
    assert isinstance(found.targets, type(values))
    assert found.targets.tolist() == samples.read_items
    assert (values[:, 1] * (2 if is_prepared else 1)).tolist() == samples.read_items

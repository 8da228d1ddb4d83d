from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import stoker
from stoker.errors import BadJob
from stoker.loading.dataset_adapters import as_samples
from stoker.loading.datasets import datasets_of
from stoker.loading.lengths import BucketedOrder, lengths_of
from stoker.loading.order import EpochOrder
from tests.loading.data import contents, source_of

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=90)


class Words(torch.utils.data.Dataset):
    """Sample i is as long as the i-th length, and holds i in every place."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Any:
        return torch.full((self.lengths[index],), float(index)), index


def job_of(sizes: list[int], **changes: Any) -> stoker.Job:
    """A job on words of these lengths, bucketed."""
    settings_: dict[str, Any] = {
        "model": lambda: nn.Linear(1, 1),
        "data": Words(sizes),
        "loss": "mse",
        "optimizer": stoker.SGD(lr=0.1),
        "batch": 4,
        "until": stoker.epochs(1),
        "sampling": stoker.lengths.bucketed(window=3),
        "fields": stoker.Fields(collate=stoker.lengths.padded(-1)),
    }
    return stoker.Job(**(settings_ | changes))


def by_hand(lengths: np.ndarray, batch: int, window: int, seed: int, epoch: int) -> list[set[int]]:
    """The batches of an epoch as sets, but for the order of whole ones within a window."""
    order = EpochOrder(len(lengths), seed).indices(epoch, 0, len(lengths))
    found = []
    for start in range(0, len(order), window * batch):
        part = order[start : start + window * batch]
        found.append(set(part.tolist()))
    return found


@settings(max_examples=80, deadline=None)
@given(LENGTHS, st.integers(1, 9), st.integers(1, 6), st.integers(0, 3))
def test_an_epoch_has_every_sample_once_in_batches_of_like_length(
    lengths: list[int], batch: int, window: int, epoch: int
) -> None:
    """Within a window no batch has a sample whose length is strictly between those of another batch."""
    array = np.array(lengths)
    order = BucketedOrder(array, batch, window, seed=3).indices(epoch, 0, len(lengths))
    assert sorted(order.tolist()) == list(range(len(lengths)))
    for number, expected in enumerate(by_hand(array, batch, window, 3, epoch)):
        part = order[number * window * batch :][: window * batch]
        assert set(part.tolist()) == expected
        spans = [(array[one].min(), array[one].max()) for one in np.split(part, range(batch, len(part), batch))]
        spans.sort()
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 9), st.integers(1, 6), st.data())
def test_any_stretch_of_an_epoch_is_that_of_the_whole(
    lengths: list[int], batch: int, window: int, data: st.DataObject
) -> None:
    """A run that is resumed goes on in the order that it began."""
    array = np.array(lengths)
    whole = BucketedOrder(array, batch, window, seed=3).indices(1, 0, len(lengths)).tolist()
    order = BucketedOrder(array, batch, window, seed=3)
    for _ in range(3):
        start = data.draw(st.integers(0, len(lengths)))
        stop = data.draw(st.integers(start, len(lengths)))
        assert order.indices(1, start, stop).tolist() == whole[start:stop]
        order.indices(0, 0, 1)


def test_batches_of_a_window_come_in_another_order_in_each_epoch() -> None:
    """Not from short to long, which would be a curriculum; and what is left over is not always the longest."""
    lengths = np.arange(1, 54)
    orders = [BucketedOrder(lengths, 5, 20, seed=0).indices(epoch, 0, 53) for epoch in range(12)]
    firsts = [[int(lengths[order[at]]) for at in range(0, 50, 5)] for order in orders]
    assert len({tuple(first) for first in firsts}) == 12
    assert all(first != sorted(first) for first in firsts)
    assert len({int(order[-1]) for order in orders}) > 3


def test_less_is_padded_and_every_sample_is_whole() -> None:
    """Of lengths from 1 to 60, a fifth of the padding or less is left; each batch has its samples and nothing else."""
    lengths = np.random.default_rng(0).integers(1, 61, 400).tolist()
    padding = {}
    for name, setting in (("plain", None), ("bucketed", stoker.lengths.bucketed(window=25))):
        job = job_of(lengths, sampling=setting)
        data = datasets_of(job)
        batches = contents(source_of(data.train, 4), 0, 100)
        padding[name] = sum(int((inputs < 0).sum()) for inputs, _ in batches)
        for inputs, indices in batches:
            assert (inputs >= 0).sum(1).tolist() == [lengths[index] for index in indices.tolist()]
            assert all(set(row[row >= 0].tolist()) == {float(i)} for row, i in zip(inputs, indices, strict=True))
    assert padding["bucketed"] < padding["plain"] / 5


def test_lengths_are_those_of_the_samples_that_a_holdout_leaves() -> None:
    """Given for all of the data, counted for the training samples."""
    lengths = list(range(1, 41))
    for given_lengths in (None, lengths, lambda sample: len(sample[0])):
        setting = stoker.lengths.bucketed(length_of=given_lengths, window=100)
        data = datasets_of(job_of(lengths, sampling=setting, valid=stoker.holdout(0.2)))
        order = data.train.order(0).indices(0, 0, 32)
        inputs = [data.train.items(np.array([index]), 0)[0][0] for index in order]
        found = np.array([len(one) for one in inputs]).reshape(8, 4)
        assert all(sorted(row) == list(row) for row in found.tolist())
        assert len(data.valid) == 8


@pytest.mark.parametrize(
    ("length_of", "words"),
    [
        ([1, 2], "there are 2 lengths for 3 samples of data"),
        ([1.0, 2.0, 3.0], "the lengths of data are no whole numbers, but float64"),
        ([2, 0, 3], "sample 1 of data has a length of 0"),
        (lambda sample: sample[1], "sample 0 of data has a length of 0"),
    ],
)
def test_lengths_that_cannot_be_meant_are_said(length_of: Any, words: str) -> None:
    """Before training."""
    with pytest.raises(BadJob, match=words):
        datasets_of(job_of([3, 4, 5], sampling=stoker.lengths.bucketed(length_of=length_of)))


def test_a_sample_without_a_length_is_said() -> None:
    """A number is not long."""
    samples = as_samples([(1.0, 2), (2.0, 3)], what="data")
    with pytest.raises(BadJob, match="the first entry of a sample is a float, which has no length"):
        lengths_of(samples, None, "data")


def test_letters_are_no_tokens() -> None:
    """A text that stands before its tokens does not say how many there are."""
    samples = as_samples([{"text": "ten letters", "tokens": [1, 2]}], what="data", collate=list)
    with pytest.raises(BadJob, match="the first entry of a sample is a str, which has no length"):
        lengths_of(samples, None, "data")
    assert lengths_of(samples, lambda sample: len(sample["tokens"]), "data").tolist() == [2]


def test_the_order_is_the_one_it_always_was() -> None:
    """A run begun under one version of Stoker is continued by the next: these numbers never change."""
    lengths = np.array([5, 3, 8, 1, 9, 2, 7, 4, 6, 3, 2])
    assert BucketedOrder(lengths, 2, 3, seed=42).indices(1, 0, 11).tolist() == [8, 2, 9, 7, 3, 10, 5, 1, 0, 6, 4]

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import stoker
from stoker.errors import BadJob
from stoker.loading.batches import Split
from stoker.loading.datasets import datasets_of
from stoker.loading.lengths import PackedSamples, rows_of_lengths
from tests.loading.data import contents, source_of

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=60)


class Documents(torch.utils.data.Dataset):
    """Document i has tokens 100·i, 100·i + 1, … and as targets their negatives."""

    def __init__(self, lengths: list[int], *, as_dicts: bool = True) -> None:
        self.lengths, self.as_dicts = lengths, as_dicts

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Any:
        tokens = torch.arange(self.lengths[index]) + 100 * (index + 1)
        return {"input_ids": tokens, "labels": -tokens} if self.as_dicts else (tokens, -tokens)


def job_of(data: Any, into: int = 12, **changes: Any) -> stoker.Job:
    """A job on these documents, packed."""
    settings_: dict[str, Any] = {
        "model": lambda: nn.Linear(1, 1),
        "data": data,
        "loss": "token_cross_entropy",
        "optimizer": stoker.SGD(lr=0.1),
        "batch": 3,
        "until": stoker.epochs(1),
        "sampling": stoker.lengths.packed(into, pad=-1, ignored=-5),
    }
    return stoker.Job(**(settings_ | changes))


def packed(lengths: list[int], into: int = 12, **changes: Any) -> PackedSamples:
    """The packed training samples of a job on documents of these lengths."""
    train = datasets_of(job_of(Documents(lengths), into, **changes)).train
    assert isinstance(train, PackedSamples)
    return train


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(12, 30), st.integers(0, 3))
def test_an_epoch_has_every_document_once_whole_and_in_one_row(lengths: list[int], into: int, epoch: int) -> None:
    """Each row is its documents one after the other, numbered, with positions from 0, and then padding."""
    rows = packed(lengths, into)
    seen: list[int] = []
    for row in rows.items(np.arange(len(rows)), epoch):
        segments, tokens = row["segment_ids"], row["input_ids"]
        assert tokens.shape == (into,)
        for number in range(1, int(segments.max()) + 1):
            document = tokens[segments == number]
            index = int(document[0]) // 100 - 1
            seen.append(index)
            assert document.tolist() == [100 * (index + 1) + place for place in range(lengths[index])]
            assert row["labels"][segments == number].tolist() == (-document).tolist()
            assert row["position_ids"][segments == number].tolist() == list(range(lengths[index]))
        assert segments.tolist() == sorted(segments.tolist(), key=lambda number: number or math.inf)
        left = segments == 0
        assert set(tokens[left].tolist()) <= {-1}
        assert set(row["labels"][left].tolist()) <= {-5}
        assert set(row["position_ids"][left].tolist()) <= {0}
    assert sorted(seen) == list(range(len(lengths)))


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(12, 30))
def test_rows_are_few(lengths: list[int], into: int) -> None:
    """No more than 11/9 of the fewest possible and one, as is proved of best fit decreasing; and none is too full."""
    downwards = np.sort(np.array(lengths))[::-1]
    rows = rows_of_lengths(downwards, into)
    filled = np.bincount(rows, weights=downwards)
    assert filled.max() <= into
    assert len(filled) <= 11 / 9 * fewest(lengths, into) + 1


def fewest(lengths: list[int], into: int) -> int:
    """A number of rows that any packing needs."""
    large = sum(length > into / 2 for length in lengths)
    return max(large, math.ceil(sum(lengths) / into))


def test_documents_of_one_length_meet_others_in_each_epoch() -> None:
    """They are shared out again among the rows."""
    rows = packed([4] * 30)
    epochs = [{frozenset(rows.members(row, epoch).tolist()) for row in range(len(rows))} for epoch in range(2)]
    assert len(rows) == 10
    assert len(epochs[0] & epochs[1]) < 3
    assert rows.fill == 1


@settings(max_examples=25, deadline=None)
@given(LENGTHS, st.integers(1, 5), st.integers(0, 9), st.integers(1, 3))
def test_batches_of_rows_are_the_same_from_any_position_and_over_any_processes(
    lengths: list[int], batch: int, start: int, parts: int
) -> None:
    """Packing is computed from lengths, seed and epoch alone."""
    whole = contents(source_of(packed(lengths), batch), 0, start + 3)[start:]
    shares = []
    for part in range(parts):
        source = source_of(packed(lengths), batch)
        object.__setattr__(source, "split", Split(part, parts))
        shares.append(source.batches(source.extent.position(start), start + 3))
    for expected, *batches in zip(whole, *shares, strict=True):
        held = [one.cut(0, one.size)["input_ids"][: len(one.split.spans(one.whole_size)[0])] for one in batches]
        assert torch.equal(torch.cat(held), expected["input_ids"])


def test_tuples_get_positions_and_segments_before_their_target() -> None:
    """(tokens, targets) become (tokens, positions, segments, targets)."""
    train = datasets_of(job_of(Documents([5, 3, 2], as_dicts=False))).train
    (batch,) = contents(source_of(train, 3), 0, 1)
    tokens, positions, segments, targets = batch
    assert tokens.tolist() == [[100, 101, 102, 103, 104, 200, 201, 202, 300, 301, -1, -1]]
    assert positions.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 0, 0]]
    assert segments.tolist() == [[1] * 5 + [2] * 3 + [3] * 2 + [0] * 2]
    assert targets.tolist() == [[-token if token > 0 else -5 for token in tokens[0].tolist()]]


def test_what_fills_a_target_of_bytes_is_left_out_of_the_loss() -> None:
    """-100 does not become 156, which would be learned as a class; a row that is full is of the same type."""
    tokens = torch.tensor([[7, 255], [8, 9]], dtype=torch.uint8)
    for into in (3, 4):
        lengths = stoker.lengths.packed(into, length_of=[2, 2])
        (row, *_) = datasets_of(job_of((tokens, tokens), sampling=lengths)).train.items(np.array([0]), 0)
        assert row[-1].dtype == torch.int64
        assert row[-1].tolist()[2:3] == ([-100] if into == 3 else row[0].tolist()[2:3])


def test_padded_arrays_are_cut_to_the_lengths_that_are_given() -> None:
    """Data in memory are rectangles; what is beyond a sample's length is left out."""
    tokens = torch.arange(12).view(3, 4)
    data = {"x": tokens, "y": tokens + 50, "mask": torch.ones(3, 4, 2)}
    lengths = stoker.lengths.packed(8, length_of=[1, 4, 2])
    (row,) = datasets_of(job_of(data, sampling=lengths)).train.items(np.array([0]), 0)
    assert row["x"].tolist() == [4, 5, 6, 7, 8, 9, 0, 0]
    assert row["y"].tolist() == [54, 55, 56, 57, 58, 59, 50, -100]
    assert row["mask"].shape == (8, 2)


def test_lengths_of_padded_data_are_not_guessed_of_another_set() -> None:
    """Its padding would count as tokens, in every measure that chooses the best weights."""
    tokens = torch.arange(12).view(3, 4)
    listed = stoker.lengths.packed(8, length_of=[1, 4, 2])
    with pytest.raises(BadJob, match="whose samples are padded beyond; those of valid are unknown"):
        datasets_of(job_of((tokens, tokens), valid=(tokens, tokens), sampling=listed))
    asked = stoker.lengths.packed(8, length_of=lambda sample: int((sample[0] % 3 != 0).sum()))
    assert datasets_of(job_of((tokens, tokens), valid=(tokens, tokens), sampling=asked)).valid is not None


def test_samples_longer_than_they_were_said_to_be_are_not_cut() -> None:
    """Samples of different lengths hold no padding, so that a length too short would lose tokens silently."""
    train = datasets_of(job_of(Documents([5, 7, 6]), sampling=stoker.lengths.packed(12, length_of=[3, 3, 3]))).train
    with pytest.raises(BadJob, match="long, and a length of 3"):
        train.items(np.array([0]), 0)


def test_the_holdout_and_the_test_set_are_packed_as_well() -> None:
    """The model takes rows; the lengths of a set of its own are looked at again."""
    lengths = [1 + i % 7 for i in range(50)]
    given_lengths = stoker.lengths.packed(8, length_of=lengths)
    data = datasets_of(
        job_of(Documents(lengths), valid=stoker.holdout(0.2), test=Documents([3, 5]), sampling=given_lengths)
    )
    assert all(isinstance(part, PackedSamples) for part in (data.train, data.valid, data.test))
    held = [
        int(row["input_ids"][row["segment_ids"] == 1][0]) for row in data.valid.items(np.arange(len(data.valid)), 0)
    ]
    trained = [int(token) for row in data.train.items(np.arange(len(data.train)), 0) for token in row["input_ids"]]
    assert not set(held) & set(trained)
    assert len(data.test) == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": Documents([5, 40, 30])}, "2 of 3 samples of Documents are longer than a row of 12: sample 1 has"),
        ({"data": [torch.ones(3), torch.ones(2)]}, "is a list of 2 arrays"),
        ({"data": [(torch.ones(3), 1), (torch.ones(2), 0)]}, "entry 1 of sample 0 is of shape"),
        ({"data": [(torch.ones(3),)]}, "a sample of .* is a tuple; what is packed"),
        ({"data": [{"x": torch.ones(3), "y": torch.ones(2)}]}, "entry 'y' of sample 0 is of shape"),
        (
            {"data": Documents([3], as_dicts=False), "fields": stoker.Fields(target=1)},
            r"Fields\(target=1\) with packed rows",
        ),
    ],
)
def test_what_cannot_be_packed_is_said(changes: dict[str, Any], words: str) -> None:
    """With the sample and its length."""
    with pytest.raises(BadJob, match=words):
        datasets_of(job_of(**changes)).train.fetch(np.array([0]), 0)


def test_rows_are_those_they_always_were() -> None:
    """A run begun under one version of Stoker is continued by the next: these numbers never change."""
    rows = packed([3, 7, 2, 3, 9, 3, 4, 5])
    assert [rows.members(row, 2).tolist() for row in range(len(rows))] == [[4, 5], [1, 7], [6, 0, 3, 2]]

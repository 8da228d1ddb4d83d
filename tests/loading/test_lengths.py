from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import stoker
from stoker.errors import BadJob
from stoker.loading.datasets import datasets_of


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 5))
def test_a_padded_batch_has_each_sample_and_then_padding(lengths: list[int], multiple: int) -> None:
    """Up to the longest, rounded up; other entries are collated as always."""
    items = [{"x": torch.full((length, 2), float(length)), "id": length} for length in lengths]
    batch = stoker.lengths.padded(-1, multiple_of=multiple, mask="mask")(items)
    longest = -(-max(lengths) // multiple) * multiple
    assert batch["x"].shape == (len(lengths), longest, 2)
    assert batch["id"].tolist() == lengths
    assert batch["mask"].tolist() == [[1] * length + [0] * (longest - length) for length in lengths]
    for row, length in zip(batch["x"], lengths, strict=True):
        assert row[:length].unique().tolist() == [float(length)]
        assert set(row[length:].flatten().tolist()) <= {-1.0}


def test_each_entry_may_have_padding_of_its_own() -> None:
    """By key or by place; lists of numbers, of a tuple or alone, are padded like tensors."""
    by_key = stoker.lengths.padded({"y": -100})([{"x": [1, 2], "y": [1, 2]}, {"x": [3], "y": [4]}])
    assert by_key["x"].tolist() == [[1, 2], [3, 0]]
    assert by_key["y"].tolist() == [[1, 2], [4, -100]]
    inputs, targets = stoker.lengths.padded({1: -100})([([1, 2], [5, 6]), ([3], [7])])
    assert (inputs.tolist(), targets.tolist()) == ([[1, 2], [3, 0]], [[5, 6], [7, -100]])
    assert stoker.lengths.padded(9, to=3)([[1], [2, 3]]).tolist() == [[1, 9, 9], [2, 3, 9]]


@pytest.mark.parametrize(
    ("loss", "pad", "filled"),
    [
        ("token_cross_entropy", 0, -100),
        ("cross_entropy", 7, -100),
        ("token_cross_entropy", {"x": 7}, -100),
        (torch.nn.CrossEntropyLoss(ignore_index=3), 0, 3),
        ("token_cross_entropy", {"labels": 7}, 7),
        (F.cross_entropy, 0, -100),
        (functools.partial(F.cross_entropy, ignore_index=255), 0, 255),
        ("mse", 0, 0),
        ("binary_cross_entropy", 0, 0),
        (lambda output, target: output.mean(1), 7, 7),
    ],
)
def test_targets_are_padded_with_what_the_loss_ignores(loss: Any, pad: Any, filled: int) -> None:
    """Unless the user says otherwise; nothing is known of another loss, and other entries are as they were."""
    samples = [{"x": [1, 2], "labels": [1, 2]}, {"x": [3], "labels": [4]}]
    pairs = [tuple(sample.values()) for sample in samples]
    for data in (samples, pairs) if not isinstance(pad, dict) else (samples,):
        job = stoker.Job(
            model=object,
            data=data,
            loss=loss,
            optimizer=stoker.SGD(lr=0.1),
            batch=2,
            until=stoker.epochs(1),
            fields=stoker.Fields(collate=stoker.lengths.padded(pad)),
        )
        batch = datasets_of(job).train.fetch(np.arange(2), 0)
        inputs, targets = batch.values() if isinstance(batch, dict) else batch
        assert targets.tolist() == [[1, 2], [4, filled]]
        assert inputs.tolist() == [[1, 2], [3, pad.get("x", 0) if isinstance(pad, dict) else pad]]


@pytest.mark.parametrize("targets", [([0.5, 1.5], [2.5]), (1, 0)])
def test_targets_that_are_no_sequences_of_classes_are_left_as_they_are(targets: tuple[Any, Any]) -> None:
    """Numbers to learn, and one label for each sample."""
    data = [([1, 2], targets[0]), ([3], targets[1])]
    job = stoker.Job(
        model=object,
        data=data,
        loss="cross_entropy",
        optimizer=stoker.SGD(lr=0.1),
        batch=2,
        until=stoker.epochs(1),
        fields=stoker.Fields(collate=stoker.lengths.padded()),
    )
    assert -100 not in datasets_of(job).train.fetch(np.arange(2), 0)[1]
    alone = datasets_of(dataclasses.replace(job, data=[[1, 2], [3]])).train.fetch(np.arange(2), 0)
    assert alone.tolist() == [[1, 2], [3, 0]]


@pytest.mark.parametrize("inputs", ["tokens", ["tokens"], ["tokens", "kind"]])
def test_a_target_that_is_an_input_too_is_padded_like_one(inputs: Any) -> None:
    """An embedding has no row -100."""
    data = [{"tokens": [1, 2], "kind": 0}, {"tokens": [3], "kind": 1}]
    job = stoker.Job(
        model=object,
        data=data,
        loss="token_cross_entropy",
        optimizer=stoker.SGD(lr=0.1),
        batch=2,
        until=stoker.epochs(1),
        fields=stoker.Fields(inputs=inputs, target="tokens", collate=stoker.lengths.padded(7)),
    )
    assert datasets_of(job).train.fetch(np.arange(2), 0)["tokens"].tolist() == [[1, 2], [3, 7]]


def test_what_is_padded_stays_what_it_was() -> None:
    """Whatever comes first: whole numbers among fractions become floats, an empty list has no type."""
    assert stoker.lengths.padded()([[1, 2], [0.5]]).tolist() == [[1, 2], [0.5, 0]]
    tokens = stoker.lengths.padded(-1)([[], [3, 4]])
    assert (tokens.dtype, tokens.tolist()) == (torch.int64, [[-1, -1], [3, 4]])
    pairs = stoker.lengths.padded()([[], torch.ones(2, 2, dtype=torch.uint8)])
    assert (pairs.dtype, pairs.shape) == (torch.uint8, (2, 2, 2))


def test_bytes_are_padded_with_what_they_do_not_hold() -> None:
    """-100 among bytes is what a loss leaves out, and no class 156."""
    batch = stoker.lengths.padded(-100)(
        [torch.tensor([7, 255], dtype=torch.uint8), torch.tensor([9], dtype=torch.uint8)]
    )
    assert batch.tolist() == [[7, 255], [9, -100]]


def test_samples_that_differ_beyond_their_length_are_said() -> None:
    """One column is not repeated to make three."""
    with pytest.raises(ValueError, match=r"differ beyond their first dimension: \(1,\), \(3,\)"):
        stoker.lengths.padded()([torch.zeros(2, 3), torch.zeros(2, 1)])


def test_a_sample_longer_than_what_is_padded_to_is_said() -> None:
    """It is not cut."""
    with pytest.raises(ValueError, match="a sample is 3 long, and samples are padded to 2"):
        stoker.lengths.padded(to=2)([[1, 2, 3]])


@pytest.mark.parametrize(
    ("collate", "items", "words"),
    [
        (lambda: stoker.lengths.padded(to=0), [], r"padded\(to=…\) is a whole number"),
        (lambda: stoker.lengths.padded(multiple_of=1.5), [], r"padded\(multiple_of=…\) is a whole number"),
        (lambda: stoker.lengths.padded(mask="m"), [([1], 2)], "names an entry, and samples are no dicts"),
        (lambda: stoker.lengths.padded(mask="m"), [{"x": 1}], "no entry of a sample has a length"),
    ],
)
def test_what_cannot_be_padded_is_said(collate: Any, items: list[Any], words: str) -> None:
    """As errors of the job."""
    with pytest.raises(BadJob, match=words):
        collate()(items)


def test_a_mask_of_segments_keeps_samples_apart() -> None:
    """A token attends within its sample; causal, to itself and those before it."""
    segments = torch.tensor([[1, 1, 2, 0]])
    both, causal = (
        stoker.lengths.segment_mask(segments, causal=is_causal)[0, 0].int().tolist() for is_causal in (0, 1)
    )
    assert both == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    assert causal == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]

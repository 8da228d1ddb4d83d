from __future__ import annotations

import copy
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
from stoker.loading.dataset_adapters import as_samples
from stoker.loading.datasets import datasets_of
from stoker.loading.sampling import WeightedSamples
from tests.loading.data import Noisy, contents, source_of

CLASSES = st.lists(st.integers(0, 4), min_size=2, max_size=80)


def job_of(classes: Any, **changes: Any) -> stoker.Job:
    """A job whose sample i is (i, its class)."""
    classes = torch.as_tensor(classes)
    settings_: dict[str, Any] = {
        "model": lambda: nn.Linear(1, 9),
        "data": (torch.arange(float(len(classes)))[:, None], classes),
        "loss": "cross_entropy",
        "optimizer": stoker.SGD(lr=0.1),
        "batch": 8,
        "until": stoker.epochs(1),
        "seed": 5,
    }
    return stoker.Job(**(settings_ | changes))


def epoch_of(job: stoker.Job, epoch: int = 0) -> tuple[list[int], list[int]]:
    """The samples of an epoch in their order, and their classes."""
    train = datasets_of(job).train
    inputs, classes = train.fetch(train.order(job.seed).indices(epoch, 0, len(train)), epoch)
    return inputs[:, 0].long().tolist(), classes.tolist()


def test_balanced_draws_every_class_alike() -> None:
    """A rare class comes as often as the others, to within five deviations, and each of its samples equally often."""
    classes = [0] * 4800 + [1] * 150 + [2] * 50
    drawn, found = epoch_of(job_of(classes, sampling=stoker.sampling.balanced(num_samples=9000)))
    counts = np.bincount(found)
    assert len(drawn) == 9000
    assert np.abs(counts - 3000).max() < 5 * np.sqrt(9000 * 2 / 9)
    rarest = np.bincount(drawn, minlength=5000)[4950:]
    assert abs(((rarest - 60) ** 2 / 60).sum() - 49) < 5 * np.sqrt(98) + 10


def test_weighted_draws_in_proportion_and_never_what_weighs_nothing() -> None:
    """Chi-squared of the counts of ten samples is within five deviations of its mean."""
    weights = np.array([0.0, 1, 2, 3, 4, 0, 6, 7, 8, 0])
    drawn, _ = epoch_of(job_of([0] * 10, sampling=stoker.sampling.weighted(weights, num_samples=20_000)))
    counts, expected = np.bincount(drawn, minlength=10), weights / weights.sum() * 20_000
    there = weights > 0
    assert counts[~there].sum() == 0
    chi_squared = ((counts - expected)[there] ** 2 / expected[there]).sum()
    assert chi_squared < 6 + 5 * np.sqrt(12)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0, 1e300), min_size=1, max_size=30), st.integers(0, 2**63 - 1))
def test_only_what_weighs_something_is_drawn(weights: list[float], seed: int) -> None:
    """For all weights, in any ratio, and all seeds."""
    if not any(weights):
        return
    sampling = stoker.sampling.weighted(weights, num_samples=50)
    drawn, _ = epoch_of(job_of([0] * len(weights), sampling=sampling, seed=seed))
    assert all(weights[index] > 0 for index in drawn)


@pytest.mark.parametrize(("bits", "expected"), [(0, 1), (2**63 - 1, 1), (2**63, 3), (2**64 - 1, 3)])
def test_a_draw_on_a_border_belongs_to_what_comes_after_it(
    bits: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smallest and the largest draw, and the one where the stretches of two samples meet."""
    drawn = WeightedSamples(as_samples((torch.arange(5),), what="data"), np.array([0.0, 1, 0, 1, 0]), None, 0)
    monkeypatch.setattr(drawn, "_bits", lambda draws, epoch: np.full(len(draws), bits, np.uint64))
    assert drawn.drawn(np.arange(1), 0).tolist() == [expected]


@settings(max_examples=60, deadline=None)
@given(CLASSES, st.integers(0, 3), st.data())
def test_stratified_takes_every_sample_once_and_every_stretch_in_shares(
    classes: list[int], epoch: int, data: st.DataObject
) -> None:
    """A class of n among N has L·n/N of any L in a row, give or take 1 + C·n/N."""
    drawn, found = epoch_of(job_of(classes, sampling=stoker.sampling.stratified()), epoch)
    size = len(classes)
    assert sorted(drawn) == list(range(size))
    start = data.draw(st.integers(0, size))
    stretch = found[start : data.draw(st.integers(start, size))]
    for name in set(classes):
        share = classes.count(name) / size
        assert abs(stretch.count(name) - share * len(stretch)) <= 1 + len(set(classes)) * share


def test_stratified_shuffles_each_class_anew_in_every_epoch() -> None:
    """The samples of a class come in other orders, and where classes come differs too."""
    job = job_of([0] * 40 + [1] * 19, sampling=stoker.sampling.stratified())
    epochs = [epoch_of(job, epoch) for epoch in range(10)]
    assert len({tuple(drawn) for drawn, _ in epochs}) == 10
    assert len({tuple(i for i in drawn if i >= 40) for drawn, _ in epochs}) == 10
    assert len({tuple(classes) for _, classes in epochs}) > 5


@pytest.mark.parametrize(
    "sampling",
    [
        stoker.sampling.balanced(),
        stoker.sampling.weighted([0.1 + i for i in range(50)], num_samples=70),
        stoker.sampling.stratified(),
    ],
    ids=["balanced", "weighted", "stratified"],
)
@settings(max_examples=15, deadline=None)
@given(start=st.integers(0, 12), batch=st.integers(1, 30), parts=st.integers(1, 3))
def test_batches_from_any_position_and_over_any_processes_are_those_of_the_whole_run(
    sampling: Any, start: int, batch: int, parts: int
) -> None:
    """A run that is resumed, alone or as several processes, trains on the samples it would have."""
    train = datasets_of(job_of([i % 7 == 0 for i in range(50)], sampling=sampling)).train
    whole = [content[0] for content in contents(source_of(train, batch), 0, start + 4)]
    shares = [copy.copy(source_of(train, batch)) for _ in range(parts)]
    for part, source in enumerate(shares):
        object.__setattr__(source, "split", Split(part, parts))
    streams = [source.batches(source.extent.position(start), start + 4) for source in shares]
    for expected, *batches in zip(whole[start:], *streams, strict=True):
        spans = [one.split.spans(one.whole_size)[0] for one in batches]
        together = [one.cut(0, one.size)[0][: len(span)] for one, span in zip(batches, spans, strict=True)]
        assert torch.equal(torch.cat(together), expected)


def test_a_sample_drawn_twice_in_an_epoch_is_loaded_with_other_random_draws() -> None:
    """Else over-sampling a rare class would show the same augmented image again and again; the same on resume."""
    job = job_of(
        [0],
        data=Noisy(3),
        sampling=stoker.sampling.weighted([0, 1, 0], num_samples=6),
        fields=stoker.Fields(target="label"),
    )
    train = datasets_of(job).train
    batch, again = (train.fetch(np.arange(6), 0)["x"] for _ in range(2))
    assert batch[:, 0].tolist() == [1.0] * 6
    assert len({tuple(row) for row in batch[:, 1:].tolist()}) == 6
    assert torch.equal(batch, again)


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling": stoker.sampling.balanced()},
        {"sampling": stoker.sampling.weighted(range(30))},
        {"sampling": stoker.sampling.stratified()},
        {"sampling": stoker.lengths.bucketed(length_of=range(1, 31))},
    ],
    ids=["balanced", "weighted", "stratified", "bucketed"],
)
def test_arrays_on_the_device_are_taken_in_the_same_order(changes: dict[str, Any]) -> None:
    """Where the samples lie is the plan's business; that they lie in memory, and how large they are, is still known."""
    train = datasets_of(job_of([i % 3 for i in range(30)], **changes)).train
    assert train.is_in_memory
    assert train.num_bytes == 30 * (4 + 8)
    found = [contents(source_of(train, 7, loader), 0, 9) for loader in ("memory", "device")]
    for one, other in zip(*found, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


def test_what_is_held_out_is_never_drawn() -> None:
    """Weights and targets are given for all of the data; those of the training samples count."""
    classes = [i % 3 for i in range(60)]
    weights = list(range(1, 61))
    for sampling in (stoker.sampling.balanced(), stoker.sampling.weighted(weights), stoker.sampling.stratified()):
        job = job_of(classes, sampling=sampling, valid=stoker.holdout(0.4))
        held_out = set(datasets_of(job).valid.fetch(np.arange(24), 0)[0][:, 0].tolist())
        drawn, found = epoch_of(job)
        assert not held_out & set(drawn)
        assert len(drawn) == 36
        assert found == [classes[index] for index in drawn]


def test_all_weight_held_out_is_said() -> None:
    """Nothing would be left to draw."""
    one = datasets_of(job_of([0] * 10, valid=stoker.holdout(0.1))).valid.fetch(np.arange(1), 0)[0].item()
    weights = [float(i == one) for i in range(10)]
    with pytest.raises(BadJob, match="all 9 training samples have the weight 0"):
        datasets_of(job_of([0] * 10, valid=stoker.holdout(0.1), sampling=stoker.sampling.weighted(weights)))


def test_as_many_weights_as_samples() -> None:
    """Counted, with the remedy."""
    with pytest.raises(BadJob, match="there are 3 weights for 10 samples") as caught:
        datasets_of(job_of([0] * 10, sampling=stoker.sampling.weighted([1, 2, 3])))
    assert "held-out ones included" in caught.value.remedy


def test_a_class_that_the_holdout_takes_whole_is_said() -> None:
    """It could not be drawn; `stratify` leaves some of each."""
    classes = [0] * 50 + [1]
    chosen = next(
        seed
        for seed in range(200)
        if datasets_of(job_of(classes, valid=stoker.holdout(0.2, seed=seed))).valid.all_of(1).any()
    )
    with pytest.raises(BadJob, match="the holdout leaves no sample of class 1") as caught:
        datasets_of(job_of(classes, valid=stoker.holdout(0.2, seed=chosen), sampling=stoker.sampling.balanced()))
    assert "stratify=True" in caught.value.remedy
    kept = stoker.holdout(0.2, seed=chosen, stratify=True)
    datasets_of(job_of(classes, valid=kept, sampling=stoker.sampling.balanced()))


def test_the_draws_are_those_they_always_were() -> None:
    """A run begun under one version of Stoker is continued by the next: these numbers never change."""
    classes = [0, 0, 0, 0, 0, 1, 1, 2]
    assert epoch_of(job_of(classes, sampling=stoker.sampling.balanced()), 3)[0] == [0, 7, 6, 7, 4, 5, 7, 6]
    assert epoch_of(job_of(classes, sampling=stoker.sampling.weighted(range(8))), 3)[0] == [2, 7, 6, 6, 2, 5, 7, 5]
    assert epoch_of(job_of(classes, sampling=stoker.sampling.stratified()), 3)[0] == [3, 7, 0, 6, 4, 2, 5, 1]

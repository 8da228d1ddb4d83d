from __future__ import annotations

import contextlib
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
from stoker.jobs.batch_size import TokenBatch
from stoker.jobs.fields import Fields
from stoker.jobs.run_length import Extent
from stoker.loading.batches import BatchSource, InputPipeline, Split
from stoker.loading.datasets import datasets_of
from stoker.loading.lengths import has_one_shape
from stoker.loading.token_batches import (
    TokenBudget,
    TokenExtent,
    TokenLayout,
    extent_of,
    mean_samples,
    with_batch_in_samples,
)
from stoker.records import Plan, Position
from stoker.stepping.coupling import find_coupling
from stoker.units import Duration, epochs, samples, updates
from tests.loading.test_bucketing import Words

SIZES = [1 + (7 * index) % 23 for index in range(60)]


def extent_with(lengths: list[int], room: int, window: int | None) -> TokenExtent:
    """The extent of samples of these lengths, in batches with `room` tokens more than the longest has."""
    layout = TokenLayout(np.array(lengths), TokenBudget(max(lengths) + room, window=window), seed=2)
    return TokenExtent(len(lengths), int(layout.sizes.max()), layout)


EXTENTS = st.builds(
    extent_with,
    st.lists(st.integers(1, 30), min_size=1, max_size=50),
    st.integers(0, 90),
    st.one_of(st.none(), st.integers(1, 4)),
)
LENGTHS = st.one_of(
    st.builds(epochs, st.one_of(st.integers(1, 5), st.floats(0.02, 5))),
    st.builds(samples, st.one_of(st.integers(1, 200), st.floats(0.5, 200))),
    st.builds(updates, st.integers(1, 60)),
)


def job_of(sizes: list[int] | None = None, **changes: Any) -> stoker.Job:
    """A job on words of these lengths, 50 tokens a batch."""
    given: dict[str, Any] = {
        "model": lambda: nn.Linear(1, 1),
        "data": Words(SIZES if sizes is None else sizes),
        "loss": "mse",
        "optimizer": stoker.SGD(lr=0.1),
        "batch": stoker.tokens(50),
        "until": stoker.epochs(1),
        "fields": stoker.Fields(collate=stoker.lengths.padded(-1)),
    }
    return stoker.Job(**(given | changes))


def source_of(job: stoker.Job, split: Split | None = None, **plan: Any) -> BatchSource:
    """Where the job's training batches come from."""
    data = datasets_of(job)
    pipeline = InputPipeline(device=torch.device("cpu"), fields=Fields(), prepare=data.train.prepare)
    given = {"device": "cpu", "micro_batch": 4, "loader": "inline"} | plan
    return BatchSource(data.train, pipeline, data.extent(job), job.seed, Plan(**given), split=split or Split())


def walk(extent: TokenExtent, num_updates: int) -> list[Position]:
    """Positions after 0, 1, ... updates, the way a plain loop over epochs and batches gets there."""
    positions = [Position()]
    for epoch in itertools.count():
        for size in np.diff(extent.layout.cursors(epoch)).tolist():
            if len(positions) > num_updates:
                return positions
            last = positions[-1]
            cursor = last.cursor + size
            ended = cursor == extent.num_train
            positions.append(
                Position(
                    epoch=epoch + ended,
                    cursor=0 if ended else cursor,
                    samples=last.samples + size,
                    updates=last.updates + 1,
                )
            )
    raise AssertionError


@settings(deadline=None)
@given(EXTENTS, st.integers(0, 60))
def test_positions_are_those_of_a_plain_loop(extent: TokenExtent, num_updates: int) -> None:
    """Where training is after any number of updates is known without walking there, and how large each batch is."""
    positions = walk(extent, num_updates)
    assert [extent.position(update) for update in range(num_updates + 1)] == positions
    for before, after in itertools.pairwise(positions):
        assert extent.batch_at(before) == after.samples - before.samples <= extent.batch


@settings(deadline=None)
@given(EXTENTS, LENGTHS)
def test_a_run_is_as_short_as_reaches_its_length(extent: TokenExtent, length: Duration) -> None:
    """The last update reaches what was asked for; one fewer would not have."""
    total = extent.updates_in(length)
    if length.unit == "updates":
        assert total == length.value
        return
    wanted = length.value * (extent.num_train if length.unit == "epochs" else 1)
    assert extent.position(total).samples >= wanted - 1e-5
    assert total == 1 or extent.position(total - 1).samples < wanted
    if length.unit == "epochs" and length.value == int(length.value):
        assert extent.position(total).cursor == 0


@settings(deadline=None)
@given(EXTENTS, LENGTHS, st.integers(1, 60))
def test_evaluations_are_those_of_a_plain_loop(extent: TokenExtent, every: Duration, total: int) -> None:
    """Their number is known beforehand: after each update in which an interval ends, and at the end."""
    counts = [extent.intervals(every, position) for position in walk(extent, total)]
    ended = sum(before < after for before, after in itertools.pairwise(counts[:-1]))
    assert extent.evaluations(every, total) == ended + 1


@pytest.mark.parametrize("lengths", [None, stoker.lengths.bucketed(window=2)])
def test_a_run_takes_every_sample_once_an_epoch_within_its_tokens(lengths: Any) -> None:
    """As batches come out of the loader, two epochs of them."""
    source = source_of(job_of(sampling=lengths))
    per_epoch = source.extent.updates_per_epoch
    batches = list(source.batches(Position(), 2 * per_epoch))
    for epoch in (0, 1):
        mine = batches[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert all(batch.epoch == epoch for batch in mine)
        assert sorted(np.concatenate([batch.indices for batch in mine]).tolist()) == list(range(len(SIZES)))
    for batch in batches:
        assert 0 < sum(SIZES[index] for index in batch.indices) <= 50
        assert batch.whole_size == batch.size == len(batch.cut(0, batch.size)[0])


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 40), st.booleans())
def test_from_any_position_on_batches_are_those_of_a_run_never_stopped(begin: int, is_bucketed: bool) -> None:
    """Resumed in another process, which has seen nothing of what came before."""
    job = job_of(sampling=stoker.lengths.bucketed(window=2) if is_bucketed else None)
    straight = list(source_of(job).batches(Position(), begin + 6))[begin:]
    resumed = source_of(job)
    found = list(resumed.batches(resumed.extent.position(begin), begin + 6))
    for one, other in zip(straight, found, strict=True):
        np.testing.assert_array_equal(one.indices, other.indices)
        assert torch.equal(one.cut(0, one.size)[0], other.cut(0, other.size)[0])


def test_workers_bring_the_same_batches() -> None:
    """In the same order, over the border of an epoch."""
    job = job_of()
    plain, by_workers = source_of(job), source_of(job, loader="workers", num_workers=2)
    total = plain.extent.updates_per_epoch + 3
    pairs = zip(plain.batches(Position(), total), by_workers.batches(Position(), total), strict=True)
    assert all(np.array_equal(one.indices, other.indices) for one, other in pairs)


def test_several_processes_share_each_batch() -> None:
    """Each takes a part of every batch, and knows how many samples the whole has."""
    job = job_of()
    whole = list(source_of(job).batches(Position(), 12))
    parts = [list(source_of(job, Split(part, 2)).batches(Position(), 12)) for part in (0, 1)]
    for batch, one, other in zip(whole, *parts, strict=True):
        assert one.whole_size == other.whole_size == batch.size
        if batch.size > 1:
            np.testing.assert_array_equal(np.concatenate([one.indices, other.indices]), batch.indices)


def test_a_sample_longer_than_a_batch_is_refused_by_its_number_in_the_data() -> None:
    """Also where a holdout has left others out."""
    sizes = [*SIZES[:40], 51, *SIZES[40:]]
    with pytest.raises(BadJob, match="sample 40 of data has 51 tokens, and a batch has 50") as caught:
        datasets_of(job_of(sizes))
    assert "stoker.tokens(51)" in str(caught.value.remedy)
    keeps = [seed for seed in range(12) if 40 in kept_of(len(sizes), seed)]
    assert 0 < len(keeps) < 12
    for seed in range(12):
        job = job_of(sizes, valid=stoker.holdout(0.5, seed=seed))
        with pytest.raises(BadJob, match="sample 40 of data") if seed in keeps else contextlib.nullcontext():
            datasets_of(job)


def kept_of(size: int, seed: int) -> list[int]:
    """What a holdout of a half leaves to train on."""
    arrays = (torch.zeros(size, 2), torch.zeros(size))
    train = datasets_of(
        job_of(data=arrays, fields=stoker.Fields(), batch=4, valid=stoker.holdout(0.5, seed=seed))
    ).train
    return train.indices.tolist()  # type: ignore[attr-defined, no-any-return]


def test_arrays_say_their_lengths_or_are_told_them() -> None:
    """Of rectangles every sample is as long, unless lengths are given."""
    arrays = (torch.zeros(30, 10, dtype=torch.int64), torch.zeros(30))
    job = job_of(data=arrays, fields=stoker.Fields())
    assert datasets_of(job).extent(job).updates_per_epoch == 6
    job = job_of(data=arrays, fields=stoker.Fields(), batch=stoker.tokens(50, length_of=[5] * 30))
    assert datasets_of(job).extent(job).updates_per_epoch == 3


def test_packed_rows_are_counted_in_tokens() -> None:
    """A batch has as many rows as hold that many; one that holds none is refused."""
    job = job_of(
        data=PackedWords(), sampling=stoker.lengths.packed(25), batch=stoker.tokens(110), fields=stoker.Fields()
    )
    extent = datasets_of(job).extent(job)
    assert type(extent) is Extent
    assert extent.batch == 4
    short = job_of(
        data=PackedWords(), sampling=stoker.lengths.packed(25), batch=stoker.tokens(20), fields=stoker.Fields()
    )
    with pytest.raises(BadJob, match="a batch of 20 tokens has no room for a row of 25"):
        datasets_of(short).extent(short)


class PackedWords(torch.utils.data.Dataset):
    """Dicts of tokens and targets."""

    def __len__(self) -> int:
        return len(SIZES)

    def __getitem__(self, index: int) -> Any:
        return {"tokens": torch.ones(SIZES[index]), "labels": torch.ones(SIZES[index])}


def test_streams_have_no_lengths_to_go_by() -> None:
    """Said where the job is made ready."""
    with pytest.raises(BadJob, match="data is a stream"):
        datasets_of(job_of(data=stoker.data.stream(Endless(), length=10)))


class Endless(torch.utils.data.IterableDataset):
    """Samples without number."""

    def __iter__(self) -> Any:
        return itertools.repeat((torch.zeros(3), 0))


def test_the_most_samples_of_a_batch_are_what_plans_go_by() -> None:
    """A made-ready job's batch is a number of samples, and says its tokens still."""
    job = job_of()
    train = datasets_of(job).train
    ready = with_batch_in_samples(job, train)
    sizes = [batch.size for batch in source_of(job).batches(Position(), extent_of(train, job).updates_per_epoch)]
    assert isinstance(ready.batch, TokenBatch)
    assert (ready.batch_size, ready.batch.num_tokens) == (max(sizes), 50)
    assert extent_of(train, ready) == extent_of(train, job)
    assert mean_samples(ready, train) == sum(sizes) / len(sizes)
    assert with_batch_in_samples(job_of(batch=7), train).batch == 7


@pytest.mark.parametrize("micro_batch", [1, 2, 4, 100])
def test_forecasts_look_at_samples_of_the_largest_micro_batch(micro_batch: int) -> None:
    """So many like the longest of them have at least as many tokens, padded, as any micro-batch of the run."""
    job = job_of(sampling=stoker.lengths.bucketed(window=2))
    train = datasets_of(job).train
    most = min(micro_batch, extent_of(train, job).batch)
    longest = max(SIZES[index] for index in train.representative(2, most))
    source = source_of(job)
    for batch in source.batches(Position(), source.extent.updates_per_epoch):
        for start in range(0, batch.size, most):
            part = batch.indices[start : start + most]
            assert len(part) * max(SIZES[index] for index in part) <= most * longest


@settings(deadline=None)
@given(EXTENTS, st.integers(1, 60))
def test_no_evaluation_has_more_tokens_than_a_micro_batch(extent: TokenExtent, micro_batch: int) -> None:
    """Even if all of its samples are as long as the longest; one more of these would have more."""
    layout, count = extent.layout, extent.evaluated_at_once(micro_batch)
    largest = max(min(size, micro_batch) * longest for size, longest in zip(layout.sizes, layout.longest, strict=True))
    assert 1 <= count <= micro_batch
    assert count * layout.longest.max() <= largest < (count + 1) * layout.longest.max()


@pytest.mark.parametrize(
    ("changes", "is_one"),
    [
        ({}, False),
        ({"batch": 4}, False),
        ({"batch": 4, "fields": stoker.Fields(collate=stoker.lengths.padded(to=30))}, True),
        (
            {
                "batch": 4,
                "fields": stoker.Fields(collate=stoker.lengths.padded(to=30)),
                "sampling": stoker.lengths.bucketed(),
            },
            False,
        ),
        ({"batch": 4, "data": (torch.zeros(8, 3), torch.zeros(8)), "fields": stoker.Fields()}, True),
        ({"batch": stoker.tokens(9), "data": (torch.zeros(8, 3), torch.zeros(8)), "fields": stoker.Fields()}, False),
        ({"data": PackedWords(), "sampling": stoker.lengths.packed(25), "fields": stoker.Fields()}, True),
    ],
)
def test_whether_batches_are_of_one_shape_is_told_by_settings(changes: dict[str, Any], is_one: bool) -> None:
    """A pass that is captured is of one: of others it would be captured in vain."""
    job = job_of(**changes)
    assert has_one_shape(job, datasets_of(job).train) is is_one


def test_samples_that_influence_one_another_are_refused() -> None:
    """Batch norm over batches of different numbers of samples is none that is recorded."""
    job = job_of(
        data=(torch.randn(40, 4), torch.randn(40, 1)),
        fields=stoker.Fields(),
        model=lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)),
    )
    train = datasets_of(job).train
    with pytest.raises(BadJob, match=r"batches of different numbers of samples, and those .* through 1 BatchNorm1d"):
        find_coupling(with_batch_in_samples(job, train), train)
    plain = job_of(data=job.data, fields=stoker.Fields(), model=lambda: nn.Linear(4, 1))
    assert find_coupling(with_batch_in_samples(plain, train), train).kind == "separable"

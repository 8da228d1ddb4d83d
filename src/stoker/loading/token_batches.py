"""Batches of at most a given number of tokens: their samples, order and updates. Settings: `stoker.jobs.batch_size`.

Batches are laid out once, by lengths alone: samples in a keyed order (bucketed ones sorted within windows), cut before
the sample that would exceed the budget. In each epoch keys assign the samples to places of their length, and a keyed
order to the batches. So every epoch has each sample once and the same number of updates, no batch exceeds its tokens,
and any position costs no more than its epoch. The lengths that share a batch stay the same. Lengths are rounded up to
steps of a 64th of their mean: samples of all different lengths could not swap places.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from stoker.errors import BadJob
from stoker.jobs import Job
from stoker.jobs.batch_size import TokenBatch
from stoker.jobs.lengths import Bucketed, Packed
from stoker.jobs.run_length import Extent
from stoker.loading.lengths import lengths_of
from stoker.loading.order import Indices, KeyedPermutation, Order, RandomStream, key_of, keys_of_samples, require_within
from stoker.loading.samples import RearrangedSamples, Samples, rows_of
from stoker.records import Position
from stoker.units import Duration


@dataclass(frozen=True)
class TokenExtent(Extent):
    """The shape of a run whose updates have different numbers of samples; `batch` is the largest."""

    layout: TokenLayout

    @cached_property
    def updates_per_epoch(self) -> int:
        """Number of updates in each epoch."""
        return len(self.layout.sizes)

    def position(self, updates: int) -> Position:
        """The position of training after `updates` updates."""
        epoch, within = divmod(updates, self.updates_per_epoch)
        cursor = int(self.layout.cursors(epoch)[within])
        return Position(epoch=epoch, cursor=cursor, samples=epoch * self.num_train + cursor, updates=updates)

    def batch_at(self, position: Position) -> int:
        """Number of samples in the batch that starts at `position`."""
        cursors = self.layout.cursors(position.epoch)
        following = int(np.searchsorted(cursors, position.cursor, side="right"))
        return int(cursors[following]) - position.cursor

    def evaluated_at_once(self, micro_batch: int) -> int:
        """Samples as long as the longest, with no more tokens, padded, than the largest micro-batch [samples].

        Held-out samples come in their own order: any of them may be as long.
        """
        largest = (np.minimum(self.layout.sizes, micro_batch) * self.layout.longest).max()
        return int(largest // self.layout.longest.max())

    def evaluations_before(self, every: Duration, total_updates: int) -> int:
        """Number of evaluations in a run of `total_updates`, without the one at its end."""
        updates = total_updates - 1
        if every.unit == "updates" or self._samples_in(every) >= self.batch:
            return min(self.intervals(every, self.position(updates)), updates)
        ends = (self.intervals(every, self.position(update)) for update in range(updates + 1))
        return len(set(ends)) - 1

    def _updates_within(self, epoch: int, samples: int) -> int:
        """Smallest number of updates of `epoch` that have `samples` samples together."""
        return int(np.searchsorted(self.layout.cursors(epoch), samples, side="left"))


class TokenBatchSamples(RearrangedSamples):
    """The samples of another, in an order of batches of at most so many tokens."""

    def __init__(self, whole: Samples, lengths: Indices, layout: TokenLayout) -> None:
        super().__init__(whole, "by tokens")
        self._lengths, self.layout = lengths, layout

    def order(self, seed: int) -> Order:
        """Batch after batch; the layout was made with the job's seed."""
        del seed
        return self.layout

    def representative(self, count: int, micro_batch: int) -> Indices:
        """`count` samples of a length such that `micro_batch` of them are as large as the largest micro-batch.

        The largest in tokens, padding counted, of all micro-batches of at most that many samples.
        """
        held = np.minimum(self.layout.sizes, micro_batch)
        length = (held * self.layout.longest).max() / held.max()
        by_length = np.argsort(self._lengths, kind="stable")
        first = int(np.searchsorted(self._lengths[by_length], length, side="left"))
        return by_length[max(0, min(first, len(by_length) - count)) :][:count]


def in_token_batches(train: Samples, whole: Samples, job: Job) -> Samples:
    """The training samples `train`, all or a subset of `whole`, in batches of the job's tokens.

    Raises:
        BadJob: a sample is longer than a batch; or lengths are not known.
    """
    batch = job.batch
    if not isinstance(batch, TokenBatch):
        raise TypeError(f"this batch is a number of samples: {batch}")
    bucketed = job.sampling if isinstance(job.sampling, Bucketed) else None
    lengths = rows_of(train, lengths_of(whole, bucketed.length_of if bucketed else batch.length_of, "data"))
    longest = int(lengths.argmax())
    if lengths[longest] > batch.num_tokens:
        index = int(rows_of(train, np.arange(len(whole), dtype=np.int64))[longest])
        raise BadJob(
            f"sample {index} of data has {lengths[longest]:,} tokens, and a batch has {batch.num_tokens:,}",
            remedy=f"Cut it, leave it out, or take batch=stoker.tokens({lengths[longest]}).",
        )
    cut = TokenBudget(batch.num_tokens, batch.is_padded, None if bucketed is None else bucketed.window)
    return TokenBatchSamples(train, lengths, TokenLayout(lengths, cut, job.seed))


def rows_in_batch(batch: TokenBatch, packed: Packed) -> int:
    """Number of packed rows in a batch of tokens.

    Raises:
        BadJob: not even one.
    """
    if batch.num_tokens < packed.into:
        raise BadJob(
            f"a batch of {batch.num_tokens:,} tokens has no room for a row of {packed.into:,}",
            remedy=f"Take at least batch=stoker.tokens({packed.into}).",
        )
    return batch.num_tokens // packed.into


def extent_of(train: Samples, job: Job) -> Extent:
    """The shape of the job's run over `train`."""
    batch = job.batch
    if isinstance(batch, TokenBatch):
        if isinstance(train, TokenBatchSamples):
            return TokenExtent(len(train), int(train.layout.sizes.max()), train.layout)
        if isinstance(job.sampling, Packed):
            return Extent(len(train), rows_in_batch(batch, job.sampling))
    return Extent(len(train), job.batch_size)


def with_batch_in_samples(job: Job, train: Samples) -> Job:
    """The job, with a batch stated in tokens extended by its largest number of samples."""
    if not isinstance(job.batch, TokenBatch):
        return job
    return replace(job, batch=replace(job.batch, num_samples=extent_of(train, job).batch))


def mean_samples(job: Job, train: Samples) -> float:
    """Mean number of samples in an update; for a batch stated in samples, its size."""
    extent = extent_of(train, job)
    if isinstance(extent, TokenExtent):
        return extent.num_train / extent.updates_per_epoch
    return min(extent.batch, extent.num_train)


_STEPS = 64
"""Rounding steps in a mean length: on average a batch loses half a step per sample."""

_KEPT = 4
"""Epochs whose batch boundaries are kept: loaders are in the next one while training ends the last."""


@dataclass(frozen=True)
class TokenBudget:
    """The size of batches: at most `num_tokens`, padding counted or not.

    `window` batches are sorted together by length (None: no sorting).
    """

    num_tokens: int
    is_padded: bool = False
    window: int | None = None


class TokenLayout:
    """Batches of samples of these lengths [N] within a budget that none exceeds alone."""

    def __init__(self, lengths: Indices, cut: TokenBudget, seed: int) -> None:
        self._seed = seed
        step = max(1, int(lengths.mean()) // _STEPS)
        counted = np.minimum(-(-lengths // step) * step, cut.num_tokens)
        # Slot number i is a place for a sample of length `slots[i]`; batch number b has the slots from starts[b] on.
        size = len(counted)
        slots = counted[KeyedPermutation(size, key_of(RandomStream.TOKENS, seed))(np.arange(size))]
        if cut.window is not None:
            # Every second sorted window is descending, so that the batch where two meet has similar lengths too.
            in_window = max(1, round(cut.window * cut.num_tokens / float(counted.mean())))
            windows = np.arange(size) // in_window
            slots = slots[np.lexsort((np.where(windows % 2, -slots, slots), windows))]
        self._starts = np.array(_starts(slots.tolist(), cut), dtype=np.int64)
        self._by_length = np.argsort(slots, kind="stable")
        self._counted = counted
        self.sizes: Indices = np.diff(np.append(self._starts, len(lengths)))
        """Samples of each batch as laid out [number of batches]."""
        self.longest: Indices = np.maximum.reduceat(slots, self._starts)
        """Length of the longest slot of each batch [number of batches], in tokens."""
        self._cursors: dict[int, Indices] = {}
        self._samples: tuple[int, Indices] = (-1, np.empty(0, np.int64))

    def __len__(self) -> int:
        """Samples in an epoch."""
        return len(self._counted)

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        """Sample indices [stop - start] at positions start..stop of `epoch`, 0 <= start <= stop <= size; read only."""
        require_within(len(self), start, stop)
        return self.samples(epoch)[start:stop]

    def cursors(self, epoch: int) -> Indices:
        """The first position of each batch of `epoch`, and the end of the last one [number of batches + 1]."""
        cursors = self._cursors.get(epoch)
        if cursors is None:
            cursors = np.concatenate([[0], np.cumsum(self.sizes[self._batches(epoch)])])
            self._cursors[epoch] = cursors
            while len(self._cursors) > _KEPT:
                del self._cursors[next(iter(self._cursors))]
        return cursors

    def samples(self, epoch: int) -> Indices:
        """All samples in the order of `epoch` [N]; read only."""
        if self._samples[0] != epoch:
            key = key_of(RandomStream.TOKENS, self._seed, epoch, 1)
            keys = keys_of_samples(key, np.arange(len(self), dtype=np.int64))
            in_slots = np.empty(len(self), np.int64)
            in_slots[self._by_length] = np.lexsort((keys, self._counted))
            batches, cursors = self._batches(epoch), self.cursors(epoch)
            moved = np.repeat(self._starts[batches] - cursors[:-1], self.sizes[batches])
            self._samples = (epoch, in_slots[np.arange(len(self)) + moved])
        return self._samples[1]

    def _batches(self, epoch: int) -> Indices:
        """The laid-out batches in the order of `epoch`."""
        count = len(self._starts)
        return KeyedPermutation(count, key_of(RandomStream.TOKENS, self._seed, epoch, 0))(np.arange(count))


def _starts(slots: list[int], cut: TokenBudget) -> list[int]:
    """The first slot of each batch; each batch takes as many slots as its budget allows."""
    starts, total, longest = [0], 0, 0
    for place, length in enumerate(slots):
        total, longest = total + length, max(longest, length)
        num_tokens = longest * (place + 1 - starts[-1]) if cut.is_padded else total
        if num_tokens > cut.num_tokens:
            starts.append(place)
            total = longest = length
    return starts

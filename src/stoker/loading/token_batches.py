"""Batches stated in tokens: the samples, their order, and where updates lie in it.

Settings and costs: `stoker.jobs.batch_size`.

Which places there are in batches of at most so many tokens, and who takes them in an epoch. Pure arithmetic.

Batches are laid out once, by lengths alone: samples in a keyed order (of bucketed ones, stretches of it sorted), cut
where the next sample would be too much. Each epoch shares its samples out anew among the places of their length, by
keys, and takes the batches in a keyed order. So an epoch has every sample once and as many updates as any other, no
batch is ever over its tokens, and any position costs no more than its epoch. What stays is which lengths share a batch.
Lengths are counted in steps of a 64th of their mean, rounded up: among samples of all different lengths, places could
not be traded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from stoker.errors import BadJob
from stoker.jobs import Job
from stoker.jobs.batch_size import TokenBatch
from stoker.jobs.extent import Extent
from stoker.jobs.lengths import Bucketed, Packed
from stoker.loading.lengths import lengths_of
from stoker.loading.order import Indices, KeyedPermutation, Order, require_within
from stoker.loading.randomness import RandomStream, key_of, keys_of_samples
from stoker.loading.samples import RearrangedSamples, Samples, rows_of
from stoker.records import Position
from stoker.units import Duration


@dataclass(frozen=True)
class TokenExtent(Extent):
    """The shape of a run whose updates have different numbers of samples; `batch` is the most of them."""

    layout: TokenLayout

    @cached_property
    def updates_per_epoch(self) -> int:
        """Updates in one pass over the data; as many in each."""
        return len(self.layout.sizes)

    def position(self, updates: int) -> Position:
        """Where training is after `updates` updates."""
        epoch, within = divmod(updates, self.updates_per_epoch)
        cursor = int(self.layout.cursors(epoch)[within])
        return Position(epoch=epoch, cursor=cursor, samples=epoch * self.num_train + cursor, updates=updates)

    def batch_at(self, position: Position) -> int:
        """Samples of the batch that starts at `position`."""
        cursors = self.layout.cursors(position.epoch)
        at = int(np.searchsorted(cursors, position.cursor, side="right"))
        return int(cursors[at]) - position.cursor

    def evaluations_before(self, every: Duration, total_updates: int) -> int:
        """Evaluations in a run of `total_updates` but for the one at its end."""
        updates = total_updates - 1
        if every.unit == "updates" or self._samples_in(every) >= self.batch:
            return min(self.intervals(every, self.position(updates)), updates)
        ends = (self.intervals(every, self.position(update)) for update in range(updates + 1))
        return len(set(ends)) - 1

    def _updates_within(self, epoch: int, samples: int) -> int:
        """The fewest updates of `epoch` that have `samples` samples together."""
        return int(np.searchsorted(self.layout.cursors(epoch), samples, side="left"))


class TokenBatchSamples(RearrangedSamples):
    """The samples of another, in an order of batches of at most so many tokens."""

    def __init__(self, whole: Samples, lengths: Indices, layout: TokenLayout) -> None:
        super().__init__(whole, "by tokens")
        self._lengths, self.layout = lengths, layout

    def order(self, seed: int) -> Order:
        """Batch after batch; the layout was made with the job's seed."""
        del seed
        return _TokenOrder(self.layout)

    def on(self, device: torch.device) -> Samples:
        """These samples with their arrays on `device`."""
        return TokenBatchSamples(self.whole.on(device), self._lengths, self.layout)

    def alike(self, count: int, micro_batch: int) -> Indices:
        """`count` samples, the longest of them such that `micro_batch` like it are the largest micro-batch there is.

        The largest in tokens, padding counted, of all micro-batches of at most that many samples.
        """
        held = np.minimum(self.layout.sizes, micro_batch)
        wanted = (held * self.layout.longest).max() / held.max()
        by_length = np.argsort(self._lengths, kind="stable")
        at = int(np.searchsorted(self._lengths[by_length], wanted, side="left"))
        return by_length[max(0, min(at, len(by_length) - count)) :][:count]


class _TokenOrder:
    """The order that a layout gives every epoch."""

    def __init__(self, layout: TokenLayout) -> None:
        self._layout = layout

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        """Sample indices [stop - start] at positions start..stop of `epoch`, 0 <= start <= stop <= size; read only."""
        require_within(len(self._layout), start, stop)
        return self._layout.samples(epoch)[start:stop]


def in_token_batches(train: Samples, whole: Samples, job: Job) -> Samples:
    """The training samples `train`, which a holdout may have left of `whole`, in batches of the job's tokens.

    Raises:
        BadJob: a sample is longer than a batch; or lengths are not known.
    """
    batch = job.batch
    if not isinstance(batch, TokenBatch):
        raise TypeError(f"this batch is a number of samples: {batch}")
    bucketed = job.lengths if isinstance(job.lengths, Bucketed) else None
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
    """Packed rows in a batch of tokens.

    Raises:
        BadJob: not even one.
    """
    if batch.num_tokens < packed.into:
        raise BadJob(f"a batch of {batch.num_tokens:,} tokens has no room for a row of {packed.into:,}",
                     remedy=f"Take at least batch=stoker.tokens({packed.into}).")  # fmt: skip
    return batch.num_tokens // packed.into


def extent_of(train: Samples, job: Job) -> Extent:
    """The shape of the job's run over `train`."""
    batch: int = job.batch
    if isinstance(batch, TokenBatch):
        if isinstance(train, TokenBatchSamples):
            return TokenExtent(len(train), int(train.layout.sizes.max()), train.layout)
        if isinstance(job.lengths, Packed):
            return Extent(len(train), rows_in_batch(batch, job.lengths))
    return Extent(len(train), batch)


def with_batch_in_samples(job: Job, train: Samples) -> Job:
    """The job with the most samples of a batch known, where it is stated in tokens."""
    batch: int = job.batch
    return replace(job, batch=batch.of(extent_of(train, job).batch)) if isinstance(batch, TokenBatch) else job


def mean_samples(job: Job, train: Samples) -> float:
    """Samples of an update on average: of a batch stated in samples, all of it."""
    extent = extent_of(train, job)
    if isinstance(extent, TokenExtent):
        return extent.num_train / extent.updates_per_epoch
    return min(extent.batch, extent.num_train)


_STEPS = 64
"""Steps of a mean length in which lengths are counted: on average a batch loses half of such a step a sample."""

_KEPT = 4
"""Epochs whose beginnings of batches are kept: loaders are in the next one while training ends the last."""


@dataclass(frozen=True)
class TokenBudget:
    """How batches are cut: at most `num_tokens`, padding counted or not.

    `window` is how many batches are sorted together by length (None: none are).
    """

    num_tokens: int
    is_padded: bool = False
    window: int | None = None


class TokenLayout:
    """Batches of at most so many tokens of samples of these lengths [N], none of which is longer than that."""

    def __init__(self, lengths: Indices, cut: TokenBudget, seed: int) -> None:
        self._seed = seed
        counted = _in_steps(lengths, cut.num_tokens)
        # Slot number i is a place for a sample of length `slots[i]`; batch number b has those from starts[b] on.
        slots = _laid_out(counted, cut, seed)
        self._starts = np.array(_starts(slots.tolist(), cut), dtype=np.int64)
        self._by_length = np.argsort(slots, kind="stable")
        self._counted = counted
        self.sizes: Indices = np.diff(np.append(self._starts, len(lengths)))
        """Samples of each batch as laid out [number of batches]."""
        self.longest: Indices = np.maximum.reduceat(slots, self._starts)
        """The longest sample for which each batch has a place [number of batches], in tokens."""
        self._cursors: dict[int, Indices] = {}
        self._samples: tuple[int, Indices] = (-1, np.empty(0, np.int64))

    def __len__(self) -> int:
        """Samples in an epoch."""
        return len(self._counted)

    def cursors(self, epoch: int) -> Indices:
        """Where in `epoch` each of its batches begins, and where the last one ends [number of batches + 1]."""
        found = self._cursors.get(epoch)
        if found is None:
            found = np.concatenate([[0], np.cumsum(self.sizes[self._batches(epoch)])])
            self._cursors[epoch] = found
            while len(self._cursors) > _KEPT:
                del self._cursors[next(iter(self._cursors))]
        return found

    def samples(self, epoch: int) -> Indices:
        """All samples in the order in which `epoch` takes them [N]; read only."""
        if self._samples[0] != epoch:
            self._samples = (epoch, self._shared_out(epoch))
        return self._samples[1]

    def _batches(self, epoch: int) -> Indices:
        """Which of the batches as laid out comes where in `epoch`."""
        count = len(self._starts)
        return KeyedPermutation(count, key_of(RandomStream.TOKENS, self._seed, epoch, 0))(np.arange(count))

    def _shared_out(self, epoch: int) -> Indices:
        keys = keys_of_samples(key_of(RandomStream.TOKENS, self._seed, epoch, 1), np.arange(len(self), dtype=np.int64))
        in_slots = np.empty(len(self), np.int64)
        in_slots[self._by_length] = np.lexsort((keys, self._counted))
        batches, cursors = self._batches(epoch), self.cursors(epoch)
        moved = np.repeat(self._starts[batches] - cursors[:-1], self.sizes[batches])
        return in_slots[np.arange(len(self)) + moved]


def _in_steps(lengths: Indices, most: int) -> Indices:
    """Lengths rounded up to whole steps, none above `most`."""
    step = max(1, int(lengths.mean()) // _STEPS)
    return np.minimum(-(-lengths // step) * step, most)


def _laid_out(counted: Indices, cut: TokenBudget, seed: int) -> Indices:
    """The lengths in the order in which they are cut into batches.

    Of windows that are sorted, every second one goes from long to short, so that the batch in which two meet is of like
    lengths too.
    """
    size = len(counted)
    order = KeyedPermutation(size, key_of(RandomStream.TOKENS, seed))(np.arange(size))
    if cut.window is None:
        return counted[order]
    in_window = max(1, round(cut.window * cut.num_tokens / float(counted.mean())))
    windows = np.arange(size) // in_window
    lengths = counted[order]
    return lengths[np.lexsort((np.where(windows % 2, -lengths, lengths), windows))]


def _starts(slots: list[int], cut: TokenBudget) -> list[int]:
    """Where batches begin: each is as long as its tokens allow."""
    starts, total, longest = [0], 0, 0
    for place, length in enumerate(slots):
        total, longest = total + length, max(longest, length)
        taken = longest * (place + 1 - starts[-1]) if cut.is_padded else total
        if taken > cut.num_tokens:
            starts.append(place)
            total = longest = length
    return starts

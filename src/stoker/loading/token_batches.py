"""Batches stated in tokens: the samples, their order, and where updates lie in it.

Settings and costs: `stoker.jobs.token_batch`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from stoker.errors import BadJob
from stoker.jobs import Job
from stoker.jobs.extent import Extent
from stoker.jobs.lengths import Bucketed, Packed
from stoker.jobs.token_batch import TokenBatch
from stoker.loading.measured import lengths_of
from stoker.loading.order import Indices, Order, require_within
from stoker.loading.rearranged import Rearranged, rows_of
from stoker.loading.samples import Samples
from stoker.loading.token_layout import Cut, TokenLayout
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


class InTokenBatches(Rearranged):
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
        return InTokenBatches(self.whole.on(device), self._lengths, self.layout)

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
    cut = Cut(batch.num_tokens, batch.is_padded, None if bucketed is None else bucketed.window)
    return InTokenBatches(train, lengths, TokenLayout(lengths, cut, job.seed))


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
        if isinstance(train, InTokenBatches):
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

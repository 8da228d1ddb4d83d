"""Which samples an epoch is made of: drawn with replacement, or every one once with classes in equal shares everywhere.

What is drawn is a function of (seed, epoch, number of the draw), so that any position is had at once and nothing
depends on batches, workers or processes. The settings, and what they cost, are in `stoker.jobs.sampling`.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stoker.errors import BadJob
from stoker.jobs import Job
from stoker.jobs.sampling import Balanced, InOrder, Stratified, Weighted
from stoker.loading import order
from stoker.loading.fields import Content
from stoker.loading.labels import Labels, labels_of
from stoker.loading.order import Indices, Order, require_within
from stoker.loading.randomness import RandomStream, key_of, keys_of_samples, mix_keys
from stoker.loading.samples import RearrangedSamples, Samples, rows_of

_EXACT_BITS = 53
"""Bits of a float64's significand: a uniform draw is a multiple of 2^-53."""


def sampled(train: Samples, whole: Samples, job: Job) -> Samples:
    """The training samples `train`, which a holdout may have left of `whole`, as the job's `sampling` takes them.

    Raises:
        BadJob: there are not as many weights or targets as samples, none can be drawn, or a class is empty.
    """
    sampling = job.sampling
    if isinstance(sampling, Weighted):
        weights = rows_of(train, _weights(whole, sampling))
        if not weights.any():
            raise BadJob(f"all {len(weights)} training samples have the weight 0: there is nothing to draw")
        return WeightedSamples(train, weights, sampling.num_samples, job.seed)
    if isinstance(sampling, Balanced | Stratified):
        labels = labels_of(whole, job, sampling.targets)
        mine = labels.of(rows_of(train, np.arange(len(whole), dtype=np.int64)))
        mine.require_all("the holdout leaves", "Hold out of each class: stoker.holdout(…, stratify=True).")
        if isinstance(sampling, Balanced):
            return BalancedSamples(train, mine, sampling.num_samples, job.seed)
        return StratifiedSamples(train, mine)
    return SequentialSamples(train) if isinstance(sampling, InOrder) else train


class DrawnSamples(RearrangedSamples):
    """Samples drawn with replacement: number i of them, in an epoch, is that epoch's draw number i."""

    def __init__(self, whole: Samples, num_samples: int | None, seed: int, how: str) -> None:
        super().__init__(whole, how)
        self._num_samples = len(whole) if num_samples is None else num_samples
        self._seed = seed

    def __len__(self) -> int:
        """Draws in an epoch."""
        return self._num_samples

    @abstractmethod
    def drawn(self, draws: Indices, epoch: int) -> Indices:
        """The samples of the whole that draws number `draws` [B] of `epoch` give."""

    def fetch(self, indices: Indices, epoch: int) -> Content:
        """The batch of draws `indices` [B]; a sample that is drawn twice draws anew for itself."""
        return self.whole.fetch_drawn(self.drawn(indices, epoch), epoch, indices)

    def items(self, indices: Indices, epoch: int) -> list[Any]:
        """The samples that were drawn, one by one."""
        return self.whole.items(self.drawn(indices, epoch), epoch)

    def all_of(self, _key: Any) -> torch.Tensor | None:
        """Nothing: they are others in each epoch."""
        return None

    def on(self, device: torch.device) -> Samples:
        """The same draws of samples with their arrays on `device`."""
        placed = copy.copy(self)
        placed.whole = self.whole.on(device)
        return placed

    def _bits(self, draws: Indices, epoch: int) -> npt.NDArray[np.uint64]:
        return keys_of_samples(key_of(RandomStream.SAMPLING, self._seed, epoch), draws)


class WeightedSamples(DrawnSamples):
    """Each sample as likely as its share of all weights: its stretch of their running sum is looked up."""

    def __init__(self, whole: Samples, weights: npt.NDArray[Any], num_samples: int | None, seed: int) -> None:
        super().__init__(whole, num_samples, seed, "weighted")
        scaled = weights / weights.max()  # their sum is then finite, whatever they are
        self._sums = np.cumsum(scaled)
        self._last = int(np.flatnonzero(scaled)[-1])

    def drawn(self, draws: Indices, epoch: int) -> Indices:
        """As `Drawn.drawn`."""
        uniform = (self._bits(draws, epoch) >> np.uint64(64 - _EXACT_BITS)) * 2.0**-_EXACT_BITS
        found = np.searchsorted(self._sums, uniform * self._sums[-1], side="right")
        drawn: Indices = np.minimum(found, self._last)  # a product may be rounded up to the whole sum
        return drawn


class BalancedSamples(DrawnSamples):
    """A class, all alike, then one of its samples, all alike (to within 2^-32)."""

    def __init__(self, whole: Samples, labels: Labels, num_samples: int | None, seed: int) -> None:
        super().__init__(whole, num_samples, seed, "balanced")
        self._by_class = np.argsort(labels.classes, kind="stable")
        self._counts = labels.counts
        self._starts = np.cumsum(self._counts) - self._counts

    def drawn(self, draws: Indices, epoch: int) -> Indices:
        """As `Drawn.drawn`."""
        bits = self._bits(draws, epoch)
        classes = _below(np.full(len(draws), len(self._counts)), bits)
        within = _below(self._counts[classes], mix_keys(bits + np.uint64(1)))
        drawn: Indices = self._by_class[self._starts[classes] + within]
        return drawn


class StratifiedSamples(RearrangedSamples):
    """Every sample once an epoch, in an order in which each stretch has the classes in the shares of the whole."""

    def __init__(self, whole: Samples, labels: Labels) -> None:
        super().__init__(whole, "stratified")
        self._labels = labels

    def order(self, seed: int) -> Order:
        """The classes interleaved."""
        return StratifiedOrder(self._labels, seed)

    def on(self, device: torch.device) -> Samples:
        """These samples with their arrays on `device`."""
        return StratifiedSamples(self.whole.on(device), self._labels)


class SequentialSamples(RearrangedSamples):
    """Every sample once an epoch, in the order of the data."""

    def __init__(self, whole: Samples) -> None:
        super().__init__(whole, "in order")

    def order(self, seed: int) -> Order:
        """The positions themselves."""
        del seed
        return order.SequentialOrder(len(self))

    def on(self, device: torch.device) -> Samples:
        """These samples with their arrays on `device`."""
        return SequentialSamples(self.whole.on(device))


class StratifiedOrder:
    """Each class spread evenly over the epoch from a keyed beginning, its samples in a keyed order.

    Of any L samples that follow one another, a class with n of all N has L·n/N, give or take 1 + C·n/N with C classes.
    """

    def __init__(self, labels: Labels, seed: int) -> None:
        self.size = len(labels.classes)
        self._classes, self._counts, self._seed = labels.classes, labels.counts, seed
        self._epoch: tuple[int, Indices] = (-1, np.empty(0, np.int64))

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        """Sample indices [stop - start] at positions start..stop of `epoch`, which is sorted when it begins."""
        require_within(self.size, start, stop)
        if self._epoch[0] != epoch:
            self._epoch = (epoch, self._sorted(epoch))
        return self._epoch[1][start:stop]

    def _sorted(self, epoch: int) -> Indices:
        keys = keys_of_samples(
            key_of(RandomStream.SAMPLING, self._seed, epoch, 0), np.arange(self.size, dtype=np.int64)
        )
        by_class = np.lexsort((keys, self._classes))
        classes = self._classes[by_class]
        starts = np.cumsum(self._counts) - self._counts
        places = np.arange(self.size) - starts[classes]
        begins = keys_of_samples(key_of(RandomStream.SAMPLING, self._seed, epoch, 1), np.arange(len(self._counts)))
        within = (begins >> np.uint64(64 - _EXACT_BITS)) * 2.0**-_EXACT_BITS
        return by_class[np.argsort((places + within[classes]) / self._counts[classes], kind="stable")]


def _weights(whole: Samples, sampling: Weighted) -> npt.NDArray[Any]:
    weights: npt.NDArray[Any] = sampling.weights
    if len(weights) != len(whole):
        raise BadJob(f"there are {len(weights):,} weights for {len(whole):,} samples",
                     remedy="Give one for each sample of data, held-out ones included.")  # fmt: skip
    return weights


def _below(limits: Indices, bits: npt.NDArray[np.uint64]) -> Indices:
    """Whole numbers [B], each at least 0 and below its limit, all equally likely (to within 2^-32)."""
    return (((bits >> np.uint64(32)) * limits.astype(np.uint64)) >> np.uint64(32)).astype(np.int64)

"""Sampling: drawn with replacement by weight or class, stratified, or in order.

Draws are a function of (seed, epoch, number of the draw), so that any position is computed directly and nothing depends
on batches, workers or processes. Settings and costs: `stoker.jobs.sampling`.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stoker.errors import BadJob
from stoker.jobs import Job
from stoker.jobs.sampling import Balanced, InOrder, Stratified, Weighted
from stoker.loading.fields import Content
from stoker.loading.labels import Labels, labels_of
from stoker.loading.order import (
    Indices,
    Order,
    RandomStream,
    SequentialOrder,
    key_of,
    keys_of_samples,
    mix_keys,
    require_within,
)
from stoker.loading.samples import RearrangedSamples, Samples, rows_of

_EXACT_BITS = 53
"""Bits of a float64's significand: a uniform draw is a multiple of 2^-53."""


def sampled(train: Samples, whole: Samples, job: Job) -> Samples:
    """The training samples `train`, all or a subset of `whole`, as the job's `sampling` takes them.

    Raises:
        BadJob: there are not as many weights or targets as samples, none can be drawn, or a class is empty.
    """
    sampling = job.sampling
    if isinstance(sampling, Weighted):
        if len(sampling.weights) != len(whole):
            raise BadJob(
                f"there are {len(sampling.weights):,} weights for {len(whole):,} samples",
                remedy="Give one for each sample of data, held-out ones included.",
            )
        weights: npt.NDArray[Any] = rows_of(train, sampling.weights)
        if not weights.any():
            raise BadJob(f"all {len(weights)} training samples have the weight 0: there is nothing to draw")
        return WeightedSamples(train, weights, sampling.num_samples, job.seed)
    if isinstance(sampling, Balanced | Stratified):
        labels = labels_of(whole, job, sampling.targets)
        train_labels = labels.of(rows_of(train, np.arange(len(whole), dtype=np.int64)))
        train_labels.require_all("the holdout leaves", "Hold out of each class: stoker.holdout(…, stratify=True).")
        if isinstance(sampling, Balanced):
            return BalancedSamples(train, train_labels, sampling.num_samples, job.seed)
        return StratifiedSamples(train, train_labels)
    return SequentialSamples(train) if isinstance(sampling, InOrder) else train


class DrawnSamples(RearrangedSamples):
    """Samples drawn with replacement: sample i of an epoch is its draw number i."""

    def __init__(self, whole: Samples, num_samples: int | None, seed: int, how: str) -> None:
        super().__init__(whole, how)
        self._num_samples = len(whole) if num_samples is None else num_samples
        self._seed = seed

    def __len__(self) -> int:
        """Draws in an epoch."""
        return self._num_samples

    @abstractmethod
    def drawn(self, draws: Indices, epoch: int) -> Indices:
        """The samples of the whole for draws number `draws` [B] of `epoch`."""

    def fetch(self, indices: Indices, epoch: int) -> Content:
        """The batch of draws `indices` [B]; each occurrence of a sample has random numbers of its own."""
        return self.whole.fetch_drawn(self.drawn(indices, epoch), epoch, indices)

    def items(self, indices: Indices, epoch: int) -> list[Any]:
        """The samples that were drawn, one by one."""
        return self.whole.items(self.drawn(indices, epoch), epoch)

    def all_of(self, _key: Any) -> torch.Tensor | None:
        """None: the samples differ in each epoch."""
        return None

    def _bits(self, draws: Indices, epoch: int) -> npt.NDArray[np.uint64]:
        return keys_of_samples(key_of(RandomStream.SAMPLING, self._seed, epoch), draws)


class WeightedSamples(DrawnSamples):
    """Each sample drawn in proportion to its weight, by searching the cumulative sum of weights."""

    def __init__(self, whole: Samples, weights: npt.NDArray[Any], num_samples: int | None, seed: int) -> None:
        super().__init__(whole, num_samples, seed, "weighted")
        scaled = weights / weights.max()  # keeps their sum finite
        self._sums = np.cumsum(scaled)
        self._last = int(np.flatnonzero(scaled)[-1])

    def drawn(self, draws: Indices, epoch: int) -> Indices:
        """As `DrawnSamples.drawn`."""
        uniform = (self._bits(draws, epoch) >> np.uint64(64 - _EXACT_BITS)) * 2.0**-_EXACT_BITS
        places = np.searchsorted(self._sums, uniform * self._sums[-1], side="right")
        drawn: Indices = np.minimum(places, self._last)  # a product may be rounded up to the whole sum
        return drawn


class BalancedSamples(DrawnSamples):
    """A class drawn uniformly, then one of its samples uniformly (to within 2^-32)."""

    def __init__(self, whole: Samples, labels: Labels, num_samples: int | None, seed: int) -> None:
        super().__init__(whole, num_samples, seed, "balanced")
        self._by_class = np.argsort(labels.classes, kind="stable")
        self._counts = labels.counts
        self._starts = np.cumsum(self._counts) - self._counts

    def drawn(self, draws: Indices, epoch: int) -> Indices:
        """As `DrawnSamples.drawn`."""
        bits = self._bits(draws, epoch)
        classes = _below(np.full(len(draws), len(self._counts)), bits)
        within = _below(self._counts[classes], mix_keys(bits + np.uint64(1)))
        drawn: Indices = self._by_class[self._starts[classes] + within]
        return drawn


class StratifiedSamples(RearrangedSamples):
    """Every sample once an epoch, with each stretch holding the classes in the shares of the whole."""

    def __init__(self, whole: Samples, labels: Labels) -> None:
        super().__init__(whole, "stratified")
        self._labels = labels

    def order(self, seed: int) -> Order:
        """The classes interleaved."""
        return StratifiedOrder(self._labels, seed)


class SequentialSamples(RearrangedSamples):
    """Every sample once an epoch, in the order of the data."""

    def __init__(self, whole: Samples) -> None:
        super().__init__(whole, "in order")

    def order(self, seed: int) -> Order:
        """The positions themselves."""
        del seed
        return SequentialOrder(len(self))


class StratifiedOrder:
    """Each class spread evenly over the epoch from a keyed offset, its samples in a keyed order.

    Of any L consecutive samples, a class with n of all N has L·n/N, give or take 1 + C·n/N with C classes.
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


def _below(limits: Indices, bits: npt.NDArray[np.uint64]) -> Indices:
    """Whole numbers [B], each at least 0 and below its limit, all equally likely (to within 2^-32)."""
    return (((bits >> np.uint64(32)) * limits.astype(np.uint64)) >> np.uint64(32)).astype(np.int64)

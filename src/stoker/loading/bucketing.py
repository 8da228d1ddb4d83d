"""Batches of samples of like length. Settings and costs: `stoker.jobs.lengths`."""

from __future__ import annotations

import numpy as np
import torch

from stoker.loading.keys import Stream, key_of
from stoker.loading.order import EpochOrder, Indices, KeyedPermutation, Order, require_within
from stoker.loading.rearranged import Rearranged
from stoker.loading.samples import Samples


class InBuckets(Rearranged):
    """The samples of another, in an order of batches of like length."""

    def __init__(self, whole: Samples, lengths: Indices, batch: int, window: int) -> None:
        super().__init__(whole, "bucketed")
        self._lengths, self._batch, self._window = lengths, batch, window

    def order(self, seed: int) -> Order:
        """Windows of the keyed order, sorted."""
        return BucketedOrder(self._lengths, self._batch, self._window, seed)

    def on(self, device: torch.device) -> Samples:
        """These samples with their arrays on `device`."""
        return InBuckets(self.whole.on(device), self._lengths, self._batch, self._window)


class BucketedOrder:
    """The keyed permutation of an epoch, each window of it sorted by length and cut into batches in a keyed order.

    Any position costs one window. Batches begin at multiples of `batch`, and what an epoch leaves over comes last: it
    is cut out of its sorted window at a keyed place, so that it is not always the longest.
    """

    def __init__(self, lengths: Indices, batch: int, window: int, seed: int) -> None:
        self.size = len(lengths)
        self._lengths, self._batch, self._in_window, self._seed = lengths, batch, window * batch, seed
        self._order = EpochOrder(self.size, seed)
        self._window: tuple[int, int, Indices] = (-1, -1, np.empty(0, np.int64))

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        """Sample indices [stop - start] at positions start..stop of `epoch`."""
        require_within(self.size, start, stop)
        parts = [np.empty(0, np.int64)]
        for number in range(start // self._in_window, -(-stop // self._in_window)):
            first = number * self._in_window
            parts.append(self._window_of(epoch, number)[max(start - first, 0) : stop - first])
        return np.concatenate(parts)

    def _window_of(self, epoch: int, number: int) -> Indices:
        if self._window[:2] != (epoch, number):
            first = number * self._in_window
            found = self._order.indices(epoch, first, min(first + self._in_window, self.size))
            by_length = found[np.argsort(self._lengths[found], kind="stable")]
            self._window = (epoch, number, self._in_batches(by_length, key_of(Stream.ORDER, self._seed, epoch, number)))
        return self._window[2]

    def _in_batches(self, by_length: Indices, key: int) -> Indices:
        num_whole, left = divmod(len(by_length), self._batch)
        at = self._batch * (key % (num_whole + 1))
        over, rest = by_length[at : at + left], np.delete(by_length, np.s_[at : at + left])
        order = KeyedPermutation(num_whole, key)(np.arange(num_whole)) if num_whole else np.empty(0, np.int64)
        return np.concatenate([rest.reshape(num_whole, self._batch)[order].reshape(-1), over])

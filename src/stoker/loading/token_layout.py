"""Which places there are in batches of at most so many tokens, and who takes them in an epoch. Pure arithmetic.

Batches are laid out once, by lengths alone: samples in a keyed order (of bucketed ones, stretches of it sorted), cut
where the next sample would be too much. Each epoch shares its samples out anew among the places of their length, by
keys, and takes the batches in a keyed order. So an epoch has every sample once and as many updates as any other, no
batch is ever over its tokens, and any position costs no more than its epoch. What stays is which lengths share a batch.
Lengths are counted in steps of a 64th of their mean, rounded up: among samples of all different lengths, places could
not be traded.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stoker.loading.keys import Stream, key_of, keys_of_samples
from stoker.loading.order import Indices, KeyedPermutation

_STEPS = 64
"""Steps of a mean length in which lengths are counted: on average a batch loses half of such a step a sample."""

_KEPT = 4
"""Epochs whose beginnings of batches are kept: loaders are in the next one while training ends the last."""


@dataclass(frozen=True)
class Cut:
    """How batches are cut: at most `num_tokens`, padding counted or not.

    `window` is how many batches are sorted together by length (None: none are).
    """

    num_tokens: int
    is_padded: bool = False
    window: int | None = None


class TokenLayout:
    """Batches of at most so many tokens of samples of these lengths [N], none of which is longer than that."""

    def __init__(self, lengths: Indices, cut: Cut, seed: int) -> None:
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
        return KeyedPermutation(count, key_of(Stream.TOKENS, self._seed, epoch, 0))(np.arange(count))

    def _shared_out(self, epoch: int) -> Indices:
        keys = keys_of_samples(key_of(Stream.TOKENS, self._seed, epoch, 1), np.arange(len(self), dtype=np.int64))
        in_slots = np.empty(len(self), np.int64)
        in_slots[self._by_length] = np.lexsort((keys, self._counted))
        batches, cursors = self._batches(epoch), self.cursors(epoch)
        moved = np.repeat(self._starts[batches] - cursors[:-1], self.sizes[batches])
        return in_slots[np.arange(len(self)) + moved]


def _in_steps(lengths: Indices, most: int) -> Indices:
    """Lengths rounded up to whole steps, none above `most`."""
    step = max(1, int(lengths.mean()) // _STEPS)
    return np.minimum(-(-lengths // step) * step, most)


def _laid_out(counted: Indices, cut: Cut, seed: int) -> Indices:
    """The lengths in the order in which they are cut into batches.

    Of windows that are sorted, every second one goes from long to short, so that the batch in which two meet is of like
    lengths too.
    """
    size = len(counted)
    order = KeyedPermutation(size, key_of(Stream.TOKENS, seed))(np.arange(size))
    if cut.window is None:
        return counted[order]
    in_window = max(1, round(cut.window * cut.num_tokens / float(counted.mean())))
    windows = np.arange(size) // in_window
    lengths = counted[order]
    return lengths[np.lexsort((np.where(windows % 2, -lengths, lengths), windows))]


def _starts(slots: list[int], cut: Cut) -> list[int]:
    """Where batches begin: each is as long as its tokens allow."""
    starts, total, longest = [0], 0, 0
    for place, length in enumerate(slots):
        total, longest = total + length, max(longest, length)
        taken = longest * (place + 1 - starts[-1]) if cut.is_padded else total
        if taken > cut.num_tokens:
            starts.append(place)
            total = longest = length
    return starts

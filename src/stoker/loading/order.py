"""The order of samples: a keyed permutation of each epoch, computed at any position directly.

What: a Feistel network over the smallest power of two that holds the indices, applied until the result is an index.
Use when: samples are indexed. Costs: a few hash rounds per sample, and the memory of one block of the order.
Source: Black and Rogaway 2002, "Ciphers with arbitrary finite domains", https://doi.org/10.1007/3-540-45760-7_9
(cycle walking); rounds here are SplitMix64, which mixes well but is not cryptographic.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from stoker.loading.randomness import Keys, RandomStream, key_of, mix_keys

_ROUNDS = 6
_BLOCK = 2**16

Indices = npt.NDArray[np.int64]


class KeyedPermutation:
    """A permutation of range(`size`) chosen by `key`, evaluated at any positions."""

    def __init__(self, size: int, key: int) -> None:
        self.size = size
        bits = max(2, (size - 1).bit_length())
        self._low_bits = np.uint64(bits // 2)
        self._low_mask = np.uint64((1 << (bits // 2)) - 1)
        self._high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
        self._keys = [np.uint64(key_of(RandomStream.ORDER, key, turn)) for turn in range(_ROUNDS)]

    def __call__(self, positions: Indices) -> Indices:
        """The indices [B] at these positions [B], each in range(size)."""
        out = self._network(positions.astype(np.uint64))
        outside = np.flatnonzero(out >= self.size)
        while outside.size:
            out[outside] = self._network(out[outside])
            outside = outside[out[outside] >= self.size]
        return out.astype(np.int64)

    def _network(self, x: Keys) -> Keys:
        high, low = x >> self._low_bits, x & self._low_mask
        for turn, key in enumerate(self._keys):
            if turn % 2:
                low = low ^ (mix_keys(high + key) & self._low_mask)
            else:
                high = high ^ (mix_keys(low + key) & self._high_mask)
        return (high << self._low_bits) | low


class Order(Protocol):
    """The order of samples in each epoch."""

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        """Sample indices [stop - start] at positions start..stop of `epoch`, 0 <= start <= stop <= size; read only."""
        ...


class EpochOrder:
    """The order of samples in every epoch of a run, from (seed, epoch, position) alone."""

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self.seed = seed
        self._block: tuple[int, int, Indices] = (-1, -1, np.empty(0, np.int64))

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        """Sample indices [stop - start] at positions start..stop of `epoch`, 0 <= start <= stop <= size; read only."""
        require_within(self.size, start, stop)
        if start // _BLOCK == max(stop - 1, start) // _BLOCK:
            return self._block_of(epoch, start // _BLOCK)[start % _BLOCK : start % _BLOCK + stop - start]
        parts = []
        for block in range(start // _BLOCK, max(stop - 1, start) // _BLOCK + 1):
            first = block * _BLOCK
            parts.append(self._block_of(epoch, block)[max(start - first, 0) : stop - first])
        return np.concatenate(parts)

    def _block_of(self, epoch: int, block: int) -> Indices:
        if self._block[:2] != (epoch, block):
            permutation = KeyedPermutation(self.size, key_of(RandomStream.ORDER, self.seed, epoch))
            positions = np.arange(block * _BLOCK, min((block + 1) * _BLOCK, self.size), dtype=np.int64)
            self._block = (epoch, block, permutation(positions))
        return self._block[2]


class SequentialOrder:
    """The order of a stream: as it is read, in every epoch."""

    def __init__(self, size: int) -> None:
        self.size = size

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        """The positions themselves [stop - start]."""
        require_within(self.size, start, stop)
        return np.arange(start, stop, dtype=np.int64)


def require_within(size: int, start: int, stop: int) -> None:
    """Raise IndexError for positions outside an epoch of `size` samples."""
    if not 0 <= start <= stop <= size:
        raise IndexError(f"an epoch has positions 0 to {size}, asked for {start}..{stop}")

"""Keyed randomness: every random draw is a function of a key, so that nothing depends on what was drawn before.

Keys are mixed with the finaliser of SplitMix64 (Steele, Lea and Flood 2014, https://doi.org/10.1145/2714064.2660195),
in Python for single keys and in NumPy for many.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15

Keys = npt.NDArray[np.uint64]


class Stream(IntEnum):
    """What a key is for; no two uses share draws."""

    INITIAL_WEIGHTS = 1
    ORDER = 2
    ITEM = 3
    AUGMENT = 4
    MICRO_BATCH = 5
    EVALUATION = 6
    HOLDOUT = 7
    PROBE = 8
    SAMPLING = 9
    MIXING = 10
    TOKENS = 11


def key_of(stream: Stream, *parts: int) -> int:
    """A 64-bit key of `stream` and whole numbers of any size: equal parts, equal key."""
    return extended(_SMALL[stream], *parts)


def extended(key: int, *parts: int) -> int:
    """The key with more parts: `extended(key_of(stream, a), b) == key_of(stream, a, b)`."""
    for part in parts:
        key = _mix((key + _GOLDEN) ^ (_SMALL[part] if 0 <= part < len(_SMALL) else _mix(part + _GOLDEN)))
    return key


def _mix(x: int) -> int:
    x &= _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


_SMALL = tuple(_mix(part + _GOLDEN) for part in range(64))
"""Small parts mixed, which recur: streams, first samples, zeros."""


def mix_keys(keys: Keys) -> Keys:
    """SplitMix64's finaliser of every key: a bijection of 64-bit numbers that leaves no pattern."""
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return keys ^ (keys >> np.uint64(31))


def keys_of_samples(key: int, indices: npt.NDArray[np.int64]) -> Keys:
    """One key per sample index [B] under `key`."""
    return mix_keys(indices.astype(np.uint64) * np.uint64(_GOLDEN) + np.uint64(key))

"""Keyed randomness, and the order of samples: every draw is a function of a key, independent of earlier draws.

Keys are mixed with the finaliser of SplitMix64 (Steele, Lea and Flood 2014, https://doi.org/10.1145/2714064.2660195),
in Python for single keys and in NumPy for many.

PyTorch's global generators are seeded before every micro-batch. Python's and NumPy's take ten times as long to seed and
are hardly used by models: in training they run on, and a checkpoint keeps their states. Before an item of a dataset is
fetched, all are seeded.

The order of an epoch is a keyed permutation, computed at any position directly.
What: a Feistel network over the smallest power of two that holds the indices, applied until the result is an index.
Use when: samples are indexed. Costs: a few hash rounds per sample, and the memory of one block of the order.
Source: Black and Rogaway 2002, "Ciphers with arbitrary finite domains", https://doi.org/10.1007/3-540-45760-7_9
(cycle walking); rounds here are SplitMix64, which mixes well but is not cryptographic.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15

Keys = npt.NDArray[np.uint64]


class RandomStream(IntEnum):
    """The use of a key; no two uses share draws."""

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


def key_of(stream: RandomStream, *parts: int) -> int:
    """Key of `stream` and whole numbers of any size [64 bits]; equal parts give equal keys."""
    return extended(_SMALL[stream], *parts)


def extended(key: int, *parts: int) -> int:
    """Key with more parts [64 bits]: `extended(key_of(stream, a), b) == key_of(stream, a, b)`."""
    for part in parts:
        key = _mix((key + _GOLDEN) ^ (_SMALL[part] if 0 <= part < len(_SMALL) else _mix(part + _GOLDEN)))
    return key


def _mix(x: int) -> int:
    x &= _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


_SMALL = tuple(_mix(part + _GOLDEN) for part in range(64))
"""Mixed small parts, which recur: streams, first samples, zeros."""


def mix_keys(keys: Keys) -> Keys:
    """SplitMix64's finaliser of every key, a bijection of 64-bit numbers."""
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return keys ^ (keys >> np.uint64(31))


def keys_of_samples(key: int, indices: npt.NDArray[np.int64]) -> Keys:
    """One key per sample index [B] under `key`."""
    return mix_keys(indices.astype(np.uint64) * np.uint64(_GOLDEN) + np.uint64(key))


Numbers = npt.NDArray[np.float64]


def uniform(keys: Keys, *what: int) -> Numbers:
    """Numbers in (0, 1), one for each key [B], different for each `what`."""
    bits = mix_keys(keys ^ np.uint64(key_of(RandomStream.MIXING, *what))) >> np.uint64(11)
    return (bits.astype(np.float64) + 0.5) / 2**53


def symmetric_beta(alpha: float, keys: Keys, *what: int) -> Numbers:
    """Numbers in [0, 1] with the distribution Beta(alpha, alpha), one for each key [B].

    As X / (X + Y) of two with Gamma(alpha, 1), computed from logarithms: for a small alpha both may be below 1e-308.
    """
    log_x, log_y = (_log_gamma(alpha, keys, *what, part) for part in (0, 1))
    return 1 / (1 + np.exp(np.clip(log_y - log_x, -700, 700)))


def _log_gamma(alpha: float, keys: Keys, *what: int) -> Numbers:
    """Logarithms of numbers with the distribution Gamma(alpha, 1).

    Source: G. Marsaglia, W. W. Tsang, "A Simple Method for Generating Gamma Variables", ACM TOMS 26(3), 2000,
    https://doi.org/10.1145/358407.358414: rejection for alpha + 1, and the step from there to alpha in section 6. A
    key's draws do not depend on when others are accepted.
    """
    d = alpha + 2 / 3
    c = 1 / np.sqrt(9 * d)
    drawn = np.full(len(keys), np.nan)
    turn = 0
    while np.isnan(drawn).any():
        radius = np.sqrt(-2 * np.log(uniform(keys, *what, turn, 0)))
        x = radius * np.cos(2 * np.pi * uniform(keys, *what, turn, 1))
        v = np.maximum(1 + c * x, 1e-300) ** 3
        log_v = 3 * np.log(np.maximum(1 + c * x, 1e-300))
        accepted = np.log(uniform(keys, *what, turn, 2)) < 0.5 * x**2 + d - d * v + d * log_v
        accepted &= 1 + c * x > 0
        drawn = np.where(np.isnan(drawn) & accepted, np.log(d) + log_v, drawn)
        turn += 1
    return drawn + np.log(uniform(keys, *what, -1)) / alpha


def seed_generators(key: int, device: torch.device | None = None) -> None:
    """Seed Python's, NumPy's and PyTorch's CPU generators, and the one of `device` if it has its own."""
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)  # noqa: NPY002 - the global generator is the one that users' code draws from
    seed_torch(key, device)


def seed_torch(key: int, device: torch.device | None = None) -> None:
    """Seed PyTorch's CPU generator, and the one of `device` if it has its own.

    The CPU's takes the low 32 bits of `key` alone, as NumPy's does; `extended` spreads a key over all of its bits.
    """
    torch.default_generator.manual_seed(key)
    if device is not None and device.type == "cuda":
        device_generator(device).manual_seed(key)


def device_generator(device: torch.device) -> torch.Generator:
    """PyTorch's generator of a GPU, which has none before the first use of CUDA."""
    torch.cuda.init()
    return torch.cuda.default_generators[device.index or 0]


def generator_states() -> dict[str, Any]:
    """The states of Python's and NumPy's global generators, as tensors and numbers."""
    version, key, gauss = random.getstate()
    name, numpy_words, place, has_gauss, numpy_gauss = np.random.get_state()  # noqa: NPY002 - as above
    return {
        "python": {"version": version, "words": torch.tensor(key, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "name": name,
            "words": torch.from_numpy(np.asarray(numpy_words).astype(np.int64)),
            "place": int(place),
            "has_gauss": int(has_gauss),
            "gauss": float(numpy_gauss),
        },
    }


def restore_generators(states: dict[str, Any]) -> None:
    """Restore the states given by `generator_states`."""
    python, numpy = states["python"], states["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    key = numpy["words"].numpy().astype(np.uint32)
    np.random.set_state((numpy["name"], key, numpy["place"], numpy["has_gauss"], numpy["gauss"]))  # noqa: NPY002


def python_generators() -> tuple[Any, ...]:
    """The states of Python's and NumPy's global generators, equal to each other if nothing has drawn in between."""
    numpy = np.random.get_state(legacy=False)  # noqa: NPY002 - as above
    key, place = numpy["state"]["key"].tobytes(), numpy["state"]["pos"]
    return random.getstate(), (numpy["bit_generator"], key, place, numpy["has_gauss"], numpy["gauss"])


def restore_python_generators(states: tuple[Any, ...]) -> None:
    """Restore the states given by `python_generators`."""
    python, (name, key, *others) = states
    random.setstate(python)
    np.random.set_state((name, np.frombuffer(key, np.uint32), *others))  # noqa: NPY002 - as above


@contextmanager
def generators_kept(device: torch.device | None = None) -> Iterator[None]:
    """Restore Python's, NumPy's and PyTorch's generators after the block: the CPU's and those of `device`.

    Without a device those of all devices in use.
    """
    states = python_generators()
    if device is not None:
        devices = [device.index or 0] if device.type == "cuda" else []
    else:
        is_cuda_in_use = torch.cuda.is_available() and torch.cuda.is_initialized()
        devices = list(range(torch.cuda.device_count())) if is_cuda_in_use else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            restore_python_generators(states)


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

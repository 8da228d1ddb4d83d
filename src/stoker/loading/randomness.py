"""Keyed randomness: every draw is a function of a key, independent of earlier draws.

Keys are mixed with the finaliser of SplitMix64 (Steele, Lea and Flood 2014, https://doi.org/10.1145/2714064.2660195),
in Python for single keys and in NumPy for many.

PyTorch's global generators are seeded before every micro-batch. Python's and NumPy's take ten times as long to seed and
are hardly used by models: in training they run on, and a checkpoint keeps their states. Before an item of a dataset is
fetched, all are seeded.
"""

from __future__ import annotations

import random
from enum import IntEnum
from typing import Any

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
    """Seed PyTorch's CPU generator, and the one of `device` if it has its own."""
    torch.default_generator.manual_seed(key)
    if device is not None and device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(key)


def generator_states() -> dict[str, Any]:
    """The states of Python's and NumPy's global generators, as tensors and numbers."""
    version, words, gauss = random.getstate()
    name, numpy_words, place, has_gauss, numpy_gauss = np.random.get_state()  # noqa: NPY002 - as above
    return {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
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
    words = numpy["words"].numpy().astype(np.uint32)
    np.random.set_state((numpy["name"], words, numpy["place"], numpy["has_gauss"], numpy["gauss"]))  # noqa: NPY002

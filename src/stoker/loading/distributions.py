"""Keyed numbers of other distributions than the uniform one, calculated for all keys at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from stoker.loading.keys import Keys, Stream, key_of, mix_keys

Numbers = npt.NDArray[np.float64]


def uniform(keys: Keys, *what: int) -> Numbers:
    """Numbers in (0, 1), one for each key [B]; for other numbers `what`, others."""
    bits = mix_keys(keys ^ np.uint64(key_of(Stream.MIXING, *what))) >> np.uint64(11)
    return (bits.astype(np.float64) + 0.5) / 2**53


def symmetric_beta(alpha: float, keys: Keys, *what: int) -> Numbers:
    """Numbers in [0, 1] with the distribution Beta(alpha, alpha), one for each key [B].

    As X / (X + Y) of two with Gamma(alpha, 1), by way of their logarithms: for a small alpha both may be below 1e-308.
    """
    one, other = (_log_gamma(alpha, keys, *what, part) for part in (0, 1))
    return 1 / (1 + np.exp(np.clip(other - one, -700, 700)))


def _log_gamma(alpha: float, keys: Keys, *what: int) -> Numbers:
    """Logarithms of numbers with the distribution Gamma(alpha, 1).

    Source: G. Marsaglia, W. W. Tsang, "A Simple Method for Generating Gamma Variables", ACM TOMS 26(3), 2000,
    https://doi.org/10.1145/358407.358414: rejection for alpha + 1, and the step from there to alpha in section 6. A
    key's draws do not depend on when others are accepted.
    """
    d = alpha + 2 / 3
    c = 1 / np.sqrt(9 * d)
    found = np.full(len(keys), np.nan)
    turn = 0
    while np.isnan(found).any():
        radius = np.sqrt(-2 * np.log(uniform(keys, *what, turn, 0)))
        x = radius * np.cos(2 * np.pi * uniform(keys, *what, turn, 1))
        v = np.maximum(1 + c * x, 1e-300) ** 3
        log_v = 3 * np.log(np.maximum(1 + c * x, 1e-300))
        accepted = np.log(uniform(keys, *what, turn, 2)) < 0.5 * x**2 + d - d * v + d * log_v
        accepted &= 1 + c * x > 0
        found = np.where(np.isnan(found) & accepted, np.log(d) + log_v, found)
        turn += 1
    return found + np.log(uniform(keys, *what, -1)) / alpha

from __future__ import annotations

import numpy as np
import pytest

from stoker.loading.order import keys_of_samples, symmetric_beta, uniform

KEYS = keys_of_samples(1234, np.arange(50_000))


def test_uniform_numbers_are_uniform_and_apart() -> None:
    """Never 0 or 1, whose logarithms have no end; other numbers for each key and each purpose."""
    values = uniform(KEYS, 0)
    assert 0 < values.min() < 1e-3
    assert 1 - 1e-3 < values.max() < 1
    assert abs(values.mean() - 0.5) < 5 * 0.2887 / 50_000**0.5
    assert abs(np.corrcoef(values, uniform(KEYS, 1))[0, 1]) < 5 / 50_000**0.5
    assert len(np.unique(values)) == 50_000


@pytest.mark.parametrize("alpha", [0.05, 0.2, 1.0, 4.0])
def test_beta_numbers_have_the_beta_distribution(alpha: float) -> None:
    """Against NumPy's: the largest gap between the two cumulative distributions (Kolmogorov and Smirnov's)."""
    ours, theirs = symmetric_beta(alpha, KEYS, 0), np.random.default_rng(0).beta(alpha, alpha, 50_000)
    grid = np.linspace(0, 1, 501)
    below = [np.searchsorted(np.sort(values), grid) / 50_000 for values in (ours, theirs)]
    assert np.abs(below[0] - below[1]).max() < 1.95 * (2 / 50_000) ** 0.5  # once in a thousand by chance
    assert 0 <= ours.min() < ours.max() <= 1


def test_a_keys_number_does_not_depend_on_the_others() -> None:
    """Nor on how often theirs were rejected."""
    assert np.allclose(symmetric_beta(0.3, KEYS[700:800], 5), symmetric_beta(0.3, KEYS, 5)[700:800], rtol=1e-12)

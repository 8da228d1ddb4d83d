from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.loadtesting.measurement import dependence, fails, holds, most_late, quantile_of, ranks


def _binomial_tail(n: int, q: float, least: int) -> float:
    """P(at least `least` of n), summed by hand."""
    return sum(math.comb(n, k) * q**k * (1 - q) ** (n - k) for k in range(least, n + 1))


@pytest.mark.parametrize(("n", "q"), [(10, 0.5), (400, 0.99), (1000, 0.99), (1000, 0.9)])
def test_ranks_leave_at_most_the_tails(n: int, q: float) -> None:
    """Each rank is the tightest whose tail of the binomial distribution is within 2.5 %."""
    low, high = ranks(n, q)
    assert _binomial_tail(n, q, high) <= 0.025 < _binomial_tail(n, q, high - 1)
    assert 1 - _binomial_tail(n, q, low) <= 0.025 < 1 - _binomial_tail(n, q, low + 1)


def test_ranks_of_many_samples_agree_with_the_exact_ones() -> None:
    """The normal approximation takes over without a jump."""
    exact, approximate = ranks(20_000, 0.99), ranks(20_001, 0.99)
    assert np.abs(np.subtract(exact, approximate)).max() <= 3


def test_too_few_requests_bound_nothing() -> None:
    """367 answers cannot bound a p99 from above with 97.5 % on one side; 368 can."""
    fast = np.full(367, 0.001)
    assert quantile_of(fast, 0.99).high == math.inf
    assert most_late(367, 0.99) == -1
    assert quantile_of(np.full(368, 0.001), 0.99).high == 0.001
    assert most_late(368, 0.99) == 0


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    """Of 400 experiments with exponential latencies, about 95 % of the intervals hold the true p90."""
    random, truth = np.random.default_rng(0), -math.log(0.1)
    intervals = [quantile_of(random.exponential(size=500), 0.9) for _ in range(400)]
    covered = sum(one.low <= truth <= one.high for one in intervals)
    assert 370 <= covered <= 400


def test_requests_that_are_alike_for_a_while_say_less() -> None:
    """Latencies that come in runs of 50 have a wider interval than the same in random order."""
    random = np.random.default_rng(1)
    runs = np.repeat(random.exponential(size=200), 50)
    mixed = random.permutation(runs)
    assert dependence(runs > np.median(runs)) > 10
    wide, narrow = quantile_of(runs, 0.9), quantile_of(mixed, 0.9)
    assert wide.seconds == narrow.seconds
    assert wide.high - wide.low > 2 * (narrow.high - narrow.low)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=600), st.sampled_from([0.5, 0.9, 0.99]))
def test_the_interval_is_about_the_quantile_and_agrees_with_the_tests(values: list[float], q: float) -> None:
    """The quantile is between its bounds; what is above is held, and nothing is both held and missed."""
    latencies = np.array(values)
    found = quantile_of(latencies, q)
    assert found.low <= found.seconds <= found.high
    if math.isfinite(found.high):
        assert holds(latencies, q, found.high)
    assert not (holds(latencies, q, found.seconds) and fails(latencies, q, found.seconds))


def test_failed_requests_count_as_slower_than_anything() -> None:
    """With 2 % unanswered no p99 is held, however fast the others were."""
    latencies = np.full(2000, 0.001)
    latencies[::50] = np.inf
    found = quantile_of(latencies, 0.99)
    assert found.seconds == math.inf
    assert fails(latencies, 0.99, 1e9)

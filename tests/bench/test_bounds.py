"""Ratios of times and their upper bounds."""

from __future__ import annotations

import math
import random

import pytest

from bench.forecast.bounds import regret, slowdown


def test_a_slowdown_is_the_median_ratio_bounded_by_the_largest_of_five() -> None:
    """Pairs of one process belong together; a process in which the other was slow does not loosen the bound."""
    assert slowdown([1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 2.0, 300.0, 4.0, 5.0]) == (1.0, 1.0)


def test_more_processes_tighten_the_bound() -> None:
    """Of eight ratios, the second largest bounds the median: two or more of eight coins show heads in 96.5 %."""
    ratios = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 9.0]
    assert slowdown(ratios, [1.0] * 8) == (pytest.approx(1.35), 1.6)


def test_few_processes_bound_nothing() -> None:
    """The largest of four is below the median too often: in one of 16."""
    assert slowdown([1.0] * 4, [1.0] * 4) == (1.0, math.inf)


def test_the_bound_holds_in_31_of_32_experiments() -> None:
    """Of five noisy ratios about 1.02, all are below it in one experiment of 32."""
    chance = random.Random(0)

    def experiment() -> float:
        pairs = [(1.02 * chance.lognormvariate(0, 0.02), chance.lognormvariate(0, 0.02)) for _ in range(5)]
        return slowdown(*zip(*pairs, strict=True))[1]

    missed = sum(experiment() < 1.02 for _ in range(4000)) / 4000
    assert missed == pytest.approx(1 / 32, abs=0.01)


def test_who_is_best_has_no_regret() -> None:
    """The fastest by far has a regret of nothing, with certainty."""
    assert regret({0: [1.0, 1.01, 0.99, 1.0, 1.0], 1: [2.0, 2.01, 2.02, 2.0, 2.0]}, chosen=0) == (0, 1.0, 1.0)


def test_a_close_second_may_still_be_better() -> None:
    """The best by chance has a bound above 1 where another may be faster in truth."""
    best, ratio, bound = regret({0: [1.0, 1.1, 0.9, 1.0, 1.0], 1: [1.05, 0.95, 1.05, 1.1, 1.1]}, chosen=0)
    assert (best, ratio) == (0, 1.0)
    assert bound > 1.05


def test_the_slower_one_regrets_its_slowness() -> None:
    """Ten per cent slower in every process is a regret of ten per cent."""
    best, ratio, bound = regret({0: [1.0, 2.0, 3.0, 4.0, 5.0], 1: [1.1, 2.2, 3.3, 4.4, 5.5]}, chosen=1)
    assert (best, ratio, bound) == (0, pytest.approx(1.1), pytest.approx(1.1))

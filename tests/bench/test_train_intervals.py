"""Ratios of rates, and their intervals."""

from __future__ import annotations

import random

import pytest

from bench.train.intervals import interval_of, ratio_of


def test_a_ratio_is_of_the_same_round() -> None:
    """A round in which the machine was slow for both counts as much as a fast one."""
    found = ratio_of([[2.0, 20.0, 200.0]], [[1.0, 10.0, 100.0]])
    assert found is not None
    assert (found.median, found.low, found.high) == (2.0, 2.0, 2.0)


def test_a_round_counts_only_if_it_does_for_both() -> None:
    """Slices that others disturbed are left out with their partners."""
    found = ratio_of([[2.0, None, 9.0, 2.0]], [[1.0, 1.0, None, 1.0]])
    assert found is not None
    assert (found.median, found.rounds) == (2.0, 2)


def test_nothing_comes_of_no_round() -> None:
    """Where nothing counts there is no figure."""
    assert ratio_of([[None, 2.0]], [[1.0, None]]) is None
    assert interval_of([[]]) is None


def test_sets_that_disagree_widen_the_interval() -> None:
    """Rounds of one process agree with each other; what another process would give is between the sets."""
    within = interval_of([[1.0, 1.01, 0.99] * 4, [1.0, 1.01, 0.99] * 4])
    between = interval_of([[1.0, 1.01, 0.99] * 4, [1.3, 1.31, 1.29] * 4])
    assert within is not None
    assert between is not None
    assert within.high - within.low < 0.03
    assert between.low < 1.05
    assert between.high > 1.25


def test_the_interval_holds_the_truth_in_most_experiments() -> None:
    """Of ten noisy rounds about 1.25, the interval of 95 % holds it in nine experiments of ten, at the least."""
    chance = random.Random(0)
    held = 0
    for _ in range(40):
        found = interval_of([[chance.gauss(1.25, 0.1) for _ in range(10)]])
        assert found is not None
        held += found.low <= 1.25 <= found.high
    assert held >= 36


def test_the_same_values_give_the_same_interval() -> None:
    """Results can be computed again from their file."""
    values = [[1.0, 1.4, 1.2, 1.1]]
    assert interval_of(values) == interval_of(values)


def test_sets_must_belong_together() -> None:
    """A set of one side without the other's is our own bug."""
    with pytest.raises(ValueError, match="zip"):
        ratio_of([[1.0]], [[1.0], [2.0]])

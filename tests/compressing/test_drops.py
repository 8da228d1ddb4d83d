"""Bounds on what a candidate loses."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.compressing.scores import corrected, drop_interval, drop_of, largest_loss, rows_needed, rows_to_tell


def hits(rows: int, wrong: int = 0) -> np.ndarray:
    """Scores of a classifier that is right but for some rows."""
    return np.concatenate([np.zeros(wrong), np.ones(rows - wrong)])


def test_unchanged_rows_bound_the_drop_by_the_rule_of_three() -> None:
    """A candidate that changed none of n rows may still change about 3/n of all rows; as many as needed pass it."""
    original = hits(1000, 100)
    assert drop_interval(original, original, confidence=0.95).high == pytest.approx(1 - 0.05 ** (1 / 1000))
    for rows, passes in ((817, True), (816, False)):
        assert (drop_interval(hits(rows), hits(rows), confidence=corrected(0.95, 3)).high <= 0.005) == passes


@pytest.mark.parametrize("seed", [0, 1])
def test_a_harmful_candidate_passes_no_more_often_than_stated(seed: int) -> None:
    """Of candidates that lose 0.5 % of all rows, at most 1.67 % lose so few of 1000 that the bound lets them pass."""
    rows, allowed, confidence = 1000, 0.005, corrected(0.95, 3)
    chances = [math.comb(rows, lost) * allowed**lost * (1 - allowed) ** (rows - lost) for lost in range(20)]
    passing = [
        lost
        for lost in range(20)
        if drop_interval(hits(rows), hits(rows, lost), confidence=confidence, seed=seed).high <= allowed
    ]
    assert passing == [0]
    assert sum(chances[lost] for lost in passing) <= 1 - confidence


@pytest.mark.parametrize("lost", [0, 1, 2, 5, 30])
def test_the_bound_of_lost_rows_is_the_exact_one(lost: int) -> None:
    """Were the bound the true share, so few would be lost in 5 % of samples, as Clopper and Pearson ask."""
    rows = 400
    bound = drop_interval(hits(rows), hits(rows, lost), confidence=0.95).high
    so_few = sum(math.comb(rows, count) * bound**count * (1 - bound) ** (rows - count) for count in range(lost + 1))
    assert so_few == pytest.approx(0.05, rel=0.1)


@pytest.mark.slow
def test_the_bound_holds_as_often_as_it_says() -> None:
    """Over many samples of rows, the true drop is above the bound at most in about 5 % of them."""
    draw, true_drop, missed = np.random.default_rng(0), 0.02, 0
    for seed in range(200):
        original = np.ones(400)
        candidate = (draw.random(400) >= true_drop).astype(float)
        missed += drop_interval(original, candidate, confidence=0.95, seed=seed).high < true_drop
    assert missed <= 0.09 * 200  # 5 % and three standard errors


@given(st.integers(2, 60), st.integers(0, 60), st.integers(0, 10))
def test_bounds_enclose_the_drop(rows: int, wrong: int, seed: int) -> None:
    """Whatever was lost or won, the value is within its bounds, and the other way round they are mirrored."""
    original, candidate = hits(rows, min(1, rows)), hits(rows, min(wrong, rows))
    found = drop_interval(original, candidate, confidence=0.9, seed=seed)
    back = drop_interval(candidate, original, confidence=0.9, seed=seed)
    assert found.low <= found.value == drop_of(original, candidate) <= found.high
    assert back.value == pytest.approx(-found.value)


@given(st.floats(0.001, 0.5), st.floats(0.8, 0.999))
def test_rows_needed_are_the_fewest_that_tell(max_drop: float, confidence: float) -> None:
    """With that many rows a harm of `max_drop` would show at the confidence, with one less it would not."""
    rows = rows_needed(max_drop, 1.0, confidence)
    assert (1 - max_drop) ** rows <= (1 - confidence) * (1 + 1e-9)
    assert rows == 2 or (1 - max_drop) ** (rows - 1) > (1 - confidence) * (1 - 1e-9)


def test_several_candidates_share_the_confidence() -> None:
    """Bonferroni: with three candidates each may be wrong a third as often."""
    assert corrected(0.95, 3) == pytest.approx(1 - 0.05 / 3)


def test_more_confidence_widens_the_bound() -> None:
    """A bound that holds more often is farther out."""
    original, candidate = hits(500), hits(500, 10)
    bounds = [drop_interval(original, candidate, confidence=level).high for level in (0.8, 0.95, 0.99)]
    assert bounds == sorted(bounds)
    assert bounds[0] < bounds[2]


def test_many_distinct_scores_are_drawn_row_by_row() -> None:
    """Scores that are all different give about the bound of the normal approximation."""
    draw = np.random.default_rng(1)
    original = draw.normal(size=2000)
    candidate = original - draw.normal(0.01, 0.1, size=2000)
    found = drop_interval(original, candidate, confidence=0.95)
    spread = largest_loss(original, candidate)
    assert found.high - found.value < 1.7 * 0.1 / 2000**0.5 + 3 * spread / 2000
    assert found.high - found.value > 1.6 * 0.1 / 2000**0.5


def test_rows_to_tell_says_nothing_of_a_candidate_that_loses_too_much() -> None:
    """More rows would not bring the bound below a drop that is larger."""
    assert rows_to_tell(hits(500), hits(500, 50), 0.01, 0.95) is None
    near, far = (rows_to_tell(hits(500), hits(500, 4), allowed, 0.95) for allowed in (0.009, 0.05))
    assert near is not None
    assert far is not None
    assert near > 5 * far

"""What is allowed of answers after an export."""

from __future__ import annotations

import numpy as np
import pytest

from stoker.artifacts import excess
from stoker.exporting.proving import tolerance_of
from stoker.records import Proof

BOXES, SCORES = np.linspace(0, 640, 12, dtype=np.float32).reshape(3, 4), np.array([0.9, 0.5, 0.1], np.float32)


def measured(error: float) -> list[Proof]:
    """What an engine was found to differ by."""
    return [Proof(what="an engine", error=error, limit=1e-3)]


@pytest.mark.parametrize(("error", "share"), [(1e-7, 1e-4), (3e-5, 3e-4), (9e-4, 1e-3)])
def test_one_output_allows_a_share_of_its_largest_answer(error: float, share: float) -> None:
    """Ten times what was measured, between the floor and the limit."""
    found = tolerance_of(measured(error), {"y": BOXES}, 1e-3)
    assert found.relative == pytest.approx(share)
    assert found.absolute == pytest.approx(640 * share)


def test_an_output_of_large_numbers_allows_nothing_to_one_of_small_ones() -> None:
    """Boxes in pixels beside scores: a score that is off by 0.02 is not the same answer, rounding of a box is."""
    answers = {"boxes": BOXES, "scores": SCORES}
    tolerance = tolerance_of(measured(5e-7), answers, 1e-3)
    assert excess({**answers, "scores": SCORES + np.float32(0.02)}, answers, tolerance) > 1
    assert excess({**answers, "boxes": BOXES + np.float32(640 * 5e-7)}, answers, tolerance) < 1


def test_what_is_filled_in_allows_nothing_to_the_others() -> None:
    """Logits of masked classes of -1e9 are no scale of those that count; class numbers have none."""
    logits = np.array([[1.5, -1e9, 0.5], [-1e9, 2.0, 0.1]], np.float32)
    answers = {"logits": logits, "best": np.array([0, 40_000])}
    tolerance = tolerance_of(measured(1e-6), answers, 1e-3)
    assert tolerance.absolute == pytest.approx(2e-4)
    assert excess({**answers, "logits": logits + np.float32(0.01)}, answers, tolerance) > 1
    assert excess({**answers, "best": np.array([0, 40_001])}, answers, tolerance) > 1

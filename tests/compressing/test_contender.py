"""Whether a candidate's answers have anything to do with the original's."""

from __future__ import annotations

import numpy as np
import pytest

from stoker.compressing.contender import is_finite_like, likeness

LOGITS = np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32)


def test_answers_are_like_themselves_and_unlike_others() -> None:
    """The least over outputs counts."""
    answers = {"a": LOGITS, "b": LOGITS[:, :2]}
    assert likeness(answers, answers) == pytest.approx(1)
    assert likeness({**answers, "b": -LOGITS[:, :2]}, answers) == pytest.approx(-1)


@pytest.mark.parametrize("fill", [-1e9, -np.inf])
def test_what_the_original_fills_in_makes_nothing_alike(fill: float) -> None:
    """Logits of masked classes: they do not make unrelated answers similar."""
    original = {"y": np.where(np.arange(6) < 3, LOGITS, np.float32(fill))}
    other = {"y": np.where(np.arange(6) < 3, -LOGITS, np.float32(fill))}
    assert is_finite_like(other, original)
    assert likeness(other, original) == pytest.approx(-1)
    assert likeness(original, original) == pytest.approx(1)

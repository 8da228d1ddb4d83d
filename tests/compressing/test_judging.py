"""Decisions on measured values."""

import numpy as np
import pytest

from stoker.compressing.gates import accepted, fast_enough, front, require_rows, selected
from stoker.errors import BadJob
from stoker.records.compression import CompressionTrial, Interval


def hits(rows: int, wrong: int = 0) -> np.ndarray:
    """Scores of a classifier that is right but for some rows."""
    return np.concatenate([np.zeros(wrong), np.ones(rows - wrong)])


def trial(name: str, *, num_bytes: int = 100, pace: float | None = 1.0, lost: float = 0.0) -> CompressionTrial:
    """A trial that was measured."""
    return CompressionTrial(
        name=name,
        how="",
        engine="openvino",
        precision="int8",
        outcome="passed",
        reason="",
        num_bytes=num_bytes,
        pace=pace,
        selection_drop=lost,
    )


def test_a_harmless_candidate_is_accepted_and_a_harmful_one_is_not() -> None:
    """The bound, not the drop, is held against what is allowed."""
    _, good = accepted(hits(3000), hits(3000, 3), allowed=0.005, confidence=0.95, finalists=1, seed=0)
    drop, bad = accepted(hits(3000), hits(3000, 13), allowed=0.005, confidence=0.95, finalists=1, seed=0)
    assert good.passed
    assert drop.value < 0.005 < drop.high
    assert not bad.passed
    assert "rows in all would tell" in bad.reason


def test_what_one_finalist_may_lose_is_too_much_among_three() -> None:
    """The more are held against the same rows, the more each has to prove."""
    alone, among = (
        accepted(hits(2000), hits(2000, 10), allowed=0.00875, confidence=0.95, finalists=count, seed=0)[1]
        for count in (1, 3)
    )
    assert alone.passed
    assert not among.passed


def test_too_few_rows_are_refused_with_the_number_it_takes() -> None:
    """Not even an unchanged model could pass, so nothing is judged; with the rows it takes, something is."""
    with pytest.raises(BadJob, match=r"100 rows for acceptance .* it takes 817") as caught:
        require_rows(100, hits(50, 5), 0.005, 0.95)
    assert "0.041" in str(caught.value.remedy)
    require_rows(817, hits(50, 5), 0.005, 0.95)


def test_selection_goes_by_the_drop_itself() -> None:
    """A drop within what is allowed passes, one above does not."""
    assert selected(hits(200), hits(200, 1), 0.005).passed
    assert not selected(hits(200), hits(200, 2), 0.005).passed


def test_int8_has_to_be_a_tenth_faster_at_the_lower_bound() -> None:
    """A float candidate only has to be measurably faster."""
    gain = Interval(value=1.2, low=1.05, high=1.4)
    assert not fast_enough(gain, "bf16", is_lossy=True).passed
    assert fast_enough(gain, "fp32", is_lossy=False).passed
    assert not fast_enough(Interval(value=1.1, low=0.99, high=1.3), "fp32", is_lossy=False).passed


def test_the_front_has_no_trial_that_another_beats() -> None:
    """What is larger, slower and worse than another is not on it; what was never timed takes no part."""
    trials = [
        trial("small", num_bytes=25, pace=3.0, lost=0.004),
        trial("exact", num_bytes=100, pace=1.0, lost=0.0),
        trial("beaten", num_bytes=30, pace=2.9, lost=0.005),
        trial("untimed", num_bytes=1, pace=None),
    ]
    assert front(trials) == {"small", "exact"}

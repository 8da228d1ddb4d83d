"""What passes: decisions on measured values, each with the reason in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from stoker.compressing.drops import Scores, corrected, drop_interval, largest_loss, rows_needed, rows_to_tell
from stoker.errors import BadJob
from stoker.records.compression import CompressionTrial, Gate, Interval

LEAST_GAIN_LOSSY = 1.1
"""How much faster than the best other candidate one that is pruned or in 8 bits is at least, at the lower bound: it
costs accuracy, and a tenth more speed is what that is worth."""

LEAST_GAIN_LOSSLESS = 1.0
"""Any other candidate is measurably faster, or not worth it."""

MOST_FINALISTS = 3
"""Candidates that are held against the rows of acceptance. Each more takes confidence from all."""


@dataclass(frozen=True)
class Judgement:
    """Whether something passed, the gate it was held against, and what to tell where it did not."""

    gate: Gate
    reason: str

    @property
    def passed(self) -> bool:
        """Whether the gate was passed."""
        return self.gate.passed


def foreseen_bound(original: Scores, candidate: Scores, rows: int, confidence: float) -> float:
    """The bound on the drop that `rows` rows of acceptance would likely give, from those of selection."""
    losses = original - candidate
    z = NormalDist().inv_cdf(confidence)
    return float(losses.mean()) + z * float(losses.std()) / math.sqrt(rows) + largest_loss(original, candidate) / rows


def selected(original: Scores, candidate: Scores, allowed: float) -> Judgement:
    """Whether a candidate keeps within what is allowed on the rows of selection, bounds aside."""
    drop = float(np.mean(original - candidate))
    what = f"the drop on {len(original)} rows for selection"
    gate = Gate(what=what, passed=drop <= allowed, found=drop, limit=allowed)
    return Judgement(gate, f"loses {drop:.4g} on {len(original)} rows for selection, {allowed:.4g} is allowed")


def fast_enough(gain: Interval, rival: str, *, is_lossy: bool) -> Judgement:
    """Whether a candidate is faster than the best that is neither pruned nor in 8 bits, at the lower bound."""
    least = LEAST_GAIN_LOSSY if is_lossy else LEAST_GAIN_LOSSLESS
    passed = gain.low > least
    gate = Gate(what=f"how much faster than {rival}, at least", passed=passed, found=gain.low, limit=least)
    return Judgement(
        gate, f"{gain.value:.2f}× as fast as {rival} ({gain.low:.2f} to {gain.high:.2f}), wanted more than {least:g}×"
    )


def accepted(
    original: Scores,
    candidate: Scores,
    *,
    allowed: float,
    confidence: float,
    finalists: int,
    seed: int,
    others: int = 0,
) -> tuple[Interval, Judgement]:
    """The drop on rows that nothing was chosen by, and whether it keeps within what is allowed.

    With several finalists each bound holds at a higher confidence, so that all hold together at `confidence`. `others`
    are the validation rows that other uses take, for how many to give in all.
    """
    each = corrected(confidence, finalists)
    drop = drop_interval(original, candidate, confidence=each, seed=seed)
    share = f"{100 * each:.1f} %".replace(".0 ", " ")
    gate = Gate(
        what=f"the drop at most, with {share} confidence, on {len(original)} rows for acceptance",
        passed=drop.high <= allowed, found=drop.high, limit=allowed,
    )  # fmt: skip
    reason = f"may lose up to {drop.high:.4g} ({drop.value:.4g} on {len(original)} rows), {allowed:.4g} is allowed"
    if drop.value <= allowed and (rows := rows_to_tell(original, candidate, allowed, each)):
        reason += f"; about {rows + others:,} rows in all would tell, {rows:,} of them for acceptance"
    return drop, Judgement(gate, reason)


def require_rows(rows: int, original: Scores, allowed: float, confidence: float, others: int = 0) -> None:
    """Refuse to judge by so few rows that not even a model that changes nothing could pass.

    Args:
        rows: those of acceptance.
        original: the original's scores, of any rows: how far they lie apart is the most that a row can lose.
        allowed: the drop that is allowed.
        confidence: of all bounds together.
        others: validation rows that other uses take.

    Raises:
        BadJob: they are too few; says how many it takes, and what these could show.
    """
    worst, each = largest_loss(original, original), corrected(confidence, MOST_FINALISTS)
    needed = rows_needed(allowed, worst, each)
    if rows < needed:
        could = worst * (1 - (1 - each) ** (1 / rows))
        raise BadJob(
            f"{rows} rows for acceptance cannot show a drop below {allowed:.4g} "
            f"with {100 * confidence:g} % confidence: it takes {needed:,}",
            remedy=f"Give {needed + others:,} validation rows in all, or allow a drop of {1.01 * could:.2g} or more.",
        )


def front(trials: Sequence[CompressionTrial]) -> frozenset[str]:
    """Names of the trials that no other beats: as good or better in size, pace and metric, and better in one.

    Those that were rejected before they were timed take no part.
    """
    measured = {
        one.name: (float(one.num_bytes), 1 / one.pace, _drop(one))
        for one in trials
        if one.num_bytes is not None and one.pace is not None
    }
    return frozenset(
        name
        for name, own in measured.items()
        if not any(_beats(other, own) for rival, other in measured.items() if rival != name)
    )


def _drop(trial: CompressionTrial) -> float:
    if trial.drop is not None:
        return trial.drop.value
    return trial.selection_drop or 0.0


def _beats(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return all(a <= b for a, b in zip(one, other, strict=True)) and one != other

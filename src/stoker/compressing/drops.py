"""How much of a metric a candidate loses, with a bound that holds at a stated confidence.

What: the paired bootstrap. Each row has a score under the original and under the candidate; the mean of the differences
is the drop, and drawing rows with replacement tells how far it may be off. One more row is put among them, which lost
all a row can lose: without it, a candidate that changed none of n rows would have a bound of zero, while up to 3/n of
all rows may change (the rule of three, which this reproduces).
Use when: the metric is a mean over rows. Rows must be independent draws of what the model will be asked.
Costs: RESAMPLES sums of as many draws as there are rows.
Source: Efron and Tibshirani 1993, "An Introduction to the Bootstrap", chapter 13 (percentile interval); Hanley and
Lippman-Hand 1983, "If nothing goes wrong, is everything all right?" (rule of three); Bonferroni for several candidates.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from stoker.records.compression import Interval

RESAMPLES = 4000
CONFIDENCE = 0.95
_CHUNK_DRAWS = 4_000_000
"""Draws held at once: 32 MB of them."""

Scores = NDArray[np.float64]
"""One score a row [N]; higher is better."""


def drop_of(original: Scores, candidate: Scores) -> float:
    """The mean loss of score from the original to the candidate; negative where the candidate is better."""
    return float(np.mean(original - candidate))


def drop_interval(original: Scores, candidate: Scores, *, confidence: float, seed: int = 0) -> Interval:
    """The drop with a lower and an upper bound, each of which holds with `confidence` on its own.

    Args:
        original: scores [N] of the original.
        candidate: scores [N] of the candidate on the same rows.
        confidence: such as 0.95; for several candidates see `corrected`.
        seed: of the draws; equal seeds, equal bounds.
    """
    losses = original - candidate
    worst = largest_loss(original, candidate)
    ends = [
        np.quantile(_means(np.append(losses, extreme), seed), quantile)
        for extreme, quantile in ((-worst, 1 - confidence), (worst, confidence))
    ]
    value = drop_of(original, candidate)
    return Interval(value=value, low=min(value, float(ends[0])), high=max(value, float(ends[1])))


def corrected(confidence: float, num_candidates: int) -> float:
    """The confidence for each of several candidates, so that all bounds hold together with `confidence`.

    >>> round(corrected(0.95, 2), 4)
    0.975
    """
    return 1 - (1 - confidence) / max(1, num_candidates)


def largest_loss(original: Scores, candidate: Scores) -> float:
    """The most a row can lose, as far as these rows tell: how far apart any two scores of either model lie."""
    both = np.concatenate([original, candidate])
    spread = float(both.max() - both.min())
    return spread or float(np.abs(both).max()) or 1.0


def rows_needed(max_drop: float, worst: float, confidence: float) -> int:
    """Rows with which a candidate that changes nothing is told from one that loses more than `max_drop`.

    If a share of rows p = max_drop / worst lost everything, none of n rows would show it with probability (1 - p)^n.

    >>> rows_needed(0.005, 1.0, 0.95)
    598
    """
    share = min(max(max_drop / worst, 1e-15), 1 - 1e-9)
    return max(2, math.ceil(math.log(1 - confidence) / math.log1p(-share)))


def rows_to_tell(original: Scores, candidate: Scores, max_drop: float, confidence: float) -> int | None:
    """About how many rows it takes to show that a candidate keeps within `max_drop`; None where more would not help.

    From the normal approximation: the bound comes down to the drop as one over the root of the rows.
    """
    losses = original - candidate
    room = max_drop - float(losses.mean())
    if room <= 0:
        return None
    z = NormalDist().inv_cdf(confidence)
    spread = max(float(losses.std()), largest_loss(original, candidate) / len(losses))
    return max(
        rows_needed(max_drop, largest_loss(original, candidate), confidence), math.ceil((z * spread / room) ** 2)
    )


def _means(losses: Scores, seed: int) -> Scores:
    """Means of RESAMPLES draws with replacement, each of as many rows; divided by the rows without the added one."""
    generator = np.random.default_rng(seed)
    values, counts = np.unique(losses, return_counts=True)
    if len(values) <= 64:  # few distinct losses, as of accuracy: draw how often each comes up
        draws = generator.multinomial(len(losses), counts / len(losses), size=RESAMPLES)
        means: Scores = draws @ values / (len(losses) - 1)
        return means
    chunk = max(1, _CHUNK_DRAWS // len(losses))
    sums = [
        losses[generator.integers(0, len(losses), size=(min(chunk, RESAMPLES - done), len(losses)))].sum(axis=1)
        for done in range(0, RESAMPLES, chunk)
    ]
    return np.concatenate(sums) / (len(losses) - 1)

"""How often devices fail, and how often a run should therefore save its state. Pure arithmetic.

What: the interval between checkpoints that loses the least time, by what one holds training up for and by how often
something breaks (Young's first order with Daly's correction); and the time that is lost all the same.
Assumes that failures come independently at one rate, and that a failure of any device costs the work of all of them
since the last checkpoint. `MTBF_H` are stated rates, for who knows none of their own.
Sources: J. W. Young, "A first order approximation to the optimum checkpoint interval", Communications of the ACM 17(9),
1974, https://doi.org/10.1145/361147.361115; J. T. Daly, "A higher order estimate of the optimum checkpoint interval for
restart dumps", Future Generation Computer Systems 22(3), 2006, https://doi.org/10.1016/j.future.2004.11.016, equation
37; "The Llama 3 Herd of Models", 2024, https://arxiv.org/abs/2407.21783, section 3.3.4.
"""

from __future__ import annotations

import math

MTBF_H = {"cuda": 16_384 * 54 * 24 / 419, "cpu": 24.0}
"""Mean time of one device between two failures [h], by kind. Of GPUs: 419 unexpected interruptions of Llama 3's
training, in 54 days on 16,384 of them, whatever the cause. Of a CPU, often somebody's own machine: one a day is
assumed."""

LEAST_INTERVAL_S = 30.0
"""Checkpoints are no closer together than this [s]."""

CHEAP_SHARE = 1e-3
"""Failures that no rate describes happen too, so a checkpoint is saved more often than they ask for, as long as all of
them hold training up for no more than this share of the time."""


def mtbf_h(kind: str, given_h: float | None = None) -> float:
    """Mean time of a device of this kind between two failures [h]: as it was given, or the stated one.

    >>> round(mtbf_h("cuda"), -2), mtbf_h("cpu"), mtbf_h("cuda", 100.0)
    (50700.0, 24.0, 100.0)
    """
    return MTBF_H[kind] if given_h is None else given_h


def daly_interval_s(blocked_s: float, mtbf_s: float) -> float:
    """The interval between checkpoints that loses the least time [s].

    >>> round(daly_interval_s(1.0, 99 * 3600.0))  # 512 GPUs at Llama 3's rate
    844

    Args:
        blocked_s: what one holds training up for [s].
        mtbf_s: mean time of the whole run between two failures [s].
    """
    if blocked_s >= 2 * mtbf_s:
        return mtbf_s
    share = blocked_s / (2 * mtbf_s)
    return math.sqrt(2 * blocked_s * mtbf_s) * (1 + math.sqrt(share) / 3 + share / 9) - blocked_s


def checkpoint_interval_s(blocked_s: float, write_s: float, mtbf_s: float) -> float:
    """Time between checkpoints [s], in whole seconds.

    It is `daly_interval_s`, or less where that is cheap (CHEAP_SHARE); at least LEAST_INTERVAL_S, and at least what
    writing takes beside training, since the next one would wait for it.

    >>> checkpoint_interval_s(2e-3, 0.04, 24 * 3600.0), checkpoint_interval_s(1.0, 50.0, 6337 * 3600.0)
    (30.0, 1000.0)
    """
    least = max(LEAST_INTERVAL_S, write_s)
    return float(round(max(least, min(daly_interval_s(blocked_s, mtbf_s), blocked_s / CHEAP_SHARE))))


def lost_s(run_s: float, interval_s: float, restart_s: float, mtbf_s: float) -> float:
    """What failures are expected to cost a run of `run_s` [s]: of each, half an interval's work and the restart."""
    return run_s / mtbf_s * (interval_s / 2 + restart_s)

"""Failure rates of devices, and the checkpoint interval that follows from them. Pure arithmetic.

What: the interval between checkpoints that loses the least time, given how long one blocks training and how often
devices fail (Young's first order with Daly's correction); and the time that failures are expected to cost.
Assumes independent failures at one rate, each of which costs the work of all devices since the last checkpoint.
`MTBF_H` are default rates.
Sources: J. W. Young, "A first order approximation to the optimum checkpoint interval", Communications of the ACM 17(9),
1974, https://doi.org/10.1145/361147.361115; J. T. Daly, "A higher order estimate of the optimum checkpoint interval for
restart dumps", Future Generation Computer Systems 22(3), 2006, https://doi.org/10.1016/j.future.2004.11.016, equation
37; "The Llama 3 Herd of Models", 2024, https://arxiv.org/abs/2407.21783, section 3.3.4.
"""

from __future__ import annotations

import math

MTBF_H = {"cuda": 16_384 * 54 * 24 / 419, "cpu": 24.0}
"""Mean time between failures of one device [h], by kind. GPUs: 419 unexpected interruptions of Llama 3's training in 54
days on 16,384 of them, of any cause. CPUs, often a personal machine: one a day is assumed."""

LEAST_INTERVAL_S = 30.0
"""Shortest interval between checkpoints [s]."""

CHEAP_SHARE = 1e-3
"""Share of the time that checkpoints may block training [0 to 1]: up to it, they are saved more often than the failure
rate requires, because other failures happen too."""


def mtbf_h(kind: str, given_h: float | None = None) -> float:
    """Mean time between failures of a device of this kind [h]: the given one, or the default.

    >>> round(mtbf_h("cuda"), -2), mtbf_h("cpu"), mtbf_h("cuda", 100.0)
    (50700.0, 24.0, 100.0)
    """
    return MTBF_H[kind] if given_h is None else given_h


def daly_interval_s(blocked_s: float, mtbf_s: float) -> float:
    """The interval between checkpoints that loses the least time [s].

    >>> round(daly_interval_s(1.0, 99 * 3600.0))  # 512 GPUs at Llama 3's rate
    844

    Args:
        blocked_s: time that one checkpoint blocks training [s].
        mtbf_s: mean time between failures of the whole run [s].
    """
    if blocked_s >= 2 * mtbf_s:
        return mtbf_s
    share = blocked_s / (2 * mtbf_s)
    return math.sqrt(2 * blocked_s * mtbf_s) * (1 + math.sqrt(share) / 3 + share / 9) - blocked_s


def checkpoint_interval_s(blocked_s: float, write_s: float, mtbf_s: float) -> float:
    """Time between checkpoints [s], in whole seconds.

    It is `daly_interval_s`, or less if that is cheap (CHEAP_SHARE); at least LEAST_INTERVAL_S and the time that writing
    takes during training, since the next checkpoint would wait for it.

    >>> checkpoint_interval_s(2e-3, 0.04, 24 * 3600.0), checkpoint_interval_s(1.0, 50.0, 6337 * 3600.0)
    (30.0, 1000.0)
    """
    least = max(LEAST_INTERVAL_S, write_s)
    return float(round(max(least, min(daly_interval_s(blocked_s, mtbf_s), blocked_s / CHEAP_SHARE))))


def lost_s(run_s: float, interval_s: float, restart_s: float, mtbf_s: float) -> float:
    """Expected cost of failures in a run of `run_s` [s]: for each, half an interval's work and the restart."""
    return run_s / mtbf_s * (interval_s / 2 + restart_s)

"""Fitting a few positive parameters, each within its range: coordinate descent on their logarithms.

The losses here have steps (tiles, waves), so nothing needs a gradient, and have few parameters, so nothing needs speed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ranges = Mapping[str, tuple[float, float]]


def typical(errors: Floats, limit: float = 0.5) -> float:
    """Mean absolute error, each point's held to `limit`: what a few broken measurements cannot drag along."""
    return float(np.mean(np.minimum(np.abs(errors), limit)))


def descend(
    loss: Callable[[dict[str, float]], float],
    start: Mapping[str, float],
    ranges: Ranges,
    rounds: int = 20,
    step: float = 0.3,
) -> dict[str, float]:
    """The parameters, within `ranges`, at which `loss` is small.

    Each in turn goes up or down by a factor; a factor that helps grows, one that does not shrinks.
    """
    best = {name: min(max(value, ranges[name][0]), ranges[name][1]) for name, value in start.items()}
    least = loss(best)
    steps = dict.fromkeys(best, step)
    for _ in range(rounds):
        for name, (low, high) in ((name, ranges[name]) for name in best):
            for sign in (1, -1):
                value = min(max(best[name] * float(np.exp(sign * steps[name])), low), high)
                trial = best | {name: value}
                if value != best[name] and (reached := loss(trial)) < least:
                    best, least = trial, reached
                    steps[name] *= 1.3
                    break
            else:
                steps[name] *= 0.6
    return best

"""Forecasts against measurements: signed errors, and what is said of all of them together."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from stoker.records import Estimate


@dataclass(frozen=True, kw_only=True)
class Residual:
    """One quantity of one case: `error` is forecast over measured less one.

    `is_inside` says that the measured is in the forecast's interval, `is_above` that it is above: of reserved memory,
    that a device with as much as the interval's end, which would be promised to do, may not have done.
    """

    schema: ClassVar[int] = 1
    quantity: str
    case: str
    forecast: float
    measured: float
    error: float
    is_inside: bool
    is_above: bool


@dataclass(frozen=True, kw_only=True)
class FitTrial:
    """A plan tried with so much memory: how sure it was to fit, and whether it did."""

    schema: ClassVar[int] = 1
    case: str
    cap_bytes: int
    probability_it_fits: float
    has_fit: bool


def residual(quantity: str, case: str, forecast: Estimate, measured: float) -> Residual:
    """What the forecast of a positive quantity was off by."""
    return Residual(
        quantity=quantity,
        case=case,
        forecast=forecast.value,
        measured=measured,
        error=forecast.value / measured - 1,
        is_inside=forecast.low <= measured <= forecast.high,
        is_above=measured > forecast.high,
    )


def summary(residuals: Sequence[Residual]) -> dict[str, dict[str, float]]:
    """Of each quantity: number of cases, absolute errors (median, 95 % of them, worst), bias, shares in and above.

    >>> one = Estimate(value=1.1, low=1.0, high=1.2, unit="s", basis="datasheet")
    >>> summary([residual("step", "a", one, 1.0)])["step"]["coverage"]
    1.0
    """
    found: dict[str, dict[str, float]] = {}
    for quantity in dict.fromkeys(one.quantity for one in residuals):
        of_it = [one for one in residuals if one.quantity == quantity]
        sizes = sorted(abs(one.error) for one in of_it)
        found[quantity] = {
            "cases": len(of_it),
            "median": statistics.median(sizes),
            "p95": sizes[math.ceil(0.95 * len(sizes)) - 1],
            "worst": sizes[-1],
            "bias": statistics.median(one.error for one in of_it),
            "coverage": statistics.mean(one.is_inside for one in of_it),
            "above": statistics.mean(one.is_above for one in of_it),
        }
    return found


def fits(trials: Sequence[FitTrial], sure_enough: float) -> dict[str, float]:
    """How the verdict "it fits", given at a probability of `sure_enough` or more, turned out.

    `false_fits` is the share of such verdicts after which memory ran out; `missed` that of plans ruled out which would
    have fit.
    """
    promised = [one for one in trials if one.probability_it_fits >= sure_enough]
    ruled_out = [one for one in trials if one.probability_it_fits < sure_enough]
    return {
        "trials": len(trials),
        "promised": len(promised),
        "false_fits": sum(not one.has_fit for one in promised) / max(1, len(promised)),
        "missed": sum(one.has_fit for one in ruled_out) / max(1, len(ruled_out)),
    }

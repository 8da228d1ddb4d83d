"""Forecasts on a machine that others use: what was measured among them says little of the time without, or with more.

A thread that waits for a core holds up all the others, so that the loss is more than the others' share of the cores;
how much more depends on when they compute. An interval that says so is all that can be had.
"""

from __future__ import annotations

import dataclasses

from stoker.records import Estimate, Forecast

_MOST = 0.9
"""Of the CPU, taken as the most that others use: nothing can be said beyond."""


def crowded(forecast: Forecast, share: float) -> Forecast:
    """The forecast with intervals of time as wide as others make them who use `share` of the CPU [0 to 1].

    From what an update would take without them, to what it takes if they come to use as much again of what is left.
    """
    left = 1 - min(_MOST, max(0.0, share))

    def widened(time_s: Estimate) -> Estimate:
        return dataclasses.replace(time_s, low=time_s.low * left, high=time_s.high / left)

    rate = forecast.samples_per_s
    return dataclasses.replace(
        forecast,
        step_s=widened(forecast.step_s),
        samples_per_s=dataclasses.replace(rate, low=rate.low * left, high=rate.high / left),
        evaluate_s=widened(forecast.evaluate_s),
        total_s=widened(forecast.total_s),
    )


def words_on_others(share: float) -> str:
    """One line on what others' use of the CPU does to the forecast.

    >>> words_on_others(0.8)
    'others use 80% of the CPU: times may be several times as long, and are shorter once others are gone'
    """
    often = "several times" if share >= 0.5 else "up to twice"
    return f"others use {share:.0%} of the CPU: times may be {often} as long, and are shorter once others are gone"

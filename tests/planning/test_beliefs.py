"""What trials of some plans say of the others."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.planning.plan_search import ForecastPosterior, expected_gain, settings_of
from stoker.records import Plan

FP32 = Plan(device="cpu", micro_batch=64)
BF16 = dataclasses.replace(FP32, precision="bf16")
LAST = dataclasses.replace(FP32, memory_format="channels_last")
BF16_LAST = dataclasses.replace(BF16, memory_format="channels_last")


def test_nothing_is_expected_of_a_plan_forecast_to_be_much_slower() -> None:
    """Twice the time, where forecasts are good to some per cent."""
    (gain,) = ForecastPosterior(0.05).improvements([(FP32, 1.0, 1.0)], [(BF16, 2.0)])
    assert gain < 1e-6


def test_a_plan_forecast_to_take_half_the_time_is_expected_to_save_about_half() -> None:
    """Whatever error all forecasts share: both plans run on the same machine."""
    for measured in (0.5, 1.0, 3.0):
        (gain,) = ForecastPosterior(0.05).improvements([(FP32, 1.0, measured)], [(BF16, 0.5)])
        assert gain == pytest.approx(0.5, abs=0.05)


def test_a_setting_that_disappointed_once_is_expected_to_disappoint_again() -> None:
    """bf16 was forecast at half the time and took the same: bf16 with another memory format is no longer promising."""
    beliefs = ForecastPosterior(0.25)
    before = beliefs.improvements([(FP32, 1.0, 1.0)], [(BF16_LAST, 0.5)])
    after = beliefs.improvements([(FP32, 1.0, 1.0), (BF16, 0.5, 1.0)], [(BF16_LAST, 0.5)])
    assert after[0] < before[0] / 2


def test_what_each_doubling_of_the_micro_batch_gives_is_learned() -> None:
    """Two halvings took a quarter more each than forecast: twice the micro-batch is promising, half of it is not."""
    tried = [
        (dataclasses.replace(FP32, micro_batch=size), 1.0, pace) for size, pace in ((32, 1.0), (16, 1.25), (8, 1.56))
    ]
    larger, smaller = ForecastPosterior(0.25).improvements(
        tried, [(dataclasses.replace(FP32, micro_batch=size), 1.0) for size in (64, 4)]
    )
    assert larger > 0.1
    assert smaller < larger / 3


def test_a_poor_basis_leaves_more_to_hope_for() -> None:
    """Of two plans with equal forecasts, another may well be faster if forecasts rest on a datasheet."""
    poor, good = (ForecastPosterior(error).improvements([(FP32, 1.0, 1.0)], [(LAST, 1.0)])[0] for error in (0.25, 0.03))
    assert poor > 2 * good > 0


def test_a_setting_that_no_forecast_was_made_of_leaves_more_to_hope_for() -> None:
    """channels-last was traced in the one case; in the other only a rule is known."""
    traced, guessed = (
        ForecastPosterior(0.05, settings_of(plans)).improvements([(FP32, 1.0, 1.0)], [(LAST, 1.0)])[0]
        for plans in ((FP32, LAST), (FP32,))
    )
    assert guessed > 1.5 * traced > 0


@given(st.floats(-3, 3), st.floats(0.01, 1))
def test_the_expected_gain_is_a_share_and_falls_with_the_mean(mean: float, spread: float) -> None:
    """Between nothing and everything; no less than staying with what one has."""
    gain = expected_gain(mean, spread)
    assert 0 <= gain < 1
    assert gain >= max(0.0, 1 - math.exp(mean + spread**2 / 2)) - 1e-9
    assert expected_gain(mean + 0.1, spread) <= gain + 1e-12


def test_nothing_is_said_of_no_plans() -> None:
    """An empty list has no gains."""
    assert ForecastPosterior(0.1).improvements([(FP32, 1.0, 1.0)], []) == []


def test_a_trial_says_little_of_what_compiling_gives() -> None:
    """However well operations are known: one as fast by forecast is worth a look if it is compiled."""
    plan = Plan(device="cpu", micro_batch=64)
    compiled = dataclasses.replace(plan, compile=True)
    small = dataclasses.replace(plan, micro_batch=32)
    beliefs = ForecastPosterior(0.01)
    of_compiled, of_small = beliefs.improvements([(plan, 1e-3, 1e-3)], [(compiled, 1e-3), (small, 1e-3)])
    assert of_compiled > 2 * of_small

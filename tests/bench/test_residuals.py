"""What is said of forecasts and measurements together."""

from __future__ import annotations

import pytest

from bench.forecast.residuals import FitTrial, fits, residual, summary
from stoker.records import Estimate


def estimate(value: float) -> Estimate:
    """A value within a tenth."""
    return Estimate(value=value, low=0.9 * value, high=1.1 * value, unit="s", basis="calibrated")


def test_a_residual_is_signed_and_knows_its_interval() -> None:
    """Too high is positive; a measurement at the interval's end is inside."""
    high, low = residual("step_s", "a", estimate(1.2), 1.0), residual("step_s", "b", estimate(1.0), 1.1)
    assert (high.error, high.is_inside, high.is_above) == (pytest.approx(0.2), False, False)
    assert (low.error, low.is_inside, low.is_above) == (pytest.approx(-1 / 11), True, False)
    assert residual("step_s", "c", estimate(1.0), 1.2).is_above


def test_a_summary_is_of_sizes_and_its_bias_of_signs() -> None:
    """Errors of 1 to 20 %, every other one negative."""
    errors = [(-1) ** n * n / 100 for n in range(1, 21)]
    found = summary([residual("step_s", str(error), estimate(1 + error), 1.0) for error in errors])["step_s"]
    assert found["cases"] == 20
    assert found["median"] == pytest.approx(0.105)
    assert found["p95"] == pytest.approx(0.19)
    assert found["worst"] == pytest.approx(0.20)
    assert abs(found["bias"]) < 0.02
    assert found["coverage"] == pytest.approx(0.5, abs=0.06)
    assert found["above"] == pytest.approx(0.25, abs=0.06)


def test_quantities_are_apart() -> None:
    """Memory and time are summarised each on its own."""
    found = summary([residual("step_s", "a", estimate(1.0), 1.0), residual("peak_bytes", "a", estimate(2.0), 1.0)])
    assert (found["step_s"]["median"], found["peak_bytes"]["median"]) == (0.0, 1.0)


def test_a_promise_that_was_broken_is_a_false_fit() -> None:
    """Of four promises one was broken; of two plans ruled out one would have fit."""
    outcomes = [(0.95, True), (0.99, True), (0.9, False), (1.0, True), (0.5, True), (0.1, False)]
    trials = [FitTrial(case="a", cap_bytes=1, probability_it_fits=sure, has_fit=fit) for sure, fit in outcomes]
    assert fits(trials, 0.9) == {"trials": 6, "promised": 4, "false_fits": 0.25, "missed": 0.5}


def test_without_trials_nothing_is_false() -> None:
    """Nothing promised, nothing broken."""
    assert fits([], 0.9) == {"trials": 0, "promised": 0, "false_fits": 0.0, "missed": 0.0}

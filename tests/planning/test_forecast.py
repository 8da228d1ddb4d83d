from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.planning.model.run_forecast import Extents, forecast_from_trial, seconds_per_sample
from stoker.records import Plan
from tests.planning.trials import measurement, profile

PLAN = Plan(device="cpu", micro_batch=512, checkpoint_every_s=30.0)
FIVE_EPOCHS = Extents(total_samples=270_000, total_updates=530, evaluations=5)
TIMES = st.lists(st.floats(1e-5, 100.0), min_size=1, max_size=30).map(tuple)


def test_the_whole_is_the_sum_of_its_parts() -> None:
    """Training, evaluations of `valid` and one of `test`, and checkpoints at every evaluation and every 30 s."""
    found = forecast_from_trial(
        measurement(PLAN, 0.1, evaluate_s_per_sample=1e-4, state_bytes=2 * 10**9), profile(), FIVE_EPOCHS
    )
    training = 270_000 / 512 * 0.1
    evaluation = (5 * 6_000 + 10_000) * 1e-4
    checkpoints = (5 + training / 30) * found.checkpoint_s.value
    assert found.total_s.value == pytest.approx(training + evaluation + checkpoints)
    assert found.step_s.value == pytest.approx(0.1)
    assert found.samples_per_s.value == pytest.approx(5120)
    assert found.evaluate_s.value == pytest.approx(1.0)
    assert found.checkpoint_s.value == pytest.approx(1.002)
    assert (found.total_samples, found.total_updates, found.evaluations) == (270_000, 530, 5)


def test_a_job_without_validation_spends_nothing_on_it() -> None:
    """Neither time nor a division by zero."""
    found = forecast_from_trial(
        measurement(PLAN, 0.1, evaluate_s_per_sample=0.0),
        profile(num_valid=0, num_test=0),
        Extents(total_samples=512, total_updates=1, evaluations=0),
    )
    assert found.evaluate_s.value == 0
    assert found.total_s.value == pytest.approx(0.1, rel=1e-2)


def test_smaller_images_shorten_the_training_alone() -> None:
    """A run that takes six tenths of the pixels trains for six tenths of the time; evaluation stays."""
    measured = measurement(PLAN, 0.1, evaluate_s_per_sample=1e-4)
    whole, small = (forecast_from_trial(measured, profile(relative_cost=cost), FIVE_EPOCHS) for cost in (1.0, 0.6))
    saved = 0.4 * 270_000 / 512 * 0.1
    assert whole.total_s.value - small.total_s.value == pytest.approx(saved, rel=0.02)
    assert small.evaluate_s == whole.evaluate_s


@given(TIMES)
def test_every_estimate_lies_within_a_positive_interval(times: tuple[float, ...]) -> None:
    """Also of two updates, one of which took a thousand times as long."""
    found = forecast_from_trial(measurement(PLAN, times), profile(), FIVE_EPOCHS)
    for estimate in (found.step_s, found.samples_per_s, found.total_s, found.peak_bytes):
        assert 0 < estimate.low <= estimate.value <= estimate.high
    assert min(times) * 0.9 <= found.step_s.low * (1 + 1e-9)
    assert found.step_s.high <= max(times) * 1.1 * (1 + 1e-9)


@given(TIMES, st.floats(0.01, 100.0))
def test_a_machine_twice_as_slow_takes_twice_as_long(times: tuple[float, ...], factor: float) -> None:
    """Update, rate and pace scale with the trial."""
    one, other = measurement(PLAN, times), measurement(PLAN, tuple(time * factor for time in times))
    found, scaled = (forecast_from_trial(measured, profile(), FIVE_EPOCHS) for measured in (one, other))
    assert scaled.step_s.value == pytest.approx(found.step_s.value * factor)
    assert scaled.samples_per_s.value == pytest.approx(found.samples_per_s.value / factor)
    assert seconds_per_sample(other) == pytest.approx(seconds_per_sample(one) * factor)


@given(TIMES)
def test_the_pace_is_that_of_the_faster_half(times: tuple[float, ...]) -> None:
    """Between the fastest update and the middle one, in seconds a sample."""
    found = seconds_per_sample(measurement(PLAN, times)) * 512
    assert min(times) * (1 - 1e-9) <= found <= sorted(times)[len(times) // 2] * (1 + 1e-9)


def test_numbers_say_what_they_rest_on() -> None:
    """Measured ones and the one that is not."""
    found = forecast_from_trial(measurement(PLAN, 0.1), profile(), FIVE_EPOCHS)
    assert {one.basis for one in (found.step_s, found.total_s, found.peak_bytes)} == {"measured here"}
    assert found.checkpoint_s.basis == "roofline"
    assert (found.step_s.unit, found.samples_per_s.unit, found.peak_bytes.unit) == ("s", "samples/s", "bytes")

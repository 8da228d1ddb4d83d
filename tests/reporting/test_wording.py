"""How metrics, quantities and plans are written."""

import dataclasses

import pytest

from stoker.records import Estimate
from stoker.reporting.wording import (
    format_interval,
    format_metric,
    format_metrics,
    headline_metric,
    level_meaning,
    plan_differences,
    plan_in_difference,
)
from tests.reporting import story


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("test/accuracy", 0.92614, "92.61 %"),
        ("top5_accuracy", 1.0, "100.00 %"),
        ("accuracy", 92.6, "92.6"),
        ("mse", 0.00012345, "0.0001234"),
        ("loss", float("nan"), "nan"),
        ("accuracy", float("nan"), "nan"),
    ],
)
def test_fractions_are_per_cent_and_the_rest_has_four_figures(name: str, value: float, expected: str) -> None:
    """A fraction outside 0 to 1 is no fraction; what is not a number is said to be none."""
    assert format_metric(name, value) == expected


def test_the_loss_comes_last() -> None:
    """People look for the metric first."""
    assert format_metrics({"valid/loss": 0.25, "valid/accuracy": 0.5}) == "valid/accuracy 50.00 % · valid/loss 0.25"


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({"valid/accuracy": 0.9, "test/loss": 0.3, "test/accuracy": 0.8}, "test/accuracy"),
        ({"valid/loss": 0.3, "valid/mse": 0.1}, "valid/mse"),
        ({"loss": 0.3}, "loss"),
    ],
)
def test_a_run_is_known_by_its_test_metric(metrics: dict[str, float], expected: str) -> None:
    """Test before valid, any metric before the loss; a loss alone will do."""
    named = headline_metric(metrics)
    assert named is not None
    assert named[0] == expected


def test_without_metrics_there_is_no_headline() -> None:
    """Nothing is made up."""
    assert headline_metric({"test/f1[0]": 0.1, "test/f1[1]": 0.9, "test/loss": 0.5}) == ("test/loss", 0.5)
    assert headline_metric({"test/f1[0]": 0.1}) == ("test/f1[0]", 0.1)
    assert headline_metric({}) is None


@pytest.mark.parametrize(
    ("low", "high", "unit", "expected"),
    [
        (0.324, 0.366, "s", "324 to 366 ms"),
        (0.9, 1.2, "s", "900 ms to 1.2 s"),
        (214.0, 252.0, "s", "3 min 34 s to 4 min 12 s"),
        (1395.0, 1573.0, "samples/s", "1,395 to 1,573 samples/s"),
        (2**29, 2**31, "bytes", "512.0 MiB to 2.0 GiB"),
    ],
)
def test_an_interval_names_its_unit_once_where_it_is_one(low: float, high: float, unit: str, expected: str) -> None:
    """A unit is left out of the lower end only if the upper end has the very same one."""
    assert format_interval(Estimate(value=high, low=low, high=high, unit=unit, basis="roofline")) == expected


def test_plans_are_told_apart_by_what_they_settle_differently() -> None:
    """Equal settings are not repeated."""
    other = dataclasses.replace(story.PLAN, precision="fp32", micro_batch=64)
    assert plan_differences(story.PLAN, other) == (("micro batch", "512", "64"), ("precision", "bf16", "fp32"))
    assert plan_in_difference(other, story.PLAN) == "micro-batch 64, fp32"
    compiled = dataclasses.replace(story.PLAN, compile=True)
    assert plan_in_difference(compiled, story.PLAN) == "compiled"
    assert plan_in_difference(dataclasses.replace(story.PLAN, captured=True), compiled) == "not compiled, captured"
    assert plan_in_difference(story.PLAN, story.PLAN) == "the same settings"


def test_a_level_with_more_words_is_still_that_level() -> None:
    """`bit-equal on resume` promises what `bit-equal` does; an unknown level promises nothing."""
    assert level_meaning("bit-equal on resume") == level_meaning("bit-equal") != ""
    assert level_meaning("wishful") == ""

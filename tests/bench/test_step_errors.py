from __future__ import annotations

import math

import pytest

from bench.forecast.step_errors import Compared, Turn, in_words, summary
from stoker.records import Estimate


def estimate(value: float) -> Estimate:
    """Within a tenth to either side."""
    return Estimate(value=value, low=0.9 * value, high=1.1 * value, unit="s", basis="calibrated")


def turn(planned: float, measured_s: float, drift: float) -> Turn:
    """On a machine whose anchors all took `drift` times as long, before and after."""
    changes = {"product": math.log(drift), "sum": math.log(drift)}
    return Turn(estimate(planned), measured_s, changes, changes)


def test_the_three_errors_tell_the_machine_from_the_model() -> None:
    """A machine that became a quarter slower, half of it before planning: the model itself is 4 % too fast."""
    turns = [turn(0.108, 0.125, 1.25), turn(0.108, 0.1, 1.0), turn(0.108, 0.15, 1.5)]
    result = summary([Compared("gpt", 2, "fp32", estimate(0.096), turns)])
    [row] = result["cases"]
    assert row["measured_ms"] == pytest.approx(125.0)
    assert row["drift"] == pytest.approx(1.25)
    assert row["calibrated"]["error"] == pytest.approx(0.096 / 0.125 - 1)
    assert row["planned"]["error"] == pytest.approx(0.108 / 0.125 - 1)
    assert row["in_turns"]["error"] == pytest.approx(-0.04)
    assert [row[kind]["within"] for kind in ("calibrated", "planned", "in_turns")] == pytest.approx([1 / 3, 1 / 3, 1.0])


def test_each_turn_counts_by_its_own_forecast() -> None:
    """A machine that is twice as slow in one round, and was seen to be before it: there is no error."""
    turns = [turn(0.1, 0.1, 1.0), turn(0.2, 0.2, 2.0), turn(0.1, 0.1, 1.0)]
    [row] = summary([Compared("gpt", 2, "fp32", estimate(0.1), turns)])["cases"]
    assert (row["planned"]["error"], row["planned"]["within"]) == (0.0, 1.0)
    assert row["calibrated"]["within"] == pytest.approx(2 / 3)


def test_the_summary_prints_every_kind() -> None:
    """Median, 95th percentile and coverage of each, so that none is reported without the others."""
    cases = [
        Compared("a", 1, "fp32", estimate(1.0), [turn(1.2, 1.0, 1.0)]),
        Compared("b", 2, "fp32", estimate(1.0), [turn(1.0, 2.0, 1.0)]),
    ]
    result = summary(cases)
    assert result["calibrated"] == pytest.approx(
        {"median_error": 0.25, "p95_error": 0.5, "mean_signed_error": -0.25, "coverage": 0.5}
    )
    assert result["planned"]["coverage"] == 0.0
    lines = in_words(result).splitlines()
    assert len(lines) == 5
    assert [line.split()[0] for line in lines[2:]] == ["calibrated", "planned", "in_turns"]

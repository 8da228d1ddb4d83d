from __future__ import annotations

import pytest

from bench.forecast.step_errors import Compared, in_words, summary
from stoker.records import Estimate


def estimate(value: float) -> Estimate:
    """Within a tenth to either side."""
    return Estimate(value=value, low=0.9 * value, high=1.1 * value, unit="s", basis="calibrated")


def test_the_three_errors_tell_the_machine_from_the_model() -> None:
    """A machine that became a quarter slower, half of it before planning: the model itself is 4 % too fast."""
    one = Compared("gpt", 2, "fp32", calibrated=estimate(0.096), planned=estimate(0.108))
    one.measured_s, one.drift = [0.125, 0.1, 0.15], [1.25, 1.0, 1.5]
    result = summary([one])
    [row] = result["cases"]
    assert row["measured_ms"] == pytest.approx(125.0)
    assert row["drift"] == pytest.approx(1.25)
    assert row["calibrated"]["error"] == pytest.approx(0.096 / 0.125 - 1)
    assert row["planned"]["error"] == pytest.approx(0.108 / 0.125 - 1)
    assert row["in_turns"]["error"] == pytest.approx(-0.04)
    assert [row[kind]["is_within"] for kind in ("calibrated", "planned", "in_turns")] == [False, False, True]


def test_the_summary_prints_every_kind() -> None:
    """Median, 95th percentile and coverage of each, so that none is told without the others."""
    cases = [
        Compared("a", 1, "fp32", estimate(1.0), estimate(1.2), [1.0], [1.0]),
        Compared("b", 2, "fp32", estimate(1.0), estimate(1.0), [2.0], [1.0]),
    ]
    result = summary(cases)
    assert result["calibrated"] == pytest.approx(
        {"median_error": 0.25, "p95_error": 0.5, "mean_signed_error": -0.25, "coverage": 0.5}
    )
    assert result["planned"]["coverage"] == 0.0
    lines = in_words(result).splitlines()
    assert len(lines) == 5
    assert [line.split()[0] for line in lines[2:]] == ["calibrated", "planned", "in_turns"]

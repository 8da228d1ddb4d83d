"""Forecasts of updates against what was measured: as calibrated, as planned, and without the machine's own drift.

A forecast is of a machine as it was when it was looked at; one that is shared is another a minute later. Three errors
of the same case tell the two apart: of the micro-benchmark alone (`calibrated`), of the micro-benchmark at the pace of
the moment of planning, right before the case runs, which is what `stoker plan` says (`planned`), and of the
micro-benchmark at the pace that was measured around each run (`in_turns`). The first two are forecasts. The third is
none: it says how far the model of times is off.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stoker.records import Estimate

BARS = {"median": 0.08, "p95": 0.20, "coverage": (0.70, 0.90)}
KINDS = ("calibrated", "planned", "in_turns")


@dataclass(frozen=True)
class Turn:
    """One run of a case: what an update was forecast to take right before, what it took [s], and the machine around it.

    `before` and `after` are changes of the anchors' times since the micro-benchmark [logarithm], by name.
    """

    planned: Estimate
    measured_s: float
    before: Mapping[str, float]
    after: Mapping[str, float]

    @property
    def drift(self) -> float:
        """How many times as long anchors took around it as when the micro-benchmark ran."""
        return math.exp(statistics.median([*self.before.values(), *self.after.values()]))


@dataclass
class Compared:
    """One case: the forecast of its update by the micro-benchmark alone, and its turns."""

    name: str
    threads: int
    precision: str
    calibrated: Estimate
    turns: list[Turn] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """All of it; an error is a signed fraction of what was measured, the median over turns."""
        measured = [turn.measured_s for turn in self.turns]
        drift = [turn.drift for turn in self.turns]
        then_s = [turn.measured_s / turn.drift for turn in self.turns]
        planned = [turn.planned for turn in self.turns]
        alone = [self.calibrated] * len(self.turns)
        return {
            "case": self.name,
            "threads": self.threads,
            "precision": self.precision,
            "measured_ms": statistics.median(measured) * 1e3,
            "spread": max(measured) / min(measured) - 1,
            "drift": statistics.median(drift),
            "drift_between_rounds": max(drift) / min(drift) - 1,
            "rounds": [
                {"ms": turn.measured_s * 1e3, "before": dict(turn.before), "after": dict(turn.after)}
                for turn in self.turns
            ],
            "calibrated": _beside(alone, measured),
            "planned": _beside(planned, measured),
            "in_turns": _beside(alone, then_s),
        }


def summary(compared: Sequence[Compared]) -> dict[str, Any]:
    """Errors of all cases and how many intervals hold what was measured, for each kind."""
    rows = [one.row() for one in compared]
    return {**{kind: _errors([row[kind] for row in rows]) for kind in KINDS}, "bars": BARS, "cases": rows}


def in_words(result: dict[str, Any]) -> str:
    """The table, and a line for each kind of error."""
    lines = [
        f"{row['case']:24s} {row['threads']} thr  measured {row['measured_ms']:7.1f} ms (rounds differ by "
        f"{row['spread']:.0%}), drift {row['drift'] - 1:+4.0%}  "
        + "  ".join(f"{kind} {row[kind]['error']:+6.1%}{_mark(row[kind])}" for kind in KINDS)
        for row in result["cases"]
    ]
    lines += [
        f"{kind:11s} median error {result[kind]['median_error']:.1%}, p95 {result[kind]['p95_error']:.1%}, "
        f"mean signed {result[kind]['mean_signed_error']:+.1%}, intervals hold {result[kind]['coverage']:.0%}"
        for kind in KINDS
    ]
    return "\n".join(lines)


def _mark(beside: dict[str, Any]) -> str:
    """A star where fewer than half of the intervals hold what was measured."""
    return " " if beside["within"] >= 0.5 else "*"


def _beside(forecasts: Sequence[Estimate], seconds: Sequence[float]) -> dict[str, Any]:
    """Forecasts against what was measured right after each."""
    both = list(zip(forecasts, seconds, strict=True))
    middle = {end: statistics.median(getattr(one, end) for one in forecasts) * 1e3 for end in ("value", "low", "high")}
    return {
        "forecast_ms": middle["value"],
        "low_ms": middle["low"],
        "high_ms": middle["high"],
        "error": statistics.median(forecast.value / s for forecast, s in both) - 1,
        "within": statistics.fmean(forecast.low <= s <= forecast.high for forecast, s in both),
    }


def _errors(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    errors = sorted(abs(row["error"]) for row in rows)
    return {
        "median_error": statistics.median(errors),
        "p95_error": errors[math.ceil(0.95 * len(errors)) - 1],
        "mean_signed_error": statistics.fmean(row["error"] for row in rows),
        "coverage": statistics.fmean(row["within"] for row in rows),
    }

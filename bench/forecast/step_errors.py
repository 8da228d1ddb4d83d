"""Forecasts of updates beside what was measured: as calibrated, as planned, and with the machine's own drift taken out.

A forecast is of a machine as it was when it was looked at; one that is shared is another a minute later. Three errors
of the same case tell the two apart: of the micro-benchmark alone (`calibrated`), of the micro-benchmark at the pace of
the moment of planning, which is what `stoker plan` says (`planned`), and of the micro-benchmark at the pace that was
measured beside each update (`in_turns`). The first two are forecasts. The third is none: it says how far the model of
times is off.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from stoker.records import Estimate

BARS = {"median": 0.08, "p95": 0.20, "coverage": (0.70, 0.90)}
KINDS = ("calibrated", "planned", "in_turns")


@dataclass
class Compared:
    """One case: its two forecasts of an update, and round by round what it took and at which pace.

    `measured_s` are times of an update [s], `drift` how many times as long anchors took around it as when the
    micro-benchmark ran.
    """

    name: str
    threads: int
    precision: str
    calibrated: Estimate
    planned: Estimate
    measured_s: list[float] = field(default_factory=list)
    drift: list[float] = field(default_factory=list)

    @property
    def in_turns_s(self) -> float:
        """What an update would have taken [s], had the machine stayed as it was."""
        return statistics.median(s / drift for s, drift in zip(self.measured_s, self.drift, strict=True))

    def row(self) -> dict[str, Any]:
        """All of it, with errors as signed fractions of what was measured."""
        measured = statistics.median(self.measured_s)
        beside = {
            "calibrated": (self.calibrated, measured),
            "planned": (self.planned, measured),
            "in_turns": (self.calibrated, self.in_turns_s),
        }
        return {
            "case": self.name, "threads": self.threads, "precision": self.precision,
            "measured_ms": measured * 1e3, "spread": max(self.measured_s) / min(self.measured_s) - 1,
            "drift": statistics.median(self.drift), "drift_between_rounds": max(self.drift) / min(self.drift) - 1,
            "rounds": [{"ms": s * 1e3, "drift": d} for s, d in zip(self.measured_s, self.drift, strict=True)],
            **{kind: _beside(forecast, seconds) for kind, (forecast, seconds) in beside.items()},
        }  # fmt: skip


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
    """A star where the interval does not hold what was measured."""
    return " " if beside["is_within"] else "*"


def _beside(forecast: Estimate, seconds: float) -> dict[str, Any]:
    return {
        "forecast_ms": forecast.value * 1e3, "low_ms": forecast.low * 1e3, "high_ms": forecast.high * 1e3,
        "error": forecast.value / seconds - 1, "is_within": forecast.low <= seconds <= forecast.high,
    }  # fmt: skip


def _errors(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    errors = sorted(abs(row["error"]) for row in rows)
    return {
        "median_error": statistics.median(errors),
        "p95_error": errors[math.ceil(0.95 * len(errors)) - 1],
        "mean_signed_error": statistics.fmean(row["error"] for row in rows),
        "coverage": statistics.fmean(row["is_within"] for row in rows),
    }

"""Where a run's time went, and its forecast against what was measured: as records, and in a few lines of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from stoker.records import Decision, Estimate, Event, Forecast, Report
from stoker.records.progress import is_validation
from stoker.reporting.event_text import verdict_lines
from stoker.reporting.history import (
    best_evaluation,
    evaluation_metrics,
    finite,
    live_history,
    numbers,
    of_kind,
    plans_in_force,
    samples_done,
    settled_switch,
    since_settled,
    text,
)
from stoker.reporting.launch_text import launch_words
from stoker.reporting.wording import (
    format_interval,
    format_metric,
    format_quantity,
    format_samples,
    format_spread,
    headline_metric,
    is_wide,
)
from stoker.units import format_rate, format_seconds

PHASES = {
    "update": "forward, backward, update",
    "data": "waiting for data",
    "evaluation": "evaluation",
    "checkpoint": "checkpoints",
    "planning": "planning",
    "other": "other",
}
"""The phases of `split_s` and their labels, in the order they are shown; unknown ones keep their own name."""

NOT_TRAINING = frozenset({"evaluation", "checkpoint", "profiling", "planning", "other"})
"""Phases whose time no rate of `progress` includes."""


@dataclass(frozen=True)
class TimeShare:
    """The time of a phase [s], and its fraction of the whole."""

    phase: str
    label: str
    seconds: float
    fraction: float


@dataclass(frozen=True)
class ForecastRow:
    """One forecast quantity and its measured value (None where the run did not show it)."""

    quantity: str
    forecast: Estimate
    measured: float | None

    @property
    def is_inside(self) -> bool | None:
        """Whether the measured value is in the interval; None if nothing was measured."""
        if self.measured is None:
            return None
        return self.forecast.low <= self.measured <= self.forecast.high

    @property
    def ratio(self) -> float | None:
        """Measured over forecast [1]; None if nothing was measured or the forecast is zero."""
        return None if self.measured is None or not self.forecast.value else self.measured / self.forecast.value


def time_split(report: Report) -> tuple[TimeShare, ...]:
    """Where the time went, planning included; shares add up to 1. Empty if the run says nothing of time.

    Each `progress` covers the time since the one before. Evaluations and checkpoints are summed over their own events
    where those say more, since the last ones follow the last `progress`. What is left of the wall time is `other`.
    """
    events = live_history(report.events)
    seconds: dict[str, float] = {}
    for event in of_kind(events, "progress"):
        for phase, spent in numbers(event.fields.get("split_s")).items():
            seconds[phase] = seconds.get(phase, 0.0) + spent
    evaluated, saved = _total(events, "evaluated", "took_s"), _total(events, "checkpointed", "blocked_s")
    seconds["evaluation"] = max(seconds.get("evaluation", 0.0), evaluated)
    seconds["checkpoint"] = max(seconds.get("checkpoint", 0.0), saved)
    unattributed = wall_seconds(report) - sum(seconds.values())
    seconds["other"] = seconds.get("other", 0.0) + max(0.0, unattributed)
    planned = _total(report.events, "planned", "took_s")
    planned = planned or (report.decision.took_s if report.decision else 0.0)
    seconds["planning"] = seconds.get("planning", 0.0) + planned
    whole = sum(seconds.values())
    if whole <= 0:
        return ()
    names = [*(p for p in seconds if p not in PHASES), *PHASES]
    names.sort(key=lambda phase: list(PHASES).index(phase) if phase in PHASES else 1)
    return tuple(
        TimeShare(phase, PHASES.get(phase, phase), seconds[phase], seconds[phase] / whole)
        for phase in names
        if seconds.get(phase, 0.0) > 0
    )


def wall_seconds(report: Report) -> float:
    """Wall time of training over all its processes [s]; the largest that the record or an event states."""
    stated = [finite(event, "wall_s") for event in live_history(report.events)]
    return max([report.run.wall_s, *(value for value in stated if value is not None)])


def settled_forecast(report: Report) -> Forecast | None:
    """The forecast of the plan that the run settled on; None before that."""
    decision = report.decision
    return decision.chosen.forecast if decision is not None and decision.is_settled else None


def forecast_rows(report: Report) -> tuple[ForecastRow, ...]:
    """The forecast and what was measured; empty without a plan.

    Measured are: the total of a run that was finished, and not before its time; update time and rate over all training,
    or since the run settled on a plan (data included, evaluations and checkpoints not); the mean evaluation of held-out
    data; the mean time a checkpoint held training up; and the peak memory that `finished` states.
    """
    if report.decision is None:
        return ()
    forecast, events = report.decision.chosen.forecast, live_history(report.events)
    update_s, samples_per_s = training_speed(since_settled(report))
    is_whole = report.run.status == "finished" and report.run.ended_early is None
    total_s = wall_seconds(report) if is_whole else None
    return (
        ForecastRow("total time", forecast.total_s, total_s),
        ForecastRow("one update", forecast.step_s, update_s),
        ForecastRow("throughput", forecast.samples_per_s, samples_per_s),
        ForecastRow("one evaluation", forecast.evaluate_s, _mean_evaluation(events)),
        ForecastRow("one checkpoint", forecast.checkpoint_s, _mean(events, "checkpointed", "blocked_s")),
        ForecastRow("peak memory", forecast.peak_bytes, _peak_memory(report)),
    )


def summary_lines(report: Report) -> list[str]:
    """The result of a run, in a few lines of plain text."""
    events = live_history(report.events)
    named, best = headline_metric(report.run.metrics), best_words(events)
    result = f"{named[0]} {format_metric(*named)}" if named else report.run.status
    lines = [f"{report.run.name}: {result}" + (f" ({best})" if best else ""), _effort(report)]
    if report.run.ended_early is not None:
        lines.append(f"ended before its time: {report.run.ended_early}")
    if report.decision is not None:
        lines += _plan_lines(report, report.decision)
        rows = forecast_rows(report) if report.decision.is_settled else ()
        lines += [_compared(row) for row in rows[:1] if row.measured is not None]
        lines += [_compared(row) for row in rows[1:] if row.is_inside is False]
    if report.launch is not None:
        lines.append(f"executed at {launch_words(report.launch, report.events, settled_forecast(report))}")
    if shares := time_split(report):
        largest = sorted(shares, key=lambda share: -share.seconds)
        lines.append(
            "time: " + " · ".join(f"{s.label} {100 * s.fraction:.0f} %" for s in largest if s.fraction > 0.005)
        )
    if report.bottleneck is not None:
        lines += verdict_lines(report.bottleneck)
    if warnings := of_kind(report.events, "warned"):
        lines.append(f"warnings: {len(warnings)}, the last: {text(warnings[-1], 'message')}")
    if report.run.status == "failed":
        lines.append(f"failed: {report.run.failure or 'no reason was recorded'}")
    if report.run.status != "finished" and (saved := of_kind(events, "checkpointed")):
        samples = format_samples(finite(saved[-1], "samples") or 0)
        lines.append(f"the last checkpoint holds {samples} samples; the same command continues from there")
    return lines


def _plan_lines(report: Report, decision: Decision) -> list[str]:
    """The plan, how the run settled on it, and what it went on under."""
    stretches = plans_in_force(report)
    if not decision.is_settled:
        return [
            f"plan: not settled, the last was {stretches[-1].plan.in_words()}",
            "forecast: none without a settled plan",
        ]
    lines, settled = [f"plan: {decision.chosen.plan.in_words()}"], settled_switch(report)
    if settled is not None:
        lines.append(f"settled after {format_samples(settled.samples)} samples: {settled.why}")
    return lines + [
        f"plan from {format_samples(stretch.start)} samples on, {100 * stretch.share:.1f} % of them: "
        f"{stretch.plan.in_words()}"
        for stretch in stretches[1:]
        if not stretch.is_trial and (settled is None or stretch.start != settled.samples)
    ]


def best_words(events: Sequence[Event]) -> str | None:
    """The best evaluation in words: `best accuracy on valid 92.80 % at 270,000 samples`; None if there is none."""
    best = best_evaluation(events)
    named = headline_metric(evaluation_metrics(best)) if best else None
    if best is None or named is None:
        return None
    split = text(best, "split", "valid")
    return (
        f"best {named[0]} on {split} {format_metric(*named)} at {format_samples(finite(best, 'samples') or 0)} samples"
    )


def _effort(report: Report) -> str:
    done, total, wall = samples_done(report), report.run.total_samples, wall_seconds(report)
    amount = format_samples(done) if done >= total else f"{format_samples(done)} of {format_samples(total)}"
    line = f"trained on {amount} samples in {format_seconds(wall)}"
    _, rate = training_speed(since_settled(report))
    if rate is not None:
        line += f", {format_rate(rate)} while training"
    return line + (f", on {report.device.model}" if report.device else "")


def _compared(row: ForecastRow) -> str:
    unit, measured = row.forecast.unit, row.measured or 0.0
    verdict = "inside" if row.is_inside else "outside"
    forecast = format_quantity(row.forecast.value, unit)
    interval = f"{verdict} the interval {format_interval(row.forecast)}"
    if row.is_inside and is_wide(row.forecast):
        interval += f", which spans {format_spread(row.forecast)} and says little"
    return f"{row.quantity}: {format_quantity(measured, unit)}, forecast {forecast} ({interval})"


def training_speed(events: Sequence[Event]) -> tuple[float | None, float | None]:
    """Seconds per update and samples per second while training, data included.

    Each `progress` has a rate and how long it held; an update has the run's mean number of samples.
    """
    samples = busy_s = 0.0
    for event in of_kind(events, "progress"):
        split = numbers(event.fields.get("split_s"))
        held_s = sum(seconds for phase, seconds in split.items() if phase not in NOT_TRAINING)
        samples += (finite(event, "samples_per_s") or 0.0) * held_s
        busy_s += held_s
    if not samples or not busy_s:
        return None, None
    started = of_kind(events, "started")
    total, updates = (finite(started[-1], f"total_{what}") if started else None for what in ("samples", "updates"))
    rate = samples / busy_s
    return total / updates / rate if total and updates else None, rate


def _mean_evaluation(events: Sequence[Event]) -> float | None:
    evaluations = of_kind(events, "evaluated")
    held_out = [event for event in evaluations if is_validation(event)]
    mean_s = _mean(held_out or evaluations, "evaluated", "took_s")
    num_sets = len({text(event, "split", "valid") for event in held_out}) or 1
    return None if mean_s is None else mean_s * num_sets


def _peak_memory(report: Report) -> float | None:
    """Peak memory in the forecast's sense [bytes], as `finished` states it or, on a GPU, the most that progress has."""
    finished = of_kind(report.events, "finished")
    if finished and (peak := finite(finished[-1], "peak_bytes")) is not None:
        return peak
    if report.device is None or report.device.kind != "cuda":
        return None
    seen = [finite(event, "allocated_bytes") for event in of_kind(report.events, "progress")]
    return max((value for value in seen if value is not None), default=None)


def _mean(events: Sequence[Event], kind: str, field: str) -> float | None:
    values = [value for event in of_kind(events, kind) if (value := finite(event, field)) is not None]
    return fmean(values) if values else None


def _total(events: Sequence[Event], kind: str, field: str) -> float:
    return sum(finite(event, field) or 0.0 for event in of_kind(events, kind))

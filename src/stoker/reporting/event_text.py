"""Events of runs, studies and predictions as plain text, which displays and the page's timeline share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from stoker.records import Bottleneck, Estimate, Event, Forecast, Layout, from_json
from stoker.records.codec import JSON
from stoker.records.prediction import PredictionEvent
from stoker.records.study import PlannedTrial, StudyEvent
from stoker.reporting.history import evaluation_metrics, finite, number, numbers, planned_forecast, planned_plan, text
from stoker.reporting.wording import (
    format_gain,
    format_interval,
    format_metric,
    format_metrics,
    format_samples,
)
from stoker.units import format_bytes, format_count, format_rate, format_seconds

AnyEvent = Event | StudyEvent | PredictionEvent


def event_lines(event: AnyEvent) -> list[str]:
    """The event in lines, the first without its time: a run's plan with its notes, its end with the verdict."""
    if isinstance(event, StudyEvent):
        return describe_study_event(event)
    if isinstance(event, PredictionEvent):
        return describe_prediction_event(event).split("\n")
    lines = [describe_event(event)]
    if event.kind == "planned":
        lines += [f"  {line}" for line in plan_notes(event)]
    if event.kind == "finished":
        report = event.fields.get("report")
        lines += [*closing_lines(event), *([f"report: {report}"] if report else [])]
    return lines


def describe_event(event: Event) -> str:
    """The event in one line without its time: `valid at 54,000 samples: accuracy 91.80 % (best so far)`."""
    return _DESCRIPTIONS[event.kind](event)


ERRORS_SO_FAR = "errors of forecasts here so far"
"""The beginning of the line on how far earlier forecasts were off, which `--explain` shows."""

_IN_PLAN_AND_REPORT = ("speed: ", "memory: ", "to finish: ", "begins under ", ERRORS_SO_FAR)


def plan_notes(event: Event) -> list[str]:
    """Lines of a `planned` event's explanation that a starting run shows: what the data, the contract or others imply.

    Lines that repeat plan and forecast, or give their reasons, are left to `stoker plan` and the report.
    """
    explanation, plan = event.fields.get("explanation"), planned_plan(event)
    lines = [str(line) for line in explanation] if isinstance(explanation, list | tuple) else []
    repeated = plan.in_words() if plan else None
    return [
        line
        for line in lines
        if not line.startswith(_IN_PLAN_AND_REPORT) and not (repeated and line.endswith(repeated))
    ]


def _position(event: Event) -> str:
    """Where in training an event happened, in samples."""
    return format_samples(number(event, "samples") or 0)


def _planned(event: Event) -> str:
    plan, forecast = planned_plan(event), planned_forecast(event)
    took = finite(event, "took_s")
    described = plan.in_words() if plan else text(event, "plan")
    if event.fields.get("is_settled") is False:
        return f"begins at once under {described}; how long it takes is not known yet"
    line = f"planned{f' in {format_seconds(took)}' if took is not None else ''}: {described}"
    return line + _forecast_words(forecast)


def _forecast_words(forecast: Forecast | None) -> str:
    """The time that is forecast for the run, behind a line."""
    if forecast is None:
        return ""
    total = forecast.total_s
    return f"; forecast {format_seconds(total.value)} ({format_interval(total)}, {total.basis})"


def _started(event: Event) -> str:
    done, total = number(event, "samples") or 0, number(event, "total_samples") or 0
    updates = number(event, "total_updates")
    line = f"started: {format_samples(total)} samples"
    if updates:
        line += f" in {updates:,.0f} updates"
    if done:
        line += f", {format_samples(done)} of them done"
    if data := _data_words(event.fields.get("data")):
        line += f"; {data}"
    return f"{line}; {level}" if (level := text(event, "level")) else line


def _data_words(data: JSON) -> str:
    """The data's name, class and guarantee."""
    known = data if isinstance(data, Mapping) else {}
    return f"{known.get('name')} ({known.get('class')} data): {known.get('guarantee')}" if known else ""


def _progress(event: Event) -> str:
    done, total = number(event, "samples") or 0, number(event, "total_samples")
    share = f"{100 * done / total:5.1f} %" if total else ""
    of = f" of {format_samples(total)}" if total else ""
    parts = [f"{share} {format_samples(done)}{of} samples".strip()]
    if (loss := number(event, "loss")) is not None:
        parts.append(f"loss {format_metric('loss', loss)}")
    if (rate := finite(event, "samples_per_s")) is not None:
        parts.append(format_rate(rate))
    if (eta := finite(event, "eta_s")) is not None:
        parts.append(f"{format_seconds(eta)} to go")
    if trying := text(event, "trying"):
        parts.append(f"trying plans: {trying}")
    return " · ".join(parts)


def _evaluated(event: Event) -> str:
    metrics = format_metrics(evaluation_metrics(event))
    best = " (best so far)" if event.fields.get("best") is True else ""
    decided = f"; {words}" if (words := text(event, "decided")) else ""
    where = f"{text(event, 'split', 'valid')} at {_position(event)} samples"
    return f"{where}: {metrics}{best}{decided}"


def _checkpointed(event: Event) -> str:
    size, blocked = finite(event, "bytes"), finite(event, "blocked_s")
    line = f"checkpoint at {_position(event)} samples"
    details = [format_bytes(size)] if size is not None else []
    if blocked is not None:
        details.append(f"training stood still for {format_seconds(blocked)}")
    return f"{line} ({', '.join(details)})" if details else line


def _replanned(event: Event) -> str:
    where = f"replanned at {_position(event)} samples"
    old, new = event.fields.get("old"), event.fields.get("new")
    changes = ""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        differing = [name for name in new if old.get(name) != new[name]]
        changes = ", ".join(
            f"{name.replace('_', ' ')} {_plain_value(old.get(name))} → {_plain_value(new[name])}" for name in differing
        )
    why = text(event, "why")
    return f"{where}{f': {changes}' if changes else ''}{f', because {why}' if why else ''}"


def _settled(event: Event) -> str:
    plan, forecast = planned_plan(event), planned_forecast(event)
    gained, updates = finite(event, "speedup") or 1.0, number(event, "took_updates") or 0
    faster = f"{gained:.2f}x as fast as the plan it began under" if gained != 1 else "the plan it began under"
    line = f"settled at {_position(event)} samples on {plan.in_words() if plan else text(event, 'plan')}"
    line += f": {faster}, after {updates:,.0f} updates of trials"
    return line + _forecast_words(forecast)


def _plain_value(value: JSON) -> JSON:
    """A setting of a plan; a layout by what it is called."""
    is_layout = isinstance(value, dict) and value.get("record") == "Layout"
    return (from_json(value, Layout).in_words() or "one process") if is_layout else value


def _recovered(event: Event) -> str:
    what, why = text(event, "what", "something that broke"), text(event, "why")
    mended = {"loader worker": "loader workers replaced", "rolled back": "rolled back to the last checkpoint"}
    where = f"recovered at {_position(event)} samples"
    return f"{where}: {mended.get(what, what)}{f', because {why}' if why else ''}"


def _skipped(event: Event) -> str:
    row = number(event, "in_a_row") or 1
    where = f"skipped an update at {_position(event)} samples"
    return f"{where}: {text(event, 'why', 'it was not finite')}{f' ({row:.0f} in a row)' if row > 1 else ''}"


def _stopped(event: Event) -> str:
    samples = number(event, "samples")
    where = f" at {format_samples(samples)} samples" if samples else ""
    goes_on = "; the same command continues" if text(event, "reason", "").startswith("SIG") else ""
    return f"stopped{where}: {stop_reason(event)}{goes_on}"


def stop_reason(event: Event) -> str:
    """Why training stopped, and of a run in slices how many more it takes."""
    left, reason = number(event, "slices_left"), text(event, "reason", "unknown")
    return f"{reason}; about {left:.0f} more like it finish the run" if left else reason


def _logged(event: Event) -> str:
    scalars = event.fields.get("scalars")
    names = [str(name) for name in scalars] if isinstance(scalars, Mapping) else []
    for kind in ("images", "texts"):
        entries = event.fields.get(kind)
        shown = entries if isinstance(entries, list) else ()
        names += [str(entry.get("name")) for entry in shown if isinstance(entry, Mapping)]
    return f"logged up to {_position(event)} samples: {', '.join(dict.fromkeys(names)) or 'nothing'}"


def _finished(event: Event) -> str:
    line = f"finished {_position(event)} samples"
    if (wall := finite(event, "wall_s")) is not None:
        line += f" in {format_seconds(wall)}"
    if why := text(event, "ended_early"):
        line += f", before its time, because {why}"
    if metrics := format_metrics(numbers(event.fields.get("metrics"))):
        return f"{line}: {metrics}"
    loss = finite(event, "loss")
    return line if loss is None else f"{line}: training loss {format_metric('loss', loss)}"


_DESCRIPTIONS: dict[str, Callable[[Event], str]] = {
    "planned": _planned,
    "started": _started,
    "resumed": lambda event: f"resumed at {_position(event)} samples from the last checkpoint",
    "progress": _progress,
    "evaluated": _evaluated,
    "checkpointed": _checkpointed,
    "noted": lambda event: f"note: {text(event, 'message')}",
    "warned": lambda event: f"warning: {text(event, 'message')}",
    "stopped": _stopped,
    "replanned": _replanned,
    "settled": _settled,
    "recovered": _recovered,
    "skipped": _skipped,
    "logged": _logged,
    "finished": _finished,
}


def advice(bottleneck: Bottleneck) -> str:
    """The change that would help most, and by how much: `Evaluate half as often: …; saves about 12 % …`."""
    return bottleneck.advice if bottleneck.gain is None else f"{bottleneck.advice} {format_gain(bottleneck.gain)}"


def verdict_lines(bottleneck: Bottleneck) -> list[str]:
    """The verdict for the terminal: the sentence with its utilisation, what would help, and what cannot be true."""
    used = f" MFU {100 * bottleneck.mfu:.0f} % of the measured ceiling." if bottleneck.mfu is not None else ""
    return [f"{bottleneck.sentence}{used}", advice(bottleneck), *bottleneck.problems]


def closing_lines(finished: Event) -> list[str]:
    """The lines on the verdict and the profile of a `finished` event, for the terminal."""
    bottleneck, profile = finished.fields.get("bottleneck"), finished.fields.get("profile")
    lines = verdict_lines(from_json(bottleneck, Bottleneck)) if isinstance(bottleneck, Mapping) else []
    if isinstance(profile, Mapping) and isinstance(profile.get("files"), Mapping):
        folder = profile.get("folder", "")
        files = profile["files"].items()
        lines += [f"{what}: {folder}/{name} (open {HOW_TO_OPEN.get(what, 'it')})" for what, name in files]
    return lines


HOW_TO_OPEN = {
    "trace": "at ui.perfetto.dev, or `tensorboard --logdir` of its folder with torch-tb-profiler",
    "kernels": "in a spreadsheet: every operation by line",
    "memory": "in a spreadsheet: every allocation and free, with the total after it",
    "memory snapshot": "at pytorch.org/memory_viz",
}
"""How each file is opened."""


def describe_study_event(event: StudyEvent) -> list[str]:
    """A study's event as lines of text."""
    fields = event.fields
    match event.kind:
        case "looking":
            return [f"looking at {fields['job']} …"]
        case "forecast":
            return _forecast_lines(fields)
        case "packed":
            return [fields["why"]]
        case "began" | "resumed":
            verb = "begins" if event.kind == "began" else "goes on"
            place = ""
            if fields.get("member") is not None:  # of a population
                after = "" if fields["parent"] is None else f", from trial {fields['parent']}"
                place = f" (member {fields['member']}, interval {fields['interval']}{after})"
            return [f"trial {fields['trial']} {verb}{place}: {format_settings(fields['parameters'])}"]
        case "ended":
            value = "" if fields["value"] is None else f": {fields['objective']} {float(fields['value']):.4g}"
            reason = f" ({fields['reason'].strip()})" if fields["reason"] else ""
            best = fields["best"]
            record = "" if best is None else f"; best {best['value']:.4g} (trial {best['trial']})"
            end = f"after {fields['samples']:,} samples{reason}{record}"
            return [f"trial {fields['number']} {fields['state']}{value} {end}"]
        case "warned":
            return [f"warning: {fields['message']}"]
        case "done":
            return [f"{fields['trials']} trials, {fields['samples']:,} samples in all; page: {fields['page']}"]


def format_settings(parameters: dict[str, JSON]) -> str:
    """Settings on one line: `lr=0.012 width=32`."""
    texts = {
        name: f"{value:.4g}" if isinstance(value, float) else exact_setting(value) for name, value in parameters.items()
    }
    return " ".join(f"{name}={text}" for name, text in texts.items())


def _forecast_lines(fields: dict[str, Any]) -> list[str]:
    total, pruned = (_estimate(fields[name]) for name in ("total_s", "pruned_s"))
    lines = [f"{fields['trials']} trials, {fields['parallel']} at once"]
    if total is not None:
        low, high = format_seconds(total.low), format_seconds(total.high)
        lines[0] += f": about {format_seconds(total.value)} ({low} to {high}) if each is trained to its end"
    if pruned is not None and total is not None and pruned.value < total.value:
        lines.append(f"  about {format_seconds(pruned.value)} with pruning")
    for name, what in (("energy_kwh", "energy"), ("cost_usd", "rent of such a device")):
        if (estimate := _estimate(fields[name])) is not None:
            lines.append(f"  {what}: about {format_count(float(f'{estimate.value:.2g}'))} {estimate.unit}")
    lines += [f"  {_planned_trial(from_json(trial, PlannedTrial))}" for trial in fields["planned"]]
    return lines + [f"  assumed: {line}" for line in fields["assumptions"]]


def _planned_trial(plan: PlannedTrial) -> str:
    settings = format_settings(plan.parameters)
    if plan.problem or plan.total_s is None:
        return f"{settings}: {plan.problem.splitlines()[0] if plan.problem else 'not planned'}"
    memory = f", {format_bytes(plan.peak_bytes.value)}" if plan.peak_bytes is not None else ""
    return f"{settings}: {format_seconds(plan.total_s.value)}{memory}"


def _estimate(value: JSON) -> Estimate | None:
    return None if value is None else from_json(value, Estimate)


def exact_setting(value: JSON) -> str:
    """A setting as `--set` takes it: `none`, `true`, a number in full."""
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def describe_prediction_event(event: PredictionEvent) -> str:
    """A sentence on the event."""
    fields = event.fields
    match event.kind:
        case "started":
            done = f", {fields['done_parts']:,} of them done before" if fields["done_parts"] else ""
            return (
                f"{_several(fields['rows'], 'row')} in {_several(fields['parts'], 'part')}{done}: "
                f"batches of {fields['batch_rows']}, {_several(fields['instances'], 'instance')} of "
                f"{_several(fields['threads'], 'thread')}, into {fields['out']}"
            )
        case "progress":
            eta = "unknown" if fields["eta_s"] is None else format_seconds(fields["eta_s"])
            return (
                f"{fields['rows']:,} of {fields['total_rows']:,} rows, {fields['bad_rows']:,} bad, "
                f"{format_rate(fields['rows_per_s'], 'rows')}, {eta} to go"
            )
        case "warned":
            return f"warning: {fields['message']}"
        case "finished":
            bad, now, padding = fields["bad_rows"], fields["computed_rows"], fields["padding_waste_ratio"]
            aside = f"{_several(bad, 'bad row')} in {fields['out']}/bad_rows.jsonl" if bad else "no bad rows"
            rate = format_rate(fields["rows_per_s"], "rows") + (f", {padding:.1%} padding" if padding else "")
            last = "all of it was done before"
            if now:
                last = f"{now:,} computed in {format_seconds(fields['wall_s'])} ({rate})"
            rows = _several(fields["rows"], "row")
            return f"{rows} answered, {aside}; {last}\npredictions: {fields['out']}/predictions"


def _several(count: int, what: str) -> str:
    """`1 part`, `1,200 parts`."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"

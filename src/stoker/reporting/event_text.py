"""One line of plain text for each notable event; the live display, plain logs and the page's timeline say the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from stoker.records import Event, Layout, from_json
from stoker.records.codec import JSON
from stoker.reporting.history import (
    evaluation_metrics,
    finite,
    number,
    numbers,
    planned_forecast,
    planned_plan,
    text,
)
from stoker.reporting.wording import DATA_GUARANTEES, format_interval, format_metric, format_metrics, format_samples
from stoker.units import format_bytes, format_rate, format_seconds


def describe_event(event: Event) -> str:
    """The event in one line without its time: `valid at 54,000 samples: accuracy 91.80 % (best so far)`."""
    return _DESCRIPTIONS[event.kind](event)


ERRORS_SO_FAR = "errors of forecasts here so far"
"""The beginning of the line on how far earlier forecasts were off, which `--explain` shows."""

_IN_PLAN_AND_REPORT = ("speed: ", "memory: ", "to finish: ", ERRORS_SO_FAR)


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
    words = plan.in_words() if plan else text(event, "plan")
    line = f"planned{f' in {format_seconds(took)}' if took is not None else ''}: {words}"
    if forecast is None:
        return line
    total = forecast.total_s
    return f"{line}; forecast {format_seconds(total.value)} ({format_interval(total)}, {total.basis})"


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
    """The data's name, class and guarantee, from the class alone or an object with more."""
    known = data if isinstance(data, Mapping) else {"class": data} if data else {}
    name, data_class = known.get("name"), known.get("class", "")
    guarantee = known.get("guarantee") or DATA_GUARANTEES.get(str(data_class), "")
    words = f"{name} ({data_class} data)" if name else f"{data_class} data" if data_class else ""
    return f"{words}: {guarantee}" if words and guarantee else words


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
    return f"stopped{where}: {text(event, 'reason', 'unknown')}"


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
    "recovered": _recovered,
    "skipped": _skipped,
    "finished": _finished,
}

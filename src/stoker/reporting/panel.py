"""A run as it stands: its events folded into a snapshot, and what a live display draws of it in a terminal."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from stoker import activity
from stoker.records import Event, Forecast, Plan, from_json
from stoker.records.progress import is_validation
from stoker.reporting.event_text import closing_lines, describe_event, plan_notes, stop_reason
from stoker.reporting.history import (
    as_number,
    evaluation_metrics,
    finite,
    number,
    numbers,
    planned_forecast,
    planned_plan,
    text,
)
from stoker.reporting.wording import (
    format_interval,
    format_metric,
    format_metrics,
    format_samples,
    headline_metric,
    is_wide,
)
from stoker.units import format_bytes, format_rate, format_seconds

_MAY_BECOME_UNKNOWN = frozenset({"eta_s", "samples_per_s", "loss"})
"""Fields that an event may reset to unknown; others keep their last value."""

Curve = tuple[tuple[float, float], ...]
"""(position [samples], value) pairs in order."""

_MOST_POINTS = 512
"""Losses and rates kept; every second one is dropped when there are more, so that they span the whole run."""


@dataclass(frozen=True, kw_only=True)
class RunSnapshot:
    """The state of a run after some events; times in seconds, `at` and `saved_at` since 1970, memory in bytes.

    `num_train` is the number of samples in an epoch; `best` and `best_samples` are the metrics and the position of the
    best evaluation so far; `split_s` sums what this process spent; before training `at` is when the current stage began
    (0 if unknown); `verdict` is what held the run back, in lines; `processes` train together; `trying` is the plan in
    force while plans are tried, and there is no `forecast` until then; `waiting` is where a run elsewhere is, in words,
    while nothing trains.
    """

    phase: str = "planning"
    run: str = ""
    plan: str = ""
    forecast: Forecast | None = None
    explanation: tuple[str, ...] = ()
    device: str = ""
    at: float = 0.0
    samples: float = 0.0
    total_samples: float = 0.0
    num_train: float = 0.0
    loss: float | None = None
    learning_rate: float | None = None
    samples_per_s: float | None = None
    eta_s: float | None = None
    wall_s: float = 0.0
    split_s: Mapping[str, float] = field(default_factory=dict)
    resident_bytes: float | None = None
    allocated_bytes: float | None = None
    losses: Curve = ()
    rates: Curve = ()
    valid: Mapping[str, float] = field(default_factory=dict)
    best: Mapping[str, float] = field(default_factory=dict)
    best_samples: float = 0.0
    saved_at: float | None = None
    saved_samples: float = 0.0
    saved_bytes: float | None = None
    reason: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    report: str = ""
    verdict: tuple[str, ...] = ()
    processes: int = 1
    trying: str = ""
    waiting: str = ""

    @property
    def fraction(self) -> float:
        """Share of the training that is done [0 to 1]; 0 while the total is unknown."""
        return min(1.0, self.samples / self.total_samples) if self.total_samples else 0.0

    @property
    def is_over(self) -> bool:
        """Whether nothing more will happen in this process."""
        return self.phase in ("finished", "stopped")

    def after(self, event: Event) -> RunSnapshot:
        """The run as it stands once `event` has happened."""
        change = _CHANGES.get(event.kind)
        changes = {} if change is None else change(self, event)
        known = {name: value for name, value in changes.items() if value is not None or name in _MAY_BECOME_UNKNOWN}
        return dataclasses.replace(self, **known)


def _planned(_: RunSnapshot, event: Event) -> dict[str, Any]:
    plan, forecast = planned_plan(event), planned_forecast(event)
    lines = event.fields.get("explanation")
    return {
        "at": event.at,
        "waiting": "",
        "run": text(event, "run") or None,
        "plan": plan.in_words() if plan else text(event, "plan"),
        "device": text(event, "device") or (plan.device if plan else None),
        "forecast": None if event.fields.get("is_settled") is False else forecast,
        "explanation": tuple(str(line) for line in lines) if isinstance(lines, list | tuple) else None,
        "processes": plan.layout.world_size if plan else None,
    }


def _replanned(before: RunSnapshot, event: Event) -> dict[str, Any]:
    if before.trying:
        return {}
    new = event.fields.get("new")
    plan = from_json(new, Plan) if isinstance(new, Mapping) else None
    return {"plan": plan.in_words(), "processes": plan.layout.world_size} if plan else {}


def _settled(before: RunSnapshot, event: Event) -> dict[str, Any]:
    plan, forecast = planned_plan(event), planned_forecast(event)
    return {"plan": plan.in_words() if plan else None, "forecast": forecast or before.forecast, "trying": ""}


def _started(before: RunSnapshot, event: Event) -> dict[str, Any]:
    environment, data = event.fields.get("environment"), event.fields.get("data")
    model = environment.get("device_model") if isinstance(environment, Mapping) else None
    return {
        "phase": "training",
        "at": event.at,
        "samples": number(event, "samples"),
        "total_samples": number(event, "total_samples"),
        "num_train": as_number(data.get("train")) if isinstance(data, Mapping) else None,
        "device": str(model) if model else before.device,
        "run": text(event, "run") or None,
    }


def _resumed(before: RunSnapshot, event: Event) -> dict[str, Any]:
    """A run that goes back drops what is known of samples that it will do again."""
    samples = number(event, "samples") or 0.0
    forgotten = {"best": {}, "best_samples": 0.0} if before.best_samples > samples else {}
    return {
        "phase": "training",
        "at": event.at,
        "samples": samples,
        "losses": _up_to(before.losses, samples),
        "rates": _up_to(before.rates, samples),
        **forgotten,
    }


def _progress(before: RunSnapshot, event: Event) -> dict[str, Any]:
    loss, rate = finite(event, "loss"), finite(event, "samples_per_s")
    spent = numbers(event.fields.get("split_s"))
    phases = dict.fromkeys([*before.split_s, *spent])
    return {
        "phase": "training",
        "at": event.at,
        "samples": number(event, "samples"),
        "total_samples": number(event, "total_samples"),
        "loss": number(event, "loss"),
        "learning_rate": finite(event, "lr"),
        "samples_per_s": rate,
        "eta_s": finite(event, "eta_s"),
        "wall_s": finite(event, "wall_s"),
        "split_s": {phase: before.split_s.get(phase, 0.0) + spent.get(phase, 0.0) for phase in phases},
        "resident_bytes": finite(event, "resident_bytes"),
        "allocated_bytes": finite(event, "allocated_bytes"),
        "trying": text(event, "trying"),
        "losses": _with_one_more(before.losses, event, loss),
        "rates": _with_one_more(before.rates, event, rate),
    }


def _evaluated(before: RunSnapshot, event: Event) -> dict[str, Any]:
    metrics, name = evaluation_metrics(event), text(event, "split", "valid").partition("/")[2]
    if name:  # one of several validation sets
        metrics = {f"{name}/{measure}": value for measure, value in metrics.items()}
    changes: dict[str, Any] = {}
    if is_validation(event):
        changes["valid"] = {**before.valid, **metrics} if name else metrics
    if event.fields.get("best") is True:
        changes |= {"best": metrics, "best_samples": number(event, "samples")}
    return changes


def _checkpointed(_: RunSnapshot, event: Event) -> dict[str, Any]:
    samples = number(event, "samples")
    return {"saved_at": event.at, "saved_samples": samples, "saved_bytes": finite(event, "bytes")}


def _noted(_: RunSnapshot, event: Event) -> dict[str, Any]:
    """The phase of a run elsewhere, from its notes."""
    phase = text(event, "phase")
    if phase not in _WAITING:
        return {}
    return {"phase": "planning", "waiting": text(event, "message"), "at": event.at}


_WAITING = ("queued", "starting", "preempted", "requeued")
"""Phases of a run elsewhere in which it does not train."""


def _stopped(_: RunSnapshot, event: Event) -> dict[str, Any]:
    return {"phase": "stopped", "samples": number(event, "samples") or None, "reason": stop_reason(event)}


def _finished(_: RunSnapshot, event: Event) -> dict[str, Any]:
    return {
        "phase": "finished",
        "samples": number(event, "samples"),
        "metrics": numbers(event.fields.get("metrics")),
        "wall_s": finite(event, "wall_s"),
        "report": text(event, "report"),
        "verdict": tuple(closing_lines(event)),
        "run": text(event, "run") or None,
    }


def _up_to(curve: Curve, samples: float) -> Curve:
    return tuple(point for point in curve if point[0] <= samples)


def _with_one_more(curve: Curve, event: Event, value: float | None) -> Curve:
    """The curve and its new point; every second point of it once there are too many."""
    longer = curve if value is None else (*curve, (number(event, "samples") or 0.0, value))
    return longer if len(longer) <= _MOST_POINTS else longer[::2]


_CHANGES = {
    "planned": _planned,
    "started": _started,
    "resumed": _resumed,
    "progress": _progress,
    "evaluated": _evaluated,
    "checkpointed": _checkpointed,
    "noted": _noted,
    "replanned": _replanned,
    "settled": _settled,
    "stopped": _stopped,
    "finished": _finished,
}
"""By the kind of event what it changes; other kinds change nothing."""


EMBER = "#e8701a"
"""The one accent, readable on light and dark terminals."""

_WIDTH = 96
_NARROWEST, _WIDEST = 8, 32
_BLOCKS = "▁▂▃▄▅▆▇█"


class Sparkline:
    """A curve in one row of block characters over equal stretches of samples; blank where a terminal has no blocks.

    Levels are between the least and the greatest mean; of their logarithms if all are positive, as losses are.
    """

    def __init__(self, curve: Curve, *, note: str = "") -> None:
        self._curve = curve
        self._note = note

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        """The row of blocks."""
        room = options.max_width - len(self._note) - 2
        blocks = "" if options.ascii_only or room < _NARROWEST else f"{self.blocks(min(_WIDEST, room))}  "
        yield Text.assemble((blocks, EMBER), (self._note, "dim"), no_wrap=True, overflow="crop")

    def __rich_measure__(self, _: Console, __: ConsoleOptions) -> Measurement:
        """As wide as its columns and the note next to them."""
        return Measurement(1, _WIDEST + 2 + len(self._note))

    def blocks(self, width: int) -> str:
        """The characters, left to right: `width` of them, or fewer while there are fewer points."""
        means = _column_means(self._curve, width)
        levels = [math.log(mean) for mean in means] if all(mean > 0 for mean in means) else means
        if not levels:
            return ""
        low, span = min(levels), max(levels) - min(levels)
        return "".join(_BLOCKS[round((level - low) / span * 7)] if span else _BLOCKS[3] for level in levels)


def frame(now: RunSnapshot, clock_s: float) -> RenderableType:
    """The panel at `clock_s` [s since 1970]; what is not known yet has no row."""
    title = Text.assemble(("stoker", EMBER), (f" {now.run}" if now.run else "", "bold"))
    body: list[RenderableType] = [Text(now.plan, style="dim")] if now.plan else []
    if now.trying:
        body = [Text.assemble(("trying plans: ", EMBER), (trying_words(now), "dim"))]
    doing = activity.in_words()
    if now.phase == "planning":
        since = f" ({_whole_seconds(clock_s - now.at)})" if now.at else ""
        phase = now.waiting or doing or f"{'preparing the first batch' if now.plan else 'planning'}{since}"
        body.append(Spinner("dots", text=Text(phase), style=EMBER))
    else:
        progress = Table.grid(padding=(0, 2, 0, 0), expand=True)
        progress.add_column(ratio=1)
        progress.add_column(justify="right", no_wrap=True)
        bar = ProgressBar(
            total=1.0, completed=now.fraction, complete_style=EMBER, finished_style="green", style="grey37"
        )
        progress.add_row(bar, Text(f"{100 * now.fraction:5.1f} %", style="bold"))
        details = Table.grid(padding=(0, 2, 0, 0))
        details.add_column(style="dim", no_wrap=True)
        details.add_column(min_width=18, no_wrap=True)
        details.add_column()
        for row in _rows(now, clock_s):
            details.add_row(*row)
        body += [Padding(progress, (1, 0, 0, 0)), _schedule(now, clock_s), Text(), details]
        if doing is not None:
            body.append(Spinner("dots", text=Text(doing), style=EMBER))
    return Panel(
        Group(*body),
        title=title,
        title_align="left",
        subtitle=Text(now.device, style="dim"),
        subtitle_align="right",
        border_style="grey50",
        padding=(0, 1),
        width=_WIDTH,
        highlight=False,
    )


def trying_words(now: RunSnapshot) -> str:
    """The plan that is being tried, by what it settles differently from the one that the run began under."""
    began = now.plan.split(" · ")
    return " · ".join(word for word in now.trying.split(" · ") if word not in began) or "the one it began under"


def permanent_lines(event: Event) -> list[RenderableType]:
    """Lines that stay above the panel: the plan, the start, resumes, evaluations, warnings; else nothing."""
    if event.kind == "planned":
        plan, forecast = planned_plan(event), planned_forecast(event)
        lines = [Text(plan.in_words() if plan else text(event, "plan"), style="bold")]
        if event.fields.get("is_settled") is False:
            lines[0] = Text(describe_event(event), style="bold")
        elif forecast:
            total = forecast.total_s
            lines.append(Text(f"forecast {format_seconds(total.value)} ({format_interval(total)}, {total.basis})"))
        lines += [Text(line, style="dim") for line in plan_notes(event)]
        return [marked("▸" if index == 0 else " ", EMBER, line) for index, line in enumerate(lines)]
    if event.kind == "evaluated":
        return [marked("◆", "cyan", _evaluation(event))]
    noticed = dict.fromkeys(("warned", "replanned", "recovered", "skipped"), ("!", "bold yellow"))
    begun = dict.fromkeys(("started", "settled"), ("▸", EMBER))
    marks = {**begun, "resumed": ("↻", EMBER), "noted": ("·", "dim"), **noticed}
    mark, style = marks.get(event.kind, ("", ""))
    return [marked(mark, style, Text(describe_event(event)))] if mark else []


def marked(mark: str, style: str, line: Text) -> RenderableType:
    """A mark and its line; what does not fit goes on under the line's beginning."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(style=style, no_wrap=True)
    grid.add_column()
    grid.add_row(mark, line)
    return grid


def _evaluation(event: Event) -> Text:
    """An evaluation as columns, so that those of a run stand under each other."""
    samples = format_samples(number(event, "samples") or 0)
    metrics = evaluation_metrics(event)
    named = headline_metric(metrics)
    others = format_metrics({name: value for name, value in metrics.items() if named and name != named[0]})
    return Text.assemble(
        f"{text(event, 'split', 'valid'):<6}",
        (f"{samples:>11} samples  ", "dim"),
        (f"{named[0]} {format_metric(*named)}  " if named else "", "bold"),
        others,
        ("  best so far" if event.fields.get("best") is True else "", "green"),
    )


def closing(now: RunSnapshot) -> RenderableType:
    """The lines that remain on the terminal when the run has ended or was stopped."""
    if now.phase == "stopped":
        where = f" at {format_samples(now.samples)} samples" if now.samples else ""
        lines = [Text.assemble(("■ ", "yellow"), f"stopped{where}: {now.reason}")]
        if now.saved_at is not None:
            saved = f"  saved at {format_samples(now.saved_samples)} samples; the same command continues from there"
            lines.append(Text(saved, style="dim"))
        return Group(*lines)
    named = headline_metric(now.metrics)
    result = "finished" if now.loss is None else f"training loss {format_metric('loss', now.loss)}"
    if named:
        result = f"{named[0].replace('/', ' ')} {format_metric(*named)}"
    lines = [Text.assemble(("✓ ", "bold green"), (result, "bold green"), (f"  {now.run}", "bold"))]
    effort = f"{format_samples(now.samples)} samples in {format_seconds(now.wall_s)}"
    best = headline_metric(now.best)
    if best:
        effort += f" · best {best[0]} on valid {format_metric(*best)} at {format_samples(now.best_samples)} samples"
    lines.append(Text(f"  {effort}"))
    lines += [Text(f"  {line}", overflow="fold") for line in now.verdict]
    if now.report:
        lines.append(Text(f"  report {now.report}", style="dim", overflow="fold"))
    return Group(*lines)


def _schedule(now: RunSnapshot, clock_s: float) -> Text:
    """How far in samples and epochs, and when it ends: as a time to go and as the time of day."""
    total = f" of {format_samples(now.total_samples)}" if now.total_samples else ""
    line = Text(f"{format_samples(now.samples)}{total} samples")
    if now.num_train:
        epochs = f"{round(now.total_samples / now.num_train, 2):g}"
        line.append(f" · {now.samples / now.num_train:.2f} of {epochs} epochs")
    if now.eta_s is not None:
        ends_at = now.at + now.eta_s
        line.append(" · ").append(f"{_whole_seconds(ends_at - clock_s)} to go", style="bold")
        line.append(f", until {time_of_day(ends_at, clock_s)}")
    return line


def _whole_seconds(duration_s: float) -> str:
    """A time that is counted down or up: without tenths, never below zero."""
    whole = max(0, round(duration_s))
    return f"{whole} s" if whole < 60 else format_seconds(whole)


def time_of_day(then_s: float, now_s: float) -> str:
    """Local time of day, with the weekday when it is not today, and the date when it is further than six days off."""
    then, now = time.localtime(then_s), time.localtime(now_s)
    if then[:3] == now[:3]:
        return time.strftime("%H:%M:%S", then)
    return time.strftime("%a %H:%M" if then_s - now_s < 6 * 86400 else "%Y-%m-%d %H:%M", then)


def _rows(now: RunSnapshot, clock_s: float) -> list[tuple[str, RenderableType, RenderableType]]:
    rows: list[tuple[str, RenderableType, RenderableType]] = []
    if now.loss is not None:
        rate = f"learning rate {now.learning_rate:.2g}" if now.learning_rate is not None else ""
        rows.append(("loss", _bold(f"{now.loss:.4f}"), Sparkline(now.losses, note=rate)))
    if now.samples_per_s is not None:
        together = f"{now.processes} processes together" if now.processes > 1 else ""
        forecast = _forecast_details(now)
        details = Text.assemble((together, "dim"), (" · " if together and forecast else "", "dim"), forecast)
        rows.append(("speed", _bold(format_rate(now.samples_per_s)), details))
    if named := headline_metric(now.valid):
        others = {name: value for name, value in now.valid.items() if name != named[0]}
        parts = [format_metrics(others)] if others else []
        if named[0] in now.best:
            best = format_metric(named[0], now.best[named[0]])
            parts.append(f"best {best} at {format_samples(now.best_samples)} samples")
        rows.append(("valid", _bold(f"{named[0]} {format_metric(*named)}"), Text(" · ".join(parts))))
    if now.wall_s:
        whole = sum(now.split_s.values())
        shares = [(name, seconds / whole) for name, seconds in now.split_s.items() if whole > 0]
        split = " · ".join(f"{name} {100 * share:.0f} %" for name, share in shares if share >= 0.005)
        rows.append(("time", Text(_whole_seconds(now.wall_s)), Text(split, style="dim")))
    if now.allocated_bytes is not None:
        details = Text("of the device, at its peak", style="dim")
        rows.append(("memory", Text(format_bytes(now.allocated_bytes)), details))
    elif now.resident_bytes is not None:
        rows.append(("memory", Text(format_bytes(now.resident_bytes)), Text()))
    if now.saved_at is not None:
        size = f" · {format_bytes(now.saved_bytes)}" if now.saved_bytes is not None else ""
        where = f"at {format_samples(now.saved_samples)} samples{size}"
        rows.append(("saved", Text(f"{_whole_seconds(clock_s - now.saved_at)} ago"), Text(where, style="dim")))
    return rows


def _forecast_details(now: RunSnapshot) -> Text:
    """The forecast interval of the rate, and whether the rate is in it."""
    if now.trying:
        return Text("no forecast yet", style="dim")
    if now.forecast is None or now.samples_per_s is None:
        return Text()
    expected = now.forecast.samples_per_s
    is_slow, is_fast = now.samples_per_s < expected.low, now.samples_per_s > expected.high
    verdict = "slower than" if is_slow else "faster than" if is_fast else "in a wide" if is_wide(expected) else "as"
    line = f"{verdict} forecast ({expected.low:,.0f} to {expected.high:,.0f})"
    return Text(line, style="yellow" if is_slow else "dim")


def _bold(words: str) -> Text:
    return Text(words, style="bold")


def _column_means(curve: Curve, width: int) -> Sequence[float]:
    """Means over `width` equal stretches of the position; stretches without a point are left out."""
    if not curve:
        return []
    first, last = curve[0][0], curve[-1][0]
    columns: dict[int, list[float]] = {}
    for position, value in curve:
        place = (position - first) / (last - first) if last > first else 0.0
        columns.setdefault(min(width - 1, int(place * width)), []).append(value)
    return [sum(values) / len(values) for _, values in sorted(columns.items())]

"""What a live display draws in a terminal: the panel of a running run, its permanent lines, and its closing lines."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from stoker.records import Event
from stoker.reporting.event_text import describe_event, plan_notes
from stoker.reporting.history import evaluation_metrics, number, planned_forecast, planned_plan, text
from stoker.reporting.snapshot import Curve, RunSnapshot
from stoker.reporting.wording import (
    format_interval,
    format_metric,
    format_metrics,
    format_samples,
    headline_metric,
    is_wide,
)
from stoker.units import format_bytes, format_rate, format_seconds

EMBER = "#e8701a"
"""The one accent, readable on light and dark terminals."""

_WIDTH = 96
_NARROWEST = 8
_BLOCKS = "▁▂▃▄▅▆▇█"


class Sparkline:
    """A curve in one row of block characters over equal stretches of samples; blank where a terminal has no blocks.

    Levels are between the least and the greatest mean; of their logarithms if all are positive, as losses are.
    """

    def __init__(self, curve: Curve, *, width: int = 32, note: str = "") -> None:
        self._curve = curve
        self._width = width
        self._note = note

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        """The row of blocks."""
        room = options.max_width - len(self._note) - 2
        blocks = "" if options.ascii_only or room < _NARROWEST else f"{self.blocks(min(self._width, room))}  "
        yield Text.assemble((blocks, EMBER), (self._note, "dim"), no_wrap=True, overflow="crop")

    def __rich_measure__(self, _: Console, __: ConsoleOptions) -> Measurement:
        """As wide as its columns and the note next to them."""
        return Measurement(1, self._width + 2 + len(self._note))

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
    if now.phase == "planning":
        doing = "preparing the first batch" if now.plan else "planning: measuring what this job needs here"
        since = f", {_whole_seconds(clock_s - now.at)}" if now.at else ""
        body.append(Spinner("dots", text=Text(f"{doing}{since}"), style=EMBER))
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
    return Panel(
        Group(*body), title=title, title_align="left", subtitle=Text(now.device, style="dim"), subtitle_align="right",
        border_style="grey50", padding=(0, 1), width=_WIDTH, highlight=False,
    )  # fmt: skip


def permanent_lines(event: Event) -> list[RenderableType]:
    """What stays readable above the panel: the plan, the start, resumes, evaluations, warnings; else nothing."""
    if event.kind == "planned":
        plan, forecast = planned_plan(event), planned_forecast(event)
        lines = [Text(plan.in_words() if plan else text(event, "plan"), style="bold")]
        if forecast:
            total = forecast.total_s
            lines.append(Text(f"forecast {format_seconds(total.value)} ({format_interval(total)}, {total.basis})"))
        lines += [Text(line, style="dim") for line in plan_notes(event)]
        return [marked("▸" if index == 0 else " ", EMBER, line) for index, line in enumerate(lines)]
    if event.kind == "evaluated":
        return [marked("◆", "cyan", _evaluation(event))]
    noticed = dict.fromkeys(("warned", "replanned", "recovered", "skipped"), ("!", "bold yellow"))
    marks = {"started": ("▸", EMBER), "resumed": ("↻", EMBER), "noted": ("·", "dim"), **noticed}
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
    """What remains on the terminal when the run has ended or was stopped."""
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
    if now.resident_bytes is not None:
        rows.append(("memory", Text(format_bytes(now.resident_bytes)), Text()))
    if now.saved_at is not None:
        size = f" · {format_bytes(now.saved_bytes)}" if now.saved_bytes is not None else ""
        where = f"at {format_samples(now.saved_samples)} samples{size}"
        rows.append(("saved", Text(f"{_whole_seconds(clock_s - now.saved_at)} ago"), Text(where, style="dim")))
    return rows


def _forecast_details(now: RunSnapshot) -> Text:
    """The forecast interval of the rate, and whether the rate is in it."""
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

"""How a prediction job is shown: a bar in a terminal, plain lines elsewhere, or one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO, cast

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from stoker.errors import BadJob
from stoker.records import to_json
from stoker.records.prediction import PredictionEvent
from stoker.units import format_rate, format_seconds

if TYPE_CHECKING:
    from stoker.predicting.request import PredictOptions, Resize

Sink = Callable[[PredictionEvent], None]

_LINE_EVERY_S = 10.0


def prediction_options(
    *, columns: list[str] | None, keep: str, resize: str, batch: int | None, **others: Any
) -> PredictOptions:
    """What the command line's options mean.

    Raises:
        BadJob: one of them has a value that it does not take.
    """
    from stoker.predicting.request import PredictOptions

    if resize not in {"", "stretch", "crop", "pad"}:
        raise BadJob(f"--resize {resize}: wanted stretch, crop or pad")
    kept = tuple(name.strip() for name in keep.split(",") if name.strip())
    return PredictOptions(
        columns=tuple(columns or ()), keep=kept, resize=cast("Resize", resize), batch_rows=batch, **others
    )


@contextmanager
def prediction_display(*, as_json: bool, stdout: TextIO, console: Console) -> Iterator[Sink]:
    """A sink that shows a job: JSON on `stdout` if asked for, else a bar or lines on `console`."""
    if as_json:
        yield lambda event: print(json.dumps(to_json({"event": event.kind, "at": event.at, **event.fields})),
                                  file=stdout, flush=True)  # fmt: skip
    elif console.is_terminal and not console.is_dumb_terminal:
        with _bar(console) as progress:
            yield _Bar(progress, console)
    else:
        yield _Lines(console)


def told(event: PredictionEvent) -> str:
    """What happened, in words."""
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
            return _summary(fields)


def _summary(fields: dict[str, Any]) -> str:
    bad, now, padding = fields["bad_rows"], fields["computed_rows"], fields["padding_waste_ratio"]
    aside = f"{_several(bad, 'bad row')} in {fields['out']}/bad_rows.jsonl" if bad else "no bad rows"
    rate = format_rate(fields["rows_per_s"], "rows") + (f", {padding:.1%} padding" if padding else "")
    last = f"{now:,} computed in {format_seconds(fields['wall_s'])} ({rate})" if now else "all of it was done before"
    return f"{_several(fields['rows'], 'row')} answered, {aside}; {last}\npredictions: {fields['out']}/predictions"


def _several(count: int, what: str) -> str:
    """`1 part`, `1,200 parts`."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


class _Lines:
    """A line for each event, and for progress at most every ten seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown_at = float("-inf")

    def __call__(self, event: PredictionEvent) -> None:
        if event.kind == "started":
            self._shown_at = event.at
        if event.kind == "progress":
            if event.at - self._shown_at < _LINE_EVERY_S:
                return
            self._shown_at = event.at
        self._console.print(told(event), highlight=False, markup=False, soft_wrap=True)


class _Bar:
    """A bar that grows with the rows; lines that stay stand above it."""

    def __init__(self, progress: Progress, console: Console) -> None:
        self._progress = progress
        self._console = console
        self._task = progress.add_task("", total=None, visible=False)

    def __call__(self, event: PredictionEvent) -> None:
        if event.kind == "progress":
            fields = event.fields
            words = f"{format_rate(fields['rows_per_s'], 'rows')}, {fields['bad_rows']:,} bad"
            self._progress.update(
                self._task, completed=fields["rows"], total=fields["total_rows"], description=words, visible=True,
                refresh=True,
            )  # fmt: skip
            return
        if event.kind == "finished":
            self._progress.update(self._task, visible=False)
        self._console.print(escape(told(event)), highlight=False, soft_wrap=True)


def _bar(console: Console) -> Progress:
    return Progress(
        BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn(),
        console=console, transient=True,
    )  # fmt: skip

"""`stoker predict`: offline batches, shown as a bar in a terminal, plain lines elsewhere, or one JSON object a line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, cast

import typer
from rich.console import Console
from rich.markup import escape

from stoker import api
from stoker.cli.terminal import AsJson, Debug, reported
from stoker.errors import BadJob
from stoker.records import to_json
from stoker.records.prediction import PredictionEvent
from stoker.units import format_rate, format_seconds

if TYPE_CHECKING:
    from rich.progress import Progress

    from stoker.predicting.prediction_request import PredictOptions, Resize


def predict(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="An exported model.", show_default=False)],
    inputs: Annotated[
        list[str], typer.Argument(metavar="INPUT…", help="Files, folders and patterns with rows.", show_default=False)
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Where the answers go.", show_default=False)],
    columns: Annotated[
        list[str] | None, typer.Option("--map", metavar="INPUT=COLUMN", help="The column, or the columns a,b,…, of it.")
    ] = None,
    keep: Annotated[str, typer.Option("--keep", metavar="COLUMNS", help="Columns to copy, with commas between.")] = "",
    pixels: Annotated[
        str, typer.Option("--pixels", metavar="VALUES", help="Of images: 0..255, 0..1, or MEAN/STD of 0 to 1.")
    ] = "",
    resize: Annotated[str, typer.Option("--resize", help="Images of another size: stretch, crop or pad.")] = "",
    allow_nan: Annotated[bool, typer.Option("--allow-nan", help="Give NaN and infinities to the model.")] = False,
    max_bad: Annotated[str, typer.Option("--max-bad", metavar="N", help="The most bad rows: 1%, or 100.")] = "1%",
    batch: Annotated[
        int | None, typer.Option("--batch", metavar="ROWS", min=1, help="Rows of a batch (default: measured).")
    ] = None,
    part_rows: Annotated[
        int | None, typer.Option("--part-rows", metavar="ROWS", min=1, help="Rows of a part (default: about 5 s).")
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", metavar="N", min=1, help="Threads of each instance (default: 1).")
    ] = None,
    new: Annotated[bool, typer.Option("--new", help="Start over, in the next free directory.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Answer all rows of files with an exported model, into Parquet. The same command again continues."""
    with reported(debug=debug):
        options = prediction_options(
            columns=columns, keep=keep, pixels=pixels, resize=resize, allow_nan=allow_nan, max_bad=max_bad,
            batch=batch, part_rows=part_rows, threads=threads,
        )  # fmt: skip
        with prediction_display(as_json=as_json, stdout=sys.stdout, console=Console(stderr=True)) as display:
            api.predict(model, inputs, out, options, new=new, sink=display)


Sink = Callable[[PredictionEvent], None]

_LINE_EVERY_S = 10.0


def prediction_options(
    *, columns: list[str] | None, keep: str, resize: str, batch: int | None, **others: Any
) -> PredictOptions:
    """What the command line's options mean.

    Raises:
        BadJob: one of them has a value that it does not take.
    """
    if resize not in {"", "stretch", "crop", "pad"}:
        raise BadJob(f"--resize {resize}: wanted stretch, crop or pad")
    kept = tuple(name.strip() for name in keep.split(",") if name.strip())
    return api.PredictOptions(
        columns=tuple(columns or ()), keep=kept, resize=cast("Resize", resize), batch_rows=batch, **others
    )


@contextmanager
def prediction_display(*, as_json: bool, stdout: TextIO, console: Console) -> Iterator[Sink]:
    """A sink that shows a job: JSON on `stdout` if asked for, else a bar or lines on `console`."""
    if as_json:
        yield lambda event: print(json.dumps(to_json({"event": event.kind, "at": event.at, **event.fields})),
                                  file=stdout, flush=True)  # fmt: skip
    elif console.is_terminal and not console.is_dumb_terminal:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            yield _Bar(progress, console)
    else:
        yield _Lines(console)


def describe_prediction_event(event: PredictionEvent) -> str:
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
        self._console.print(describe_prediction_event(event), highlight=False, markup=False, soft_wrap=True)


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
        self._console.print(escape(describe_prediction_event(event)), highlight=False, soft_wrap=True)

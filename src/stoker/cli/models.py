"""Commands about exported models.

How a prediction job is shown: a bar in a terminal, plain lines elsewhere, or one JSON object a line.
"""

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
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from stoker import api
from stoker.cli.terminal import AsJson, Debug, Settings, load_job, output, print_document, reported, waiting
from stoker.errors import BadJob
from stoker.records import to_json
from stoker.records.prediction import PredictionEvent
from stoker.units import format_rate, format_seconds

if TYPE_CHECKING:
    from stoker.predicting.prediction_request import PredictOptions, Resize


def export(
    what: Annotated[
        str, typer.Argument(metavar="RUN|FILE", help="A run's directory, its name, `latest`; or a file model.onnx.")
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="The model's directory, such as models/digits.")
    ],
    inputs: Annotated[
        Path | None,
        typer.Option(
            "--inputs", metavar="FILE", help="Example inputs of an ONNX file, .npz (default: drawn at random)."
        ),
    ] = None,
    dynamic: Annotated[
        list[str] | None,
        typer.Option("--dynamic", metavar="INPUT.DIM=NAME", help="A dimension that may vary: input_ids.1=tokens"),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Export a trained model, or take over an ONNX file: graph, weights, golden answers, and proof that they agree."""
    with reported(debug=debug):
        from stoker.cli.exports import export_document, read_dynamic, read_inputs, render_export

        examples, varying = read_inputs(inputs), read_dynamic(dynamic)
        with output(for_json=as_json), waiting("exporting, and checking every engine", quiet=as_json):
            from stoker.exporting import About

            artifact = api.export(what, out, inputs=examples, about=About(dynamic=varying))
        if as_json:
            print_document(export_document(artifact))
        else:
            render_export(artifact, Console())


def compress(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="An exported model's directory, such as models/digits.")
    ],
    max_drop: Annotated[
        str, typer.Option("--max-drop", metavar="DROP", help="The most the metric may lose: 0.5%, or a number.")
    ] = "0.5%",
    metric: Annotated[
        str | None,
        typer.Option(
            "--metric",
            metavar="NAME|FILE",
            help="A name, or a Python file with metric(outputs, targets); without targets: agreement.",
        ),
    ] = None,
    job_file: Annotated[
        Path | None, typer.Option("--job", metavar="FILE", help="The job file whose data to use.")
    ] = None,
    settings: Settings = None,
    data: Annotated[
        Path | None, typer.Option("--data", metavar="FILE", help="Rows instead, .npz or .parquet: inputs and target.")
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option("--batch", metavar="ROWS", help="A batch size that counts; may be repeated.")
    ] = None,
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="Threads of an engine.")] = None,
    seconds: Annotated[float, typer.Option("--seconds", help="About how long the search may take.")] = 180.0,
    seed: Annotated[int, typer.Option("--seed", help="Deals out the rows.")] = 0,
    keep_all: Annotated[
        Path | None, typer.Option("--keep-all", metavar="DIR", help="Keep the graphs of all candidates.")
    ] = None,
    prune: Annotated[
        bool, typer.Option("--prune", help="First train smaller networks beside the run's own, and try these too.")
    ] = False,
    fine_tune: Annotated[
        float | None,
        typer.Option("--fine-tune", metavar="EPOCHS", help="How long each is trained (default: a quarter of the run)."),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Make an exported model smaller and faster, with proof that it keeps its metric and is faster here."""
    with reported(debug=debug):
        from stoker.cli.compressions import compression_document, fine_tuning, render_compression, silence, teller

        if settings and job_file is None:
            raise BadJob("--set is for the job of --job", remedy="Give its file, or leave --set out.")
        with output(for_json=as_json):
            found = api.compress(
                model, max_drop=max_drop, job=None if job_file is None else load_job(job_file, settings)[0], data=data,
                metric=metric, batch_sizes=tuple(sorted(set(batch or ()))), threads=threads, seconds=seconds, seed=seed,
                keep_all=keep_all, prune=prune, fine_tune=fine_tuning(fine_tune, prune=prune),
                tell=teller(Console(stderr=True), quiet=as_json), sink=silence if as_json else None,
            )  # fmt: skip
        if as_json:
            print_document(compression_document(found))
        else:
            render_compression(found, Console())


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
    from stoker.predicting.prediction_request import PredictOptions

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


def _bar(console: Console) -> Progress:
    return Progress(
        BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn(),
        console=console, transient=True,
    )  # fmt: skip

"""`stoker compress`: every candidate with size, latency and what it loses; as a table and as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stoker import api
from stoker.cli.terminal import AsJson, Settings, column_table, load_job, output, print_document, teller
from stoker.errors import BadJob
from stoker.records import Event, to_json
from stoker.units import Duration, format_bytes, format_seconds

if TYPE_CHECKING:
    from stoker.compressing.compress import Compressed
    from stoker.records.compression import Compression, CompressionTrial


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
        bool, typer.Option("--prune", help="First prune and retrain smaller networks, and try these too.")
    ] = False,
    fine_tune: Annotated[
        float | None,
        typer.Option("--fine-tune", metavar="EPOCHS", help="How long each is trained (default: a quarter of the run)."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make an exported model smaller and faster, with proof that it keeps its metric and is faster here."""
    if settings and job_file is None:
        raise BadJob("--set is for the job of --job", remedy="Give its file, or leave --set out.")
    with output(for_json=as_json):
        result = api.compress(
            model,
            max_drop=max_drop,
            job=None if job_file is None else load_job(job_file, settings)[0],
            data=data,
            metric=metric,
            batch_sizes=tuple(sorted(set(batch or ()))),
            threads=threads,
            seconds=seconds,
            seed=seed,
            keep_all=keep_all,
            prune=prune,
            fine_tune=fine_tuning(fine_tune, prune=prune),
            tell=teller(quiet=as_json),
            sink=silence if as_json else None,
        )
    if as_json:
        path = None if result.artifact is None else str(result.artifact.path)
        print_document({"path": path, "compression": to_json(result.record)})
    else:
        render_compression(result, Console())


_STYLES = {"chosen": "bold green", "reference": "bold", "passed": "", "rejected": "dim", "left out": "dim"}


def silence(_event: Event) -> None:
    """Receives the events of a run and shows nothing of them."""


def fine_tuning(epochs: float | None, *, prune: bool) -> Duration | None:
    """How long pruned networks are trained.

    Raises:
        BadJob: no length, or none is trained.
    """
    if epochs is None:
        return None
    if not prune:
        raise BadJob("--fine-tune says how long pruned networks are trained", remedy="Give --prune as well.")
    if not 0 < epochs < float("inf"):
        raise BadJob(f"--fine-tune {epochs:g}: wanted a positive number of epochs")
    return Duration(epochs, "epochs")


def render_compression(result: Compressed, console: Console) -> None:
    """Print a search: every trial with size, latency, what it loses, and why it was not taken."""
    record = result.record
    console.print(_table(record))
    console.print()
    for trial in record.trials[1:]:
        if trial.outcome != "chosen":
            console.print(Text(f"{trial.name}: {trial.reason}", style="dim"), soft_wrap=True)
    console.print()
    for note in record.notes:
        console.print(Text.assemble(("note: ", "bold"), note), soft_wrap=True)
    rows = record.rows
    console.print(
        f"◆ none other is smaller, faster and as good. {record.metric} {record.baseline:.4g} of the original on "
        f"{rows.acceptance:,} rows for acceptance; {rows.selection:,} chose, {rows.calibration:,} calibrated. "
        f"May lose {record.max_drop:.4g} with {100 * record.confidence:g} % confidence. "
        f"{record.threads} {'thread' if record.threads == 1 else 'threads'} on {record.proved_on}; "
        f"took {format_seconds(record.took_s)}.",
        soft_wrap=True,
    )
    if result.artifact is None:
        console.print(_no_gain(record), soft_wrap=True)
        return
    original = record.trials[0]
    chosen = next(trial for trial in record.trials if trial.name == record.chosen)
    smaller = (original.num_bytes or 0) / (chosen.num_bytes or 1)
    console.print(f"{chosen.name}: {chosen.pace or 1:.2f}× as fast, {smaller:.2f}× smaller.", soft_wrap=True)
    console.print(Text.assemble(("written: ", "bold"), str(result.artifact.path)), soft_wrap=True)


def _no_gain(record: Compression) -> str:
    """Why no version was written: nothing to try, or nothing better among what was tried."""
    tried = sum(trial.outcome != "left out" for trial in record.trials[1:])
    if not tried:
        return "There was nothing to try: no version was written."
    among = f" among {tried} of {len(record.trials) - 1} candidates" if tried < len(record.trials) - 1 else ""
    return f"Nothing was better than the original{among}: no version was written."


def _table(record: Compression) -> Table:
    figures = (">size", *(f">batch {rows}" for rows in record.batch_sizes), ">speed", f">{record.metric} lost")
    table = column_table("candidate", *figures, "verdict", folds=figures)
    for trial in record.trials:
        seconds = [trial.latency_s.get(str(size)) for size in record.batch_sizes]
        times = ["" if value is None else format_seconds(value) for value in seconds]
        size = "" if trial.num_bytes is None else format_bytes(trial.num_bytes)
        pace = "" if trial.pace is None else f"{trial.pace:.2f}×"
        name = f"{trial.name} ◆" if trial.on_front else trial.name
        table.add_row(name, size, *times, pace, _lost(trial), trial.outcome, style=_STYLES[trial.outcome])
    return table


def _lost(trial: CompressionTrial) -> str:
    """The drop, with its bound where there is one."""
    if trial.drop is not None:
        return f"{trial.drop.value:.4f}, ≤ {trial.drop.high:.4f}"
    return "" if trial.selection_drop is None else f"{trial.selection_drop:.4f}"

"""`stoker report` and `stoker runs`: list runs, compare them, export them, send them elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from stoker import api, cli
from stoker.cli.elsewhere import launched_document, render_launched
from stoker.cli.terminal import AsJson, RunWord, print_document, say
from stoker.records import to_json


def report(run: RunWord = "latest", as_json: AsJson = False) -> None:
    """Write a run's report again, and show its summary."""
    path = api.report(run)
    record = api.load(run).directory.read_report()
    if as_json:
        print_document({"report": str(path), "run": to_json(record.run)})
        return
    Console().print(Text("\n".join(api.summary_lines(record))))
    say(f"report: {path}")


def runs(
    context: typer.Context,
    where: Annotated[
        str, typer.Option("--where", metavar="TERMS", help="Only such: 'status=finished lr<0.1 name~cnn'.")
    ] = "",
    sort: Annotated[
        str | None, typer.Option("--sort", metavar="NAME", help="By a metric or setting; -NAME for the highest first.")
    ] = None,
    columns: Annotated[
        str, typer.Option("--columns", metavar="NAMES", help="Further columns, such as lr,batch,test/accuracy.")
    ] = "",
    limit: Annotated[int | None, typer.Option("--limit", metavar="N", min=1, help="At most so many.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the runs here, newest first."""
    if context.invoked_subcommand is not None:
        return
    shown = tuple(name.strip() for name in columns.split(",") if name.strip())
    chosen, num_readable, damaged = cli.runs.select_runs(where=where, sort=sort, names=shown, limit=limit)
    elsewhere = [] if where else api.runs_elsewhere(api.runs_root())
    if as_json:
        unreadable = [{"path": str(path), "problem": reason.message} for path, reason in damaged]
        print_document(
            cli.runs.runs_document(chosen)
            | ({"elsewhere": [launched_document(directory) for directory in elsewhere]} if elsewhere else {})
            | ({"unreadable": unreadable} if unreadable else {})
        )
        return
    if elsewhere:
        render_launched(elsewhere, Console())
    if num_readable or not (damaged or elsewhere):
        cli.runs.render_runs(chosen, Console(), shown, known=num_readable)
    for _, reason in damaged:
        say(f"not listed: {reason}", style="yellow")


def runs_diff(
    first: Annotated[str, typer.Argument(metavar="A", help="A run's directory, its name, or `latest`.")],
    second: Annotated[str, typer.Argument(metavar="B", help="The other one.")],
    as_json: AsJson = False,
) -> None:
    """Compare two runs: what was asked, how it was executed, what came of it."""
    a, b = cli.runs.read_reports([first, second])
    if as_json:
        print_document(cli.runs.diff_document(a, b))
    else:
        cli.runs.render_diff(a, b, Console())


def runs_plot(
    words: Annotated[list[str], typer.Argument(metavar="RUN...", help="Two runs or more.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="The page.")] = Path("runs.html"),
) -> None:
    """Draw the curves of runs over each other, into an HTML page."""
    reports = cli.runs.read_reports(words)
    cli.runs.write_plot(reports, out)
    say(f"{len(reports)} runs side by side: {out}")


def runs_export(
    run: RunWord = "latest",
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="The table.")] = Path("metrics.csv"),
) -> None:
    """Write what a run measured as CSV: a line for each progress event and evaluation that still counts."""
    name, num_lines = cli.runs.write_csv(run, out)
    say(f"{num_lines} lines of {name}: {out}")


def runs_track(
    run: RunWord,
    to: Annotated[
        str,
        typer.Option("--to", metavar="TRACKER", help="tensorboard, mlflow=URI, wandb, trackio, prometheus=URL, csv."),
    ],
    as_json: AsJson = False,
) -> None:
    """Send a tracker what it does not have yet of a run."""
    sent = api.track(run, to)
    if as_json:
        print_document({"run": sent.run, "tracker": sent.tracker, "events": sent.events, "where": sent.where})
    else:
        text = f"{sent.events} events of {sent.run} sent to {sent.tracker}: {sent.where}"
        say(text)

"""Commands about runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from stoker import api
from stoker.cli.terminal import AsJson, Debug, RunWord, print_document, reported
from stoker.errors import BadRun
from stoker.records import JobSpec, Run, to_json

if TYPE_CHECKING:
    from stoker.store import RunDirectory


def report(run: RunWord = "latest", as_json: AsJson = False, debug: Debug = False) -> None:
    """Write a run's report anew, and show its summary."""
    with reported(debug=debug):
        from stoker.reporting.summary import summary_lines

        path = api.report(run)
        record = api.load(run).directory.read_report()
        if as_json:
            print_document({"report": str(path), "run": to_json(record.run)})
            return
        Console().print("\n".join(summary_lines(record)), highlight=False, markup=False)
        Console().print(f"report: {path}", highlight=False, markup=False, soft_wrap=True)


def runs(
    context: typer.Context,
    where: Annotated[
        str, typer.Option("--where", metavar="TERMS", help="Only such: 'status=finished lr<0.1 name~cnn'.")
    ] = "",
    sort: Annotated[
        str | None, typer.Option("--sort", metavar="NAME", help="By a metric or setting; -NAME for the highest first.")
    ] = None,
    columns: Annotated[
        str, typer.Option("--columns", metavar="NAMES", help="Beside the usual ones: lr,batch,test/accuracy.")
    ] = "",
    limit: Annotated[int | None, typer.Option("--limit", metavar="N", min=1, help="At most so many.")] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """List the runs here, newest first."""
    if context.invoked_subcommand is not None:
        return
    with reported(debug=debug):
        from stoker.cli.runs import render_runs, runs_document
        from stoker.store import list_runs, runs_root
        from stoker.store.run_query import selected

        shown = tuple(name.strip() for name in columns.split(",") if name.strip())
        found, damaged = _read(list_runs(runs_root()))
        known = len(found)
        found = selected(found, where=where, sort=sort, names=shown)[:limit]
        if as_json:
            unreadable = [{"path": str(path), "problem": problem.message} for path, problem in damaged]
            print_document(runs_document(found) | ({"unreadable": unreadable} if unreadable else {}))
            return
        if known or not damaged:
            render_runs(found, Console(), shown, known=known)
        for _, problem in damaged:
            Console().print(f"not listed: {problem}", style="yellow", highlight=False, markup=False, soft_wrap=True)


def _read(
    directories: Sequence[RunDirectory],
) -> tuple[list[tuple[Path, Run, JobSpec]], list[tuple[Path, BadRun]]]:
    """What can be read of these runs; and those that cannot, each with the reason: one must not hide the others."""
    found: list[tuple[Path, Run, JobSpec]] = []
    damaged: list[tuple[Path, BadRun]] = []
    for one in directories:
        try:
            found.append((one.path, one.read_headway(), one.read_spec()))
        except BadRun as problem:
            damaged.append((one.path, problem))
    return found, damaged


def runs_diff(
    first: Annotated[str, typer.Argument(metavar="A", help="A run's directory, its name, or `latest`.")],
    second: Annotated[str, typer.Argument(metavar="B", help="The other one.")],
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Compare two runs: what was asked, how it was executed, what came of it."""
    with reported(debug=debug):
        from stoker.cli.runs import diff_document, render_diff
        from stoker.store import find_run, runs_root

        a, b = (find_run(runs_root(), word).read_report() for word in (first, second))
        if as_json:
            print_document(diff_document(a, b))
        else:
            render_diff(a, b, Console())


def runs_plot(
    words: Annotated[list[str], typer.Argument(metavar="RUN...", help="Two runs or more.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="The page.")] = Path("runs.html"),
    debug: Debug = False,
) -> None:
    """Draw the curves of runs over each other, into an HTML page."""
    with reported(debug=debug):
        from stoker.reporting.comparison_page import render_side_by_side
        from stoker.store import disk_errors, find_run, runs_root, write_atomic
        from stoker.store.files import make_directories

        reports = [find_run(runs_root(), word).read_report() for word in words]
        page = render_side_by_side(reports)
        with disk_errors(out, "the page", option="-o FILE"):
            make_directories(out.parent)
        write_atomic(out, page, what="the page")
        Console().print(f"{len(reports)} runs side by side: {out}", highlight=False, markup=False, soft_wrap=True)


def runs_export(
    run: RunWord = "latest",
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="The table.")] = Path("metrics.csv"),
    debug: Debug = False,
) -> None:
    """Write what a run measured as CSV: a line for each progress event and evaluation that still counts."""
    with reported(debug=debug):
        from stoker.reporting.history import live_history
        from stoker.store import find_run, runs_root, write_atomic
        from stoker.tracking.csv_tracker import table
        from stoker.tracking.run_tracking import describe_run, point_of

        directory = find_run(runs_root(), run)
        # What a resume did again would be there twice, and a curve of it go back on itself.
        points = [point for event in live_history(directory.read_events()) if (point := point_of(event)) is not None]
        about = describe_run(directory, directory.path)
        write_atomic(out, table(points, about.created_at), what="the table")
        Console().print(f"{len(points)} lines of {about.run}: {out}", highlight=False, markup=False, soft_wrap=True)


def runs_track(
    run: RunWord,
    to: Annotated[str, typer.Option("--to", metavar="TRACKER", help="tensorboard, mlflow=URI, wandb, trackio, csv.")],
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Send a tracker what it does not have yet of a run."""
    with reported(debug=debug):
        sent = api.track(run, to)
        if as_json:
            print_document({"run": sent.run, "tracker": sent.tracker, "events": sent.events, "where": sent.where})
        else:
            words = f"{sent.events} events of {sent.run} sent to {sent.tracker}: {sent.where}"
            Console().print(words, highlight=False, markup=False, soft_wrap=True)

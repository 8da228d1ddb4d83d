"""Commands about runs."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from stoker.cli.options import AsJson, Debug, RunWord
from stoker.cli.terminal import print_document, reported
from stoker.records import to_json


def report(run: RunWord = "latest", as_json: AsJson = False, debug: Debug = False) -> None:
    """Write a run's report anew, and show its summary."""
    with reported(debug=debug):
        from stoker import flow
        from stoker.reporting import summary_lines

        path = flow.report(run)
        record = flow.load(run).directory.read_report()
        if as_json:
            print_document({"report": str(path), "run": to_json(record.run)})
            return
        Console().print("\n".join(summary_lines(record)), highlight=False, markup=False)
        Console().print(f"report: {path}", highlight=False, markup=False, soft_wrap=True)


def runs(context: typer.Context, as_json: AsJson = False, debug: Debug = False) -> None:
    """List the runs here, newest first."""
    if context.invoked_subcommand is not None:
        return
    with reported(debug=debug):
        from stoker.cli.runs import render_runs, runs_document
        from stoker.store import list_runs, runs_root

        found = [(one.path, one.read_run(), one.read_spec()) for one in list_runs(runs_root())]
        if as_json:
            print_document(runs_document(found))
        else:
            render_runs(found, Console())


def runs_diff(
    first: Annotated[str, typer.Argument(metavar="A")],
    second: Annotated[str, typer.Argument(metavar="B")],
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

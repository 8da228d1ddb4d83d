"""Commands about data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from stoker.cli.options import AsJson, Debug
from stoker.cli.terminal import output, print_document, reported

data_app = typer.Typer(help="Check a data set.", add_completion=False, no_args_is_help=True)


@data_app.callback()
def data() -> None:
    """Check a data set."""


@data_app.command()
def check(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A folder or a file with data.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="DIR", help="Where report.html, check.json and clean.json go.")
    ] = None,
    against: Annotated[
        list[Path] | None, typer.Option("--against", metavar="PATH", help="Data that must not be in PATH; repeatable.")
    ] = None,
    target: Annotated[str, typer.Option("--target", metavar="COLUMN", help="The column to be predicted.")] = "",
    text: Annotated[list[str] | None, typer.Option("--text", metavar="COLUMN", help="A column of prose.")] = None,
    ignore: Annotated[
        list[str] | None, typer.Option("--ignore", metavar="COLUMN", help="A column that equal rows need not share.")
    ] = None,
    near: Annotated[bool, typer.Option("--near/--no-near", help="Look for near duplicates.")] = True,
    labels: Annotated[bool, typer.Option("--labels/--no-labels", help="Hold labels against neighbours'.")] = True,
    drop: Annotated[
        Literal["faults", "suspects"], typer.Option("--drop", help="What clean.json leaves out.")
    ] = "faults",
    fail_on: Annotated[
        Literal["any", "corrupt", "suspect", "nothing"], typer.Option("--fail-on", help="What exit code 1 is for.")
    ] = "any",
    workers: Annotated[int, typer.Option("--workers", min=0, help="Processes that decode (0: as many as cores).")] = 0,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Find corrupt files, duplicates, leaks, wrong labels and odd values; the data are only read."""
    with reported(debug=debug):
        from stoker import flow
        from stoker.cli.data_checks import check_display, check_document, exit_code, render_check
        from stoker.inspecting import CheckOptions

        options = CheckOptions(
            target=target, text=tuple(text or ()), ignore=tuple(ignore or ()), near=near, labels=labels, workers=workers
        )
        with output(for_json=as_json), check_display(quiet=as_json, console=Console(stderr=True)) as tell:
            checked = flow.check_data(
                path, options, against=against or (), out=out, drop_suspects=drop == "suspects", tell=tell
            )
        if as_json:
            print_document(check_document(checked))
        else:
            render_check(checked, Console())
            if out is not None:
                print(f"report: {out / 'report.html'}\nclean list: {out / 'clean.json'}")
        raise typer.Exit(exit_code(checked, fail_on))

"""`stoker data check`: its progress, and what it found, in the terminal and as JSON."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from stoker import api
from stoker.cli.terminal import AsJson, column_table, output, print_document
from stoker.records import to_json
from stoker.units import format_rate, format_seconds

if TYPE_CHECKING:
    from stoker.inspecting.data_check import CheckedData


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
) -> None:
    """Find corrupt files, duplicates, leaks, wrong labels and odd values; the data are only read."""
    options = api.CheckOptions(
        target=target, text=tuple(text or ()), ignore=tuple(ignore or ()), near=near, labels=labels, workers=workers
    )
    with output(for_json=as_json), check_display(quiet=as_json, console=Console(stderr=True)) as tell:
        checked = api.check_data(
            path, options, against=against or (), out=out, drop_suspects=drop == "suspects", tell=tell
        )
    if as_json:
        print_document({"check": to_json(checked.check), "clean": to_json(checked.clean)})
    else:
        render_check(checked, Console())
        if out is not None:
            print(f"report: {out / 'report.html'}\nclean list: {out / 'clean.json'}")
    raise typer.Exit(exit_code(checked, fail_on))


Tell = Callable[[str, int, int], None]
FailOn = Literal["any", "corrupt", "suspect", "nothing"]

FAULTS_FOUND = 1
"""The exit code where there are findings of the sort that `--fail-on` names."""

_LINE_EVERY_S = 10.0
_STYLES = {"corrupt": "bold red", "fault": "red", "suspect": "yellow", "note": "dim"}
_FAILING: dict[str, frozenset[str]] = {
    "nothing": frozenset(),
    "corrupt": frozenset({"corrupt"}),
    "any": frozenset({"corrupt", "fault"}),
    "suspect": frozenset({"corrupt", "fault", "suspect"}),
}


def exit_code(checked: CheckedData, fail_on: FailOn) -> int:
    """Exit code of the command [number]: 0, or `FAULTS_FOUND`."""
    gravities = {finding.gravity for finding in checked.check.findings}
    return FAULTS_FOUND if gravities & _FAILING[fail_on] else 0


@contextmanager
def check_display(*, quiet: bool, console: Console) -> Iterator[Tell]:
    """Shows on `console` how far a check is: a bar in a terminal, a line every ten seconds elsewhere."""
    if quiet:
        yield lambda _what, _done, _total: None
    elif console.is_terminal and not console.is_dumb_terminal:
        from rich import progress  # noqa: PLC0415 - takes longer than a command's help

        with progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeRemainingColumn(),
            console=console,
            transient=True,
        ) as bar:
            task = bar.add_task("", total=None)
            yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total or None)
    else:
        yield _Lines(console, clock=time.monotonic)


def render_check(checked: CheckedData, console: Console) -> None:
    """A line on the data, a table of what was found, and what is left."""
    check, clean = checked.check, checked.clean
    splits = ", ".join(f"{split.num_samples:,} {split.name}".rstrip() for split in check.splits)
    rate = format_rate(check.num_samples / max(check.took_s, 1e-3), "samples")
    console.print(
        f"{escape(check.source)}: {check.kind}, samples: {splits}, {format_seconds(check.took_s)} ({rate})",
        highlight=False,
        soft_wrap=True,
    )
    if check.findings:
        titles = ("", "finding", ">how many", "the first")
        table = column_table(*titles, folds=titles)
        for (gravity, fault), count in check.counts().items():
            first = next(finding for finding in check.findings if (finding.gravity, finding.fault) == (gravity, fault))
            example = f"{first.id or first.where} {first.detail}".strip()
            style = _STYLES[gravity]
            table.add_row(f"[{style}]{gravity}[/]", api.FAULTS[fault][0], f"{count:,}", escape(example))
        console.print(table)
    else:
        console.print("[green]nothing was found[/]")
    for note in check.notes:
        console.print(Text(note, "dim"), soft_wrap=True)
    console.print(f"samples kept: {clean.kept:,}, left out: {len(clean.dropped):,}", highlight=False)


class _Lines:
    """A line every ten seconds, with the time left where it is known."""

    def __init__(self, console: Console, clock: Callable[[], float]) -> None:
        self._console, self._clock = console, clock
        self._what, self._began, self._shown = "", 0.0, clock()

    def __call__(self, what: str, done: int, total: int) -> None:
        now = self._clock()
        if what != self._what:
            self._what, self._began = what, now
        if now - self._shown < _LINE_EVERY_S:
            return
        self._shown = now
        left = (now - self._began) * (total - done) / done if done and total else float("nan")
        rest = f" of {total:,}, {format_seconds(left)} to go" if total else ""
        self._console.print(f"{what}: {done:,}{rest}", highlight=False, markup=False, soft_wrap=True)

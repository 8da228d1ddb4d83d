"""What commands share: options and arguments, errors as text, one JSON document, signs of life."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

import rich.control
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stoker import api
from stoker.errors import BadJob, StokerError

if TYPE_CHECKING:
    from stoker.jobs import Entry, Job


_WIDEST = 400
"""Columns that a table takes in a pipe at most: what is longer, such as a function's whole description, is folded."""

# A file name may hold ESC sequences, which the terminal would obey; Rich strips other control characters from texts.
getattr(rich.control, "_CONTROL_STRIP_TRANSLATE", {}).update(dict.fromkeys((0x1B, *range(0x7F, 0xA0))))

INTERRUPTED = 130
"""The exit code of what was interrupted."""

UNREAD = 141
"""The exit code where the output is read no more, as of a program that SIGPIPE ends: 128 + 13."""


def printable(text: str) -> str:
    r"""Text without what a terminal obeys or cannot print, such as in the names of files: `\x1b` for an escape.

    >>> printable("a\x1b[2Jb\u202ec\n")
    'a\\x1b[2Jb\\u202ec\n'
    """
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else letter.encode("unicode_escape").decode()
        for letter in text.encode(errors="backslashreplace").decode()
    )


@contextmanager
def reported(*, debug: bool) -> Iterator[None]:
    """Show the text of an error that a user can mend, after its traceback if asked for, and exit with its code."""
    try:
        yield
    except StokerError as error:
        if debug:
            traceback.print_exception(error)
        console = Console(stderr=True, highlight=False)
        console.print(Text.assemble(("error: ", "bold red"), printable(error.message)), soft_wrap=True)
        if error.remedy:
            console.print(Text.assemble(("try:   ", "bold"), printable(error.remedy)), soft_wrap=True)
        raise typer.Exit(error.exit_code) from error
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted")
        raise typer.Exit(INTERRUPTED) from None


def is_unread(stream: TextIO) -> bool:
    """Whether the reader of a stream has gone before all was written; what is left then goes nowhere."""
    try:
        stream.flush()
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        return True
    return False


@contextmanager
def output(*, for_json: bool) -> Iterator[TextIO]:
    """Standard output; what the job prints within the block goes to standard error if it is `for_json`."""
    stdout = sys.stdout
    with redirect_stdout(sys.stderr if for_json else stdout):
        yield stdout


@contextmanager
def waiting(what: str, *, quiet: bool) -> Iterator[None]:
    """What is being done, on standard error, while it takes seconds; nothing if `quiet`."""
    with nullcontext() if quiet else api.waiting(what, Console(stderr=True)):
        yield


def teller(*, quiet: bool) -> Callable[[str], None]:
    """Prints on standard error, a line each, what a long command says while it goes on; nothing if `quiet`."""
    console = Console(stderr=True, quiet=quiet)
    return lambda line: console.print(line, style="dim", highlight=False, markup=False, soft_wrap=True)


def say(text: str, *, style: str | None = None) -> None:
    """Print a text as it is, its lines as long as they are: paths are there to be copied."""
    Console().print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def column_table(*titles: str, folds: Collection[str] = (), title: str | None = None) -> Table:
    """An empty table without lines; `>` before a title aligns its column right.

    Args:
        titles: of the columns.
        folds: titles of the columns whose cells may take several lines, where the terminal is too narrow.
        title: over the table.
    """
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        header_style="dim",
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    for name in titles:
        may_fold = name in folds
        table.add_column(
            name.removeprefix(">"),
            justify="right" if name.startswith(">") else "left",
            no_wrap=not may_fold,
            overflow="fold" if may_fold else "ellipsis",
        )
    return table


def print_table(table: Table, console: Console) -> None:
    """Print a table: in a terminal as wide as that is, into a pipe or a file as wide as it needs, so nothing folds."""
    width = console.width
    if not console.is_terminal:
        natural = console.measure(table, options=console.options.update(width=_WIDEST)).maximum
        console.width = max(width, natural)
    try:
        console.print(table)
    finally:
        console.width = width


def print_document(document: Any) -> None:
    """Print plain JSON values as one document on standard output."""
    print(json.dumps(document, indent=2, ensure_ascii=False))


def load_job(path: Path, settings: list[str] | None) -> tuple[Job, Entry]:
    """The job in a file, with settings given as `NAME=VALUE`.

    Raises:
        BadJob: a setting has another form, or the file cannot be used.
    """
    return api.load_job(path, setting_pairs(settings))


def setting_pairs(settings: list[str] | None, option: str = "--set") -> dict[str, str]:
    """Settings given as `NAME=VALUE` by an option, by name.

    Raises:
        BadJob: one has another form.
    """
    pairs = {}
    for setting in settings or ():
        name, equals, value = setting.partition("=")
        if not equals or not name:
            raise BadJob(f"{option} {setting}: wanted NAME=VALUE")
        pairs[name.strip()] = value
    return pairs


JobFile = Annotated[
    Path, typer.Argument(metavar="JOB", help="A Python file with a function `job`.", show_default=False)
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Set a parameter of `job`; may be repeated.")
]
Place = Annotated[str, typer.Option("--on", metavar="PLACE", help="The device: here, cpu, cuda:0, …")]
Objective = Literal["time", "money", "energy"]
Places = Annotated[
    str, typer.Option("--on", metavar="PLACES", help="Devices to compare: here, or h100,l4,rtx4090, or all.")
]
PlanFile = Annotated[
    Path | None,
    typer.Option(
        "--plan", metavar="FILE", help="Use this plan; `stoker plan --json` writes one. `safe`: nothing is tried."
    ),
]
PinnedPlan = Annotated[
    list[str] | None,
    typer.Option(
        "--plan",
        metavar="FILE|KEY=VALUE",
        help="Forecast this plan: a file, or such as micro_batch=2 shards=8; repeatable.",
    ),
]
Network = Annotated[
    str | None,
    typer.Option("--network", metavar="WORDS|FILE", help="Cards of each machine elsewhere, such as 8x400gbit."),
]
PreemptedEvery = Annotated[
    str | None,
    typer.Option("--preempted-every", metavar="TIME", help="Mean time until a spot machine is taken away, such as 6h."),
]
Memory = Annotated[
    str | None, typer.Option("--memory", metavar="BYTES", help="The most of a device's memory to use, such as 6GB.")
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", metavar="N", help="The most threads on a CPU; without it OMP_NUM_THREADS, or the cores."),
]
DeviceMtbf = Annotated[
    float | None,
    typer.Option(
        "--device-mtbf", metavar="HOURS", help="Mean time of one device between two failures: how often to save."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output and nothing else.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")]
DeviceWord = Annotated[
    str | None, typer.Argument(metavar="DEVICE", help="A name such as h100, rtx-4090.", show_default=False)
]
RunWord = Annotated[str, typer.Argument(metavar="RUN", help="A run's directory, its name, or `latest`.")]

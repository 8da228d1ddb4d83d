"""The list of runs, two runs compared, and what is written of runs: tables, JSON documents and files."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stoker import api
from stoker.cli.terminal import column_table, print_table
from stoker.errors import BadRun
from stoker.records import JobSpec, Report, Run, to_json
from stoker.records.codec import JSON
from stoker.reporting.event_text import describe_event
from stoker.reporting.history import live_history, plans_in_force
from stoker.reporting.summary import wall_seconds
from stoker.reporting.wording import format_metric, format_samples, headline_metric, plan_differences
from stoker.store import disk_errors, find_run, list_runs, make_directories, runs_root, write_atomic
from stoker.store.run_query import selected, value_of, values_of
from stoker.tracking.csv_tracker import table as csv_table
from stoker.tracking.run_tracking import describe_run, point_of
from stoker.units import format_seconds

_LONGEST_FAILURE = 44
_WIDE = 100
"""Columns from which on the year has room."""

_WHOLE = ("run", "status", "time", "when")
"""Columns that are not folded, however narrow the terminal is."""

_DIGEST = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{52}\b")
"""A digest, and as many of its figures as distinguish two."""

_STATUS_STYLES = {"finished": "green", "unfinished": "yellow", "failed": "red"}


def select_runs(
    *, where: str, sort: str | None, names: Sequence[str], limit: int | None
) -> tuple[list[tuple[Path, Run, JobSpec]], int, list[tuple[Path, BadRun]]]:
    """Runs that meet the conditions, the number of readable runs, and the runs that cannot be read with the reason."""
    readable: list[tuple[Path, Run, JobSpec]] = []
    damaged: list[tuple[Path, BadRun]] = []  # one that cannot be read must not hide the others
    for directory in list_runs(runs_root()):
        try:
            readable.append((directory.path, directory.read_headway(), directory.read_spec()))
        except BadRun as problem:
            damaged.append((directory.path, problem))
    return selected(readable, where=where, sort=sort, names=names)[:limit], len(readable), damaged


def render_runs(
    runs: Sequence[tuple[Path, Run, JobSpec]], console: Console, columns: Sequence[str] = (), *, known: int = 0
) -> None:
    """Print runs as a table, one a line, in the order given; `columns` adds metrics and settings.

    `known` is how many there are, of which these were chosen.
    """
    if not runs and known:
        console.print(Text(f"none of the {known} runs here meets all conditions of --where", style="dim"))
        return
    if not runs:
        console.print(Text("no runs here yet; `stoker train JOB.py` makes one", style="dim"))
        return
    table = column_table()
    for title in ("run", "status", "result", *columns, "samples", "time", "when"):
        # A name is there to be copied: where room is short, results are cut, and names last of all.
        table.add_column(title, no_wrap=title in _WHOLE, overflow="ellipsis")
    for path, run, spec in runs:
        name = Text(run.name, style="bold")
        if path.name != run.name:
            name.append(f"\n{path}", style="not bold dim")
        values = values_of(run, spec)
        extra = [value_of(column, values) for column in columns]
        share = "" if run.samples >= run.total_samples else f" ({100 * run.samples / run.total_samples:.0f} %)"
        table.add_row(
            name,
            Text(run.status, style=_STATUS_STYLES[run.status]),
            _result(run),
            *(Text(f"{value:.6g}" if isinstance(value, float) else value or "") for value in extra),
            Text(f"{format_samples(run.samples)}{share}", style="yellow" if share else ""),
            Text(format_seconds(run.wall_s) if run.wall_s else ""),
            Text(_local_time(run.created_at, is_short=console.is_terminal and console.width < _WIDE), style="dim"),
        )
    print_table(table, console)


def runs_document(runs: Sequence[tuple[Path, Run, JobSpec]]) -> dict[str, JSON]:
    """The list for `--json`: each run's record with its path and its job's digest."""
    return {
        "runs": [
            {"path": str(path), "job": spec.name, "spec_digest": spec.digest(), "run": to_json(run)}
            for path, run, spec in runs
        ]
    }


def read_reports(words: Sequence[str]) -> list[Report]:
    """The reports of the runs that a user means; see `find_run`."""
    return [find_run(runs_root(), word).read_report() for word in words]


def render_diff(a: Report, b: Report, console: Console) -> None:
    """Print what two runs differ in: their jobs, their plans, and what came of them."""
    table = column_table()
    for title in ("", a.run.name, b.run.name, "change"):
        table.add_column(Text(title, overflow="fold"))
    _add_part(table, "job", [(*row, "") for row in _spec_differences(a, b)], if_empty="the same")
    both_planned = a.decision is not None and b.decision is not None
    plans = [(*row, "") for row in _plan_differences(a, b)]
    changes = [f"{report.run.name} {line}" for report in (a, b) for line in _plan_changes(report)]
    same = "the same at the end" if changes else "the same"
    _add_part(table, "plan", plans, if_empty=same if both_planned else "not recorded for both")
    _add_part(table, "what came of it", _outcomes(a, b), if_empty="")
    print_table(table, console)
    if changes:
        console.print()
    for line in changes:
        console.print(Text(line), soft_wrap=True)


def diff_document(a: Report, b: Report) -> dict[str, JSON]:
    """The comparison for `--json`: `job` and `plan` hold [name, in a, in b], `metrics` [in a, in b] or null by name.

    `plan` compares the plans in force at the end; `plan_changes` holds, for a and b, how each came to its own.
    """
    names = dict.fromkeys([*a.run.metrics, *b.run.metrics])
    return {
        "a": to_json(a.run),
        "b": to_json(b.run),
        "job": [list(row) for row in _spec_differences(a, b)],
        "plan": [list(row) for row in _plan_differences(a, b)],
        "plan_changes": {"a": list(_plan_changes(a)), "b": list(_plan_changes(b))},
        "metrics": {name: [to_json(a.run.metrics.get(name)), to_json(b.run.metrics.get(name))] for name in names},
    }


def write_plot(reports: Sequence[Report], out: Path) -> None:
    """Write a page with the curves of runs over each other."""
    page = api.render_side_by_side(reports)
    with disk_errors(out, "the page", option="-o FILE"):
        make_directories(out.parent)
    write_atomic(out, page, what="the page")


def write_csv(word: str, out: Path) -> tuple[str, int]:
    """Write what a run measured as CSV; the run's name and the number of lines."""
    directory = find_run(runs_root(), word)
    # What a resume did again would be there twice, and a curve of it go back on itself.
    points = [point for event in live_history(directory.read_events()) if (point := point_of(event)) is not None]
    about = describe_run(directory, directory.path)
    write_atomic(out, csv_table(points, about.created_at), what="the table")
    return about.run, len(points)


def _result(run: Run) -> Text:
    """The metric a run is known by, or its failure's first line."""
    if run.status == "failed" and run.failure:
        return Text(textwrap.shorten(run.failure.splitlines()[0], _LONGEST_FAILURE, placeholder=" …"), style="red")
    named = headline_metric(run.metrics)
    return Text(f"{named[0]} {format_metric(*named)}" if named else "", style="bold")


def _spec_differences(a: Report, b: Report) -> list[tuple[str, str, str]]:
    """(setting, in a, in b), from the lines of `JobSpec.differences`."""
    rows = []
    for line in a.spec.differences(b.spec):
        name, _, rest = line.partition(": ")
        mine, _, theirs = rest.partition(" here, ")
        rows.append((name, mine, theirs.removesuffix(" there")))
    return rows


def _plan_differences(a: Report, b: Report) -> list[tuple[str, str, str]]:
    """(setting, in a, in b) of the plans in force at the end."""
    mine, theirs = plans_in_force(a), plans_in_force(b)
    return list(plan_differences(mine[-1].plan, theirs[-1].plan)) if mine and theirs else []


def _plan_changes(report: Report) -> list[str]:
    """What a run settled on, and each change of plan, with position: `replanned at 1,024 samples: threads 2 → 1, …`."""
    return [describe_event(event) for event in report.events if event.kind in ("replanned", "settled")]


def _outcomes(a: Report, b: Report) -> list[tuple[str, str, str, str]]:
    """(what, in a, in b, change): status, metrics, samples and time."""
    rows: list[tuple[str, str, str, str]] = [("status", a.run.status, b.run.status, "")]
    for name in dict.fromkeys([*a.run.metrics, *b.run.metrics]):
        mine, theirs = a.run.metrics.get(name), b.run.metrics.get(name)
        shown = [format_metric(name, value) if value is not None else "" for value in (mine, theirs)]
        rows.append((name, shown[0], shown[1], _change(name, mine, theirs)))
    rows.append(("samples", format_samples(a.run.samples), format_samples(b.run.samples), ""))
    wall_a, wall_b = wall_seconds(a), wall_seconds(b)
    ratio = f"{wall_b / wall_a:.2f}×" if wall_a and wall_b else ""
    rows.append(("time", format_seconds(wall_a), format_seconds(wall_b), ratio))
    return rows


def _change(name: str, mine: float | None, theirs: float | None) -> str:
    """The signed change from a to b; of fractions in percentage points."""
    if mine is None or theirs is None or not math.isfinite(theirs - mine):
        return ""
    if mine == theirs:
        return "none"
    is_percent = format_metric(name, mine).endswith("%")
    return f"{100 * (theirs - mine):+.2f} points" if is_percent else f"{theirs - mine:+.4g}"


def _add_part(table: Table, title: str, rows: Sequence[tuple[str, str, str, str]], *, if_empty: str) -> None:
    """A titled group of rows; a group without rows says so."""
    table.add_row()
    table.add_row(Text(title, style="bold"), Text("" if rows else if_empty, style="dim"))
    for row in rows:
        table.add_row(*(Text(_DIGEST.sub(r"\1…", cell), overflow="fold") for cell in row))


def _local_time(created_at: str, *, is_short: bool) -> str:
    """An ISO time as local date and minute, without the year if short; as it is if it is no time."""
    try:
        return datetime.fromisoformat(created_at).astimezone().strftime("%m-%d %H:%M" if is_short else "%Y-%m-%d %H:%M")
    except ValueError:
        return created_at

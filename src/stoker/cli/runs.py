"""Runs side by side: the list of them, and what two of them differ in; in the terminal and as one JSON document."""

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

from stoker.cli.terminal import print_table
from stoker.records import JobSpec, Report, Run, to_json
from stoker.records.codec import JSON
from stoker.reporting.event_text import describe_event
from stoker.reporting.history import of_kind, plans_in_force
from stoker.reporting.summary import wall_seconds
from stoker.reporting.wording import format_metric, format_samples, headline_metric, plan_differences
from stoker.store.run_query import Value, value_of, values_of
from stoker.units import format_seconds

_LONGEST_FAILURE = 44
_WIDE = 100
"""Columns from which on the year has room."""

_WHOLE = ("run", "status", "time", "when")
"""Columns that are not folded, however narrow the terminal is."""

_DIGEST, _ENOUGH = re.compile(r"\b[0-9a-f]{64}\b"), 12
"""A digest, and as many of its figures as tell two apart."""

_STATUS_STYLES = {"finished": "green", "unfinished": "yellow", "failed": "red"}


def render_runs(
    runs: Sequence[tuple[Path, Run, JobSpec]], console: Console, columns: Sequence[str] = (), *, known: int = 0
) -> None:
    """Print runs as a table, one a line, in the order given; `columns` are metrics and settings beside the usual.

    `known` is how many there are, of which these were chosen.
    """
    if not runs and known:
        console.print(Text(f"none of the {known} runs here meets all conditions of --where", style="dim"))
        return
    if not runs:
        console.print(Text("no runs here yet; `stoker train JOB.py` makes one", style="dim"))
        return
    table = _table()
    for title in ("run", "status", "result", *columns, "samples", "time", "when"):
        # A name is there to be copied: where room is short, results are cut, and names last of all.
        table.add_column(title, no_wrap=title in _WHOLE, overflow="ellipsis")
    for path, run, spec in runs:
        values = values_of(run, spec)
        table.add_row(
            _name(path, run),
            Text(run.status, style=_STATUS_STYLES[run.status]),
            _result(run),
            *(_shown(value_of(name, values)) for name in columns),
            _headway(run),
            Text(format_seconds(run.wall_s) if run.wall_s else ""),
            Text(_local_time(run.created_at, is_short=console.is_terminal and console.width < _WIDE), style="dim"),
        )
    print_table(table, console)


def runs_document(runs: Sequence[tuple[Path, Run, JobSpec]]) -> dict[str, JSON]:
    """The list for `--json`: each run's record with its path and its job's digest."""
    return {
        "runs": [{"path": str(path), "job": spec.name, "spec_digest": spec.digest(), "run": to_json(run)}
                 for path, run, spec in runs]
    }  # fmt: skip


def render_diff(a: Report, b: Report, console: Console) -> None:
    """Print what two runs differ in: their jobs, their plans, and what came of them."""
    table = _table("", a.run.name, b.run.name, "change")
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


def _name(path: Path, run: Run) -> Text:
    """The run's name, and where it is if its directory is called something else."""
    name = Text(run.name, style="bold")
    return name if path.name == run.name else name.append(f"\n{path}", style="not bold dim")


def _shown(value: Value | None) -> Text:
    return Text("") if value is None else Text(f"{value:.6g}" if isinstance(value, float) else value)


def _result(run: Run) -> Text:
    """The metric a run is known by, or its failure's first line."""
    if run.status == "failed" and run.failure:
        return Text(textwrap.shorten(run.failure.splitlines()[0], _LONGEST_FAILURE, placeholder=" …"), style="red")
    named = headline_metric(run.metrics)
    return Text(f"{named[0]} {format_metric(*named)}" if named else "", style="bold")


def _headway(run: Run) -> Text:
    if run.samples >= run.total_samples:
        return Text(format_samples(run.samples))
    percent = f" ({100 * run.samples / run.total_samples:.0f} %)"
    return Text(f"{format_samples(run.samples)}{percent}", style="yellow")


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
    """Each change of plan with its position and cause: `replanned at 1,024 samples: threads 2 → 1, because …`."""
    return [describe_event(event) for event in of_kind(report.events, "replanned")]


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
        table.add_row(*(Text(_DIGEST.sub(_shortened, cell), overflow="fold") for cell in row))


def _shortened(digest: re.Match[str]) -> str:
    return f"{digest.group()[:_ENOUGH]}…"


def _table(*titles: str) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    for title in titles:
        table.add_column(Text(title, overflow="fold"))
    return table


def _local_time(created_at: str, *, is_short: bool) -> str:
    """An ISO time as local date and minute, without the year if short; as it is if it is no time."""
    try:
        return datetime.fromisoformat(created_at).astimezone().strftime("%m-%d %H:%M" if is_short else "%Y-%m-%d %H:%M")
    except ValueError:
        return created_at

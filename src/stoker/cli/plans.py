"""What the planner decided, as a table in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stoker.records import Candidate, Decision
from stoker.reporting.panel import EMBER, marked
from stoker.reporting.wording import format_interval, plan_in_difference
from stoker.units import format_bytes, format_seconds


def render_decision(decision: Decision, console: Console, *, explain: bool) -> None:
    """Print the plans that fit, the chosen one first, and why it was chosen; with `explain` the rejected ones too."""
    console.print(_candidates(decision))
    forecast = decision.chosen.forecast
    basis = f"{format_interval(forecast.total_s)} in 8 cases of 10, {forecast.total_s.basis}"
    console.print(Text(f"to finish: {format_seconds(forecast.total_s.value)} ({basis})"))
    for line in decision.explanation:
        console.print(marked("•", EMBER, Text(line)))
    if explain and decision.rejected:
        console.print()
        console.print(_rejections(decision))
    elif decision.rejected:
        console.print(Text(f"{len(decision.rejected)} plans were rejected; --explain says what each lost by", "dim"))


def _candidates(decision: Decision) -> Table:
    table = _table()
    for title in ("device", "plan"):
        table.add_column(title)
    for title in ("memory", "update", "to finish"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("why")
    for candidate in decision.candidates:
        forecast, is_chosen = candidate.forecast, candidate is decision.chosen
        table.add_row(
            candidate.plan.device,
            candidate.plan.in_words() if is_chosen else plan_in_difference(candidate.plan, decision.chosen.plan),
            format_bytes(forecast.peak_bytes.value),
            format_seconds(forecast.update_s.value),
            format_seconds(forecast.total_s.value),
            _why(candidate, decision),
            style="bold" if is_chosen else "",
        )
    return table


def _why(candidate: Candidate, decision: Decision) -> Text:
    """The chosen plan's reason, or by how much another plan is slower."""
    if candidate is decision.chosen:
        return Text("chosen" if len(decision.candidates) > 1 else "the only one that fits", style=f"bold {EMBER}")
    fastest = decision.chosen.forecast.total_s.value
    ratio = candidate.forecast.total_s.value / fastest if fastest else 1.0
    return Text(f"{ratio:.2f}× the time", style="dim")


def _rejections(decision: Decision) -> Table:
    table = _table(f"rejected ({len(decision.rejected)})")
    table.add_column("plan")
    table.add_column("lost by")
    for rejection in decision.rejected:
        table.add_row(plan_in_difference(rejection.plan, decision.chosen.plan), rejection.reason)
    return table


def _table(title: str | None = None) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=None, header_style="dim", pad_edge=False)

"""What `stoker verify` found, on one page in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stoker.records import Verdict
from stoker.reporting.wording import LEVEL_MEANINGS, level_meaning


def render_verdicts(name: str, verdicts: Sequence[Verdict], level: str | None = None, *, console: Console) -> None:
    """Print each question with a check mark or a cross, its answer and its evidence; the level comes last.

    Without a `level`, the last line names the levels that the verdicts show to hold.
    """
    console.print(Text.assemble((name, "bold"), "  what holds for this job"))
    console.print()
    console.print(_questions(verdicts))
    console.print()
    failed = sum(not verdict.passed for verdict in verdicts)
    if failed:
        console.print(Text(f"{failed} of {len(verdicts)} did not hold", style="bold red"))
    style = "bold yellow" if failed else "bold green"
    if level is None:
        shown = [name for name in LEVEL_MEANINGS if name != "none" and _is_shown(name, verdicts)]
        console.print(Text.assemble("holds: ", (", ".join(shown) or "nothing", style)))
    else:
        meaning = level_meaning(level)
        console.print(Text.assemble("level: ", (level, style), f": {meaning}" if meaning else ""))


def _is_shown(level: str, verdicts: Sequence[Verdict]) -> bool:
    """Whether some verdict shows the level to hold."""
    return any(verdict.passed and verdict.level == level for verdict in verdicts)


def _questions(verdicts: Sequence[Verdict]) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column()
    for verdict in verdicts:
        mark = ("✓", "bold green") if verdict.passed else ("✗", "bold red")
        level = f"  {verdict.level}" if verdict.level != "none" else ""
        grid.add_row(Text(*mark), Text.assemble((verdict.question, "bold"), (level, "cyan")))
        grid.add_row("", Text(verdict.answer))
        if verdict.evidence:
            grid.add_row("", Text(verdict.evidence, style="dim"))
    return grid

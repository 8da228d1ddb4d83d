"""What `stoker verify` found, on one page in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stoker.records import Verdict


def render_verdicts(name: str, verdicts: Sequence[Verdict], *, console: Console) -> None:
    """Print each question with a check mark or a cross, its answer and its evidence; the last line sums them up.

    The last verdict is the level that the others leave.
    """
    console.print(Text.assemble((name, "bold"), "  what holds for this job"))
    console.print()
    console.print(_questions(verdicts))
    console.print()
    *examined, level = verdicts
    failed = sum(not verdict.passed for verdict in examined)
    if failed or not level.passed:
        words = f"{failed} of {len(examined)} did not hold: no level is promised until they do"
        console.print(Text(words, style="bold red"))
    else:
        console.print(Text.assemble(("holds: ", "bold green"), level.answer))


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

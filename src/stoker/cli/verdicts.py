"""What `stoker verify` found, on one page in the terminal and as one JSON document."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stoker.records import Verdict, to_json
from stoker.records.codec import JSON
from stoker.reporting.wording import LEVEL_MEANINGS


def render_verdicts(name: str, verdicts: Sequence[Verdict], level: str, console: Console) -> None:
    """Print each question with a check mark or a cross, its answer and its evidence; the level comes last."""
    console.print(Text.assemble((name, "bold"), "  what holds for this job"))
    console.print()
    console.print(_questions(verdicts))
    console.print()
    failed = sum(not verdict.passed for verdict in verdicts)
    if failed:
        console.print(Text(f"{failed} of {len(verdicts)} did not hold", style="bold red"))
    meaning = LEVEL_MEANINGS.get(level)
    console.print(Text.assemble("level: ", (level, "bold green" if not failed else "bold yellow"),
                                f", {meaning}" if meaning else ""))  # fmt: skip


def verdicts_document(name: str, verdicts: Sequence[Verdict], level: str) -> dict[str, JSON]:
    """The page for `--json`: the job, the level, whether everything held, and each verdict."""
    return {
        "job": name,
        "level": level,
        "passed": all(verdict.passed for verdict in verdicts),
        "verdicts": [to_json(verdict) for verdict in verdicts],
    }


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

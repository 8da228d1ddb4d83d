"""A learning-rate range test in the terminal: the suggestion, what it rests on, and the loss over the rates."""

from __future__ import annotations

import math

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stoker.records.lr_range import LrRange
from stoker.units import format_seconds

_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDTH = 60
"""Columns of the picture at most; as many rates share one as are needed."""


def render_lr_range(name: str, found: LrRange, console: Console) -> None:
    """Print the suggestion with its reason, the picture of the loss over the rates, and each seed's edge."""
    console.print(Text.assemble((name, "bold"), f"  learning rates it bears at batch {found.batch:,}"))
    console.print()
    style = "bold" if found.is_clear else "bold yellow"
    console.print(Text.assemble(("lr ", style), (f"{found.lr:.3g}", style), f"   {found.why}"), soft_wrap=True)
    console.print(Text(f"good progress from {found.low:.3g} to {found.high:.3g}; the job says {found.stated_lr:.3g}"))
    console.print()
    _print_picture(found, console)
    console.print(_seeds(found))
    console.print()
    amount = f"{found.num_updates} updates of {found.batch:,} samples, thrown away"
    console.print(
        Text(f"{amount}; {format_seconds(found.took_s)} with planning. Nothing was changed.", "dim"), soft_wrap=True
    )


def blocks(losses: tuple[float, ...], width: int) -> str:
    """The losses as a row of at most `width` block characters; from the first loss on, all are full.

    >>> blocks((1.0, 0.5, 0.0, 9.0), 4)
    '█▄▁█'
    """
    if not losses:
        return ""
    each = math.ceil(len(losses) / width)
    columns = [losses[start : start + each] for start in range(0, len(losses), each)]
    top = losses[0]
    means = [min(sum(column) / len(column), top) for column in columns]
    low = min(means)
    span = top - low
    return "".join(_BLOCKS[int(7 * (mean - low) / span)] if span > 0 else _BLOCKS[0] for mean in means)


def _print_picture(found: LrRange, console: Console) -> None:
    losses = found.mean_losses()
    row = blocks(losses, min(_WIDTH, console.width - 8))
    if not row or console.options.ascii_only:
        return
    console.print(Text.assemble("loss  ", (row, "cyan")))
    ends = f"{found.rates[0]:.0e}".ljust(len(row) - 6) + f"{found.rates[len(losses) - 1]:.0e}".rjust(6)
    console.print(Text(f"rate  {ends}", "dim"))
    console.print()


def _seeds(found: LrRange) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("seed", "updates", "lowest loss", "runs away at"):
        table.add_column(title, justify="right")
    for sweep in found.sweeps:
        edge = "not seen" if sweep.edge is None else f"{sweep.edge:.3g}"
        lowest = f"{min(sweep.losses):.4g}" if sweep.losses else "-"
        table.add_row(str(sweep.seed), str(len(sweep.losses) + 1), lowest, edge)
    return table

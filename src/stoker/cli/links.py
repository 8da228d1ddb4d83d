"""What several processes reach between them, as a table of the doctor's page."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from stoker.records.links import Links
from stoker.units import KIB, MIB, format_bytes, format_seconds

_SIZES = (4, 64 * KIB, MIB, 64 * MIB)
"""Of the messages shown [bytes]."""


def links_table(links: Links) -> Table:
    """Times of each collective over a few sizes, and what else was found of processes that work side by side."""
    when = links.measured_at.replace("T", " ").replace("+00:00", " UTC")
    title = Text.assemble(
        (f"{links.world_size} processes reach", "bold"), (f"   {links.name}, measured {when} in ", "dim"),
        (format_seconds(links.took_s), "dim"),
    )  # fmt: skip
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", title=title, title_justify="left", title_style="")
    table.add_column("")
    for size in _SIZES:
        table.add_column(format_bytes(size), justify="right", no_wrap=True)
    table.add_column("large messages", justify="right", no_wrap=True)
    for one in links.costs:
        rate = f"{1e-9 / one.beta_s_per_byte:.2f} GB/s" if one.beta_s_per_byte else "unknown"
        table.add_row(one.collective, *(format_seconds(one.seconds(size)) for size in _SIZES), rate)
    table.caption, table.caption_justify = Text(_beside(links), "dim"), "left"
    return table


def _beside(links: Links) -> str:
    """`beside arithmetic 12% of a message is hidden · with all at work, what is bound by memory takes 1.50x as …`."""
    words = [f"beside arithmetic {links.overlap:.0%} of a message is hidden"]
    words += [f"with all at work, what is bound by {name} takes {ratio:.2f}x as long"
              for name, ratio in links.slowdown.items()]  # fmt: skip
    words += [f"a message that all stop for after {format_seconds(arithmetic_s)} takes {format_seconds(wait_s)} longer"
              for arithmetic_s, wait_s in links.waits]  # fmt: skip
    return " · ".join(words)

"""The doctor's table of links."""

from __future__ import annotations

import io

from rich.console import Console

from stoker.cli.doctor import links_table
from stoker.records.hardware import LinkCost, Links


def test_the_table_has_times_rates_and_what_company_costs() -> None:
    """A row for each collective, and below what all processes at work do to each other."""
    cost = LinkCost(collective="all-reduce", alpha_s=5e-4, beta_s_per_byte=1e-9)
    links = Links(
        name="gloo, this machine",
        world_size=2,
        costs=(cost,),
        basis="measured here",
        overlap=0.25,
        slowdown={"memory": 1.5},
        waits=((4e-3, 3e-3),),
        took_s=9.0,
        measured_at="2026-11-22T02:00:00+00:00",
    )
    console = Console(file=io.StringIO(), width=120, color_system=None)
    console.print(links_table(links))
    shown = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    assert "2 processes reach" in shown
    assert "all-reduce" in shown
    assert "1.00 GB/s" in shown
    assert "1.55 ms" in shown
    assert "25% of a message overlaps with arithmetic" in shown
    assert "bound by memory takes 1.50x as long" in shown
    assert "a message that all stop for after 4 ms takes 3 ms longer" in shown

"""Places compared for a job, as a table in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from stoker.cli.plan_table import WIDE
from stoker.cli.terminal import column_table, print_table, printable
from stoker.reporting.panel import EMBER, marked
from stoker.reporting.wording import format_interval
from stoker.units import format_bytes, format_money, format_seconds

if TYPE_CHECKING:
    from stoker.launching.place_offers import PlaceComparison, PlaceOffer

_SEEN_RISK = 0.005
"""Least probability of a preemption that is shown [0 to 1]."""


def render_comparison(comparison: PlaceComparison, console: Console) -> None:
    """Print the places, the best first, with the parts of the time to finish, money, risk, and the order of prices."""
    is_wide = console.width >= WIDE or not console.is_terminal
    figures = (">start", ">send", ">run", ">finished in", ">cost", ">risk", ">by $/h")
    table = column_table("", "place", *figures, *["why"] * is_wide, folds={"why"})
    table.columns[0].width = 1
    best = next((offer for offer in comparison.offers if not offer.problem and offer.finish_s is not None), None)
    reasons = []
    for offer in comparison.offers:
        is_best = offer is best
        why = Text(printable(offer.problem or offer.why), EMBER if is_best else "yellow" if offer.problem else "dim")
        reasons.append(Text.assemble((f"{offer.text}: ", "bold" if is_best else ""), why))
        cells: list[Text | str] = [Text("▸" if is_best else "", EMBER), Text(offer.text), *_figures(offer)]
        table.add_row(*cells, *([why] if is_wide else []), style="bold" if is_best else "")
    print_table(table, console)
    for reason in () if is_wide else reasons:
        console.print(reason)
    if best is not None and best.run is not None:
        interval = f"{format_interval(best.run)} in 8 cases of 10, {best.run.basis}"
        console.print(Text(f"\n{best.text}: runs {format_seconds(best.run.value)} ({interval}) on {best.device}"))
    lines = list(comparison.lines)
    if comparison.sent_bytes:
        lines.append(f"a place that has nothing yet is sent {format_bytes(comparison.sent_bytes)}")
    if best is not None and best.price_source:
        lines.append(f"price: {best.price_source}")
    if best is not None and ":" in best.text:
        lines.append(f"`stoker train JOB --on {best.text}` takes it")
    for line in lines:
        console.print(marked("•", EMBER, Text(line)))


def _figures(offer: PlaceOffer) -> tuple[str, ...]:
    start = (
        "unknown"
        if offer.starts_in_s is None
        else "now"
        if offer.starts_in_s == 0
        else format_seconds(offer.starts_in_s)
    )
    if offer.problem and offer.finish_s is None:
        return ("",) * 7
    cost = "unknown" if offer.cost is None else format_money(offer.cost.value)
    cost = "yours" if offer.price_per_h == 0 else cost
    return (
        start,
        "–" if offer.transfer_s < 1 else format_seconds(offer.transfer_s),
        "unknown" if offer.run is None else format_seconds(offer.run.value),
        "unknown" if offer.finish_s is None else format_seconds(offer.finish_s),
        cost,
        f"{100 * offer.interrupted:.0f} %" if offer.interrupted >= _SEEN_RISK else "–",
        "–" if offer.price_rank is None else f"{offer.price_rank}.",
    )

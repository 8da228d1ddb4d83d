"""What the planner decided, as a table in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import date

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stoker.cli.terminal import column_table
from stoker.devices import catalogue, price_list
from stoker.records import Candidate, Decision, Share
from stoker.reporting.event_text import ERRORS_SO_FAR
from stoker.reporting.panel import EMBER, marked
from stoker.reporting.wording import format_interval, plan_in_difference
from stoker.units import GIB, format_bytes, format_money, format_seconds

WIDE = 130
"""Columns from which on a plan stands next to its figures; below, under them."""

MOST_SHARES = 8

_THREE_FIGURES = 99.5
"""From here on two figures do not write a number without an exponent."""

_LARGE = 10
"""From so many GiB on, a device's memory is written without tenths of them."""

_ROUNDING = 1.01
"""Parts that add up to at most so many times the whole are the whole."""


def render_decision(decision: Decision, console: Console, *, explain: bool) -> None:
    """Print the plans that fit, the chosen one first, and why it was chosen; with `explain` the rejected ones too."""
    console.print(_candidates(decision, is_wide=console.width >= WIDE))
    forecast = decision.chosen.forecast
    basis = f"{format_interval(forecast.total_s)} in 8 cases of 10, {forecast.total_s.basis}"
    console.print(Text(f"\nto finish: {format_seconds(forecast.total_s.value)} ({basis})"))
    for line in decision.explanation:
        if line.startswith(ERRORS_SO_FAR) and not explain:
            continue
        console.print(marked("•", EMBER, Text(line)))
    if explain:
        _render_breakdown(decision, console)
    if explain and decision.rejected:
        console.print()
        console.print(_rejections(decision))
    elif decision.rejected:
        count = len(decision.rejected)
        said = f"{count} plans were rejected; --explain says what each lost by"
        console.print(Text(said if count > 1 else "one plan was rejected; --explain says what it lost by", "dim"))
    if decision.advice:
        console.print()
        console.print(marked("→", EMBER, Text(decision.advice, "bold")))


def print_catalogue_problems(console: Console) -> None:
    """Name the rows of the user's catalogue and price files that cannot be used."""
    today = date.today()  # noqa: DTZ011 - the user's day
    for problem in dict.fromkeys((*catalogue().problems, *price_list(today).problems)):
        console.print(Text.assemble(("warning: ", "bold yellow"), problem), soft_wrap=True)


def _candidates(decision: Decision, *, is_wide: bool) -> Table:
    table = column_table()
    table.add_column("", width=1, no_wrap=True)
    is_spread = any(c.plan.layout.world_size > 1 for c in decision.candidates)
    least = 14 if is_wide else 10  # in 80 columns wider ones would cut off the last column
    table.add_column("layout" if is_spread else "device", no_wrap=not is_spread, min_width=least if is_spread else None)
    if is_wide:
        table.add_column("plan", ratio=1)
    is_priced = any(not c.is_here for c in decision.candidates)
    messages = "messages" if is_wide else "exposed"
    columns = [
        "memory",
        *[messages] * is_spread,
        "step",
        "to finish",
        *(["energy"] * is_wide + ["cost"] if is_priced else []),
    ]
    for title in columns:
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("why")
    for candidate in decision.candidates:
        is_chosen = candidate is decision.chosen
        figures = [_figures(candidate)[title] for title in columns]
        words = candidate.plan.in_brief()
        mark, why = (Text("▸", EMBER), Text(candidate.why, EMBER)) if is_chosen else ("", Text(candidate.why, "dim"))
        style = "bold" if is_chosen else ""
        where = _where(candidate, decision)
        if is_wide:
            table.add_row(mark, where, words, *figures, why, style=style)
        else:
            table.add_row(mark, where, *figures, why, style=style)
    if not is_wide:
        devices: dict[str, list[str]] = {}
        for candidate in decision.candidates:
            devices.setdefault(candidate.plan.in_brief(), []).append(_where(candidate, decision))
        table.caption = "\n".join(f"{', '.join(names)}: {words}" for words, names in devices.items())
        table.caption_justify, table.caption_style = "left", "dim"
    return table


def _where(candidate: Candidate, decision: Decision) -> str:
    """The device; of several, the layout over them, with the device where candidates differ in it."""
    layout = candidate.plan.layout.in_words()
    if not layout:
        return candidate.device
    return f"{candidate.device}: {layout}" if len({one.device for one in decision.candidates}) > 1 else layout


def _figures(candidate: Candidate) -> dict[str, str]:
    """What a candidate needs, by the title of the column."""
    forecast, cost = candidate.forecast, candidate.forecast.cost_usd
    messages = (
        "–"  # what processes exchange in an update, and how much of its time shows: `41 MiB · 9 ms + 21 ms hidden`
    )
    if forecast.exposed_s is not None and forecast.communication_bytes is not None:
        messages = f"{format_bytes(forecast.communication_bytes)} · {format_seconds(forecast.exposed_s.value)}"
        if forecast.hidden_s is not None and forecast.hidden_s.value != 0:
            messages += f" + {format_seconds(forecast.hidden_s.value)} hidden"
    taken = forecast.reserved_bytes or forecast.peak_bytes  # on a GPU what its allocator holds
    return {
        "memory": f"{taken.value / GIB:.1f} / {_room(candidate.memory_bytes)} GiB",
        "messages": messages,
        "exposed": "–" if forecast.exposed_s is None else format_seconds(forecast.exposed_s.value),
        "step": format_seconds(forecast.step_s.value),
        "to finish": format_seconds(forecast.total_s.value),
        "energy": "–" if forecast.energy_kwh is None else format_energy(forecast.energy_kwh.value),
        "cost": format_money(cost.value) if cost is not None else "yours" if candidate.is_here else "unknown",
    }


def format_energy(kwh: float) -> str:
    """Energy, in the unit that suits it.

    >>> format_energy(0.0123), format_energy(12.3), format_energy(1834.0)
    ('12 Wh', '12 kWh', '1,834 kWh')
    >>> format_energy(99.7), format_energy(0.0997)  # never 1e+02
    ('100 kWh', '0.1 kWh')
    """
    if kwh >= _THREE_FIGURES:
        return f"{kwh:,.0f} kWh"
    wh = 1e3 * kwh
    return f"{wh:.2g} Wh" if wh < _THREE_FIGURES else f"{kwh:.2g} kWh"


def _room(num_bytes: int) -> str:
    """Memory of a device, or what is allowed of it [GiB].

    >>> _room(24 * GIB), _room(600 * 10**6)
    ('24', '0.6')
    """
    return f"{num_bytes / GIB:.0f}" if num_bytes >= _LARGE * GIB else f"{num_bytes / GIB:.1f}"


def _render_breakdown(decision: Decision, console: Console) -> None:
    breakdown = decision.breakdown
    if breakdown is None:
        return
    forecast = decision.chosen.forecast
    peak = _whole(forecast.peak_bytes.value, breakdown.peak_bytes, format_bytes)
    console.print()
    console.print(
        _shares(f"where the bytes are at the peak, {peak} ({breakdown.peak_at})", breakdown.peak_bytes, format_bytes)
    )
    step = _whole(forecast.step_s.value, breakdown.step_s, format_seconds)
    console.print()
    console.print(_shares(f"where the time of an update goes, {step}", breakdown.step_s, format_seconds))


def _whole(value: float, shares: Sequence[Share], written: Callable[[float], str]) -> str:
    """What the parts add up to: what is forecast, or, where they were traced as more, that too."""
    traced = sum(share.value for share in shares)
    return written(value) if traced <= _ROUNDING * value else f"{written(value)}, traced as {written(traced)}"


def _shares(title: str, shares: Sequence[Share], written: Callable[[float], str]) -> Table:
    table = column_table("what", ">", ">share", "where", folds={"what", "where"}, title=title)
    whole = sum(share.value for share in shares) or 1.0
    for share in shares[:MOST_SHARES]:
        table.add_row(share.what, written(share.value), f"{share.value / whole:.0%}", share.where)
    rest = sum(share.value for share in shares[MOST_SHARES:])
    if rest:
        table.add_row(f"{len(shares) - MOST_SHARES} others", written(rest), f"{rest / whole:.0%}", "")
    return table


def _rejections(decision: Decision) -> Table:
    title = f"rejected ({len(decision.rejected)})"
    table = column_table("device", "plan", "lost by", folds={"plan", "lost by"}, title=title)
    for rejection in decision.rejected:
        is_same_device = rejection.device == decision.chosen.device
        text = plan_in_difference(rejection.plan, decision.chosen.plan) if is_same_device else ""
        if rejection.plan.layout.world_size > 1:
            text = rejection.plan.layout.in_words()
        table.add_row(rejection.device, text or rejection.plan.in_brief(), rejection.reason)
    return table

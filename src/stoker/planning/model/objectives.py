"""What a plan is chosen for, and the limits it must keep.

Money, energy and carbon of a forecast: a rate times a time, with what is assumed said in words.

Two independent uncertainties are joined as relative errors in quadrature, on each side of the value apart. A price is
taken as exact: what is uncertain of it is its age, which the price itself tells.

Among devices: which to take for the objective, within the limits, and what to tell somebody who asks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from stoker.devices import PUE_DATA_CENTRE, Grid, grid_of
from stoker.errors import BadJob, DoesNotFit
from stoker.records import Basis, Candidate, Estimate, Price, Rejection
from stoker.units import format_money, format_seconds

Objective = Literal["time", "money", "energy"]


@dataclass(frozen=True, kw_only=True)
class PlanLimits:
    """The most a run may cost [USD] and last [s]; None where there is no limit."""

    max_cost_usd: float | None = None
    deadline_s: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("max_cost_usd", self.max_cost_usd), ("deadline_s", self.deadline_s)):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise BadJob(f"{name} must be a positive number, got {value}")

    @property
    def objective(self) -> Objective:
        """What is wanted where nobody says: with a deadline the least money, else the least time."""
        return "time" if self.deadline_s is None else "money"

    def broken_by(self, candidate: Candidate) -> tuple[str, ...]:
        """The limits a candidate exceeds, in words; a device that is here costs nothing, an unknown price too much."""
        total_s, cost = candidate.forecast.total_s.value, candidate.forecast.cost_usd
        words: list[str] = []
        if self.deadline_s is not None and total_s > self.deadline_s:
            words.append(f"takes {format_seconds(total_s)}, the deadline is {format_seconds(self.deadline_s)}")
        if self.max_cost_usd is not None and not candidate.is_here:
            if cost is None:
                words.append("nobody in the price list offers it")
            elif cost.value > self.max_cost_usd:
                words.append(f"costs {format_money(cost.value)}, the limit is {format_money(self.max_cost_usd)}")
        return tuple(words)

    def excess(self, candidate: Candidate) -> float:
        """How far beyond its limits a candidate is: the largest ratio of need to limit, 1 if it keeps them."""
        cost = candidate.forecast.cost_usd
        ratios = [1.0]
        if self.deadline_s is not None:
            ratios.append(candidate.forecast.total_s.value / self.deadline_s)
        if self.max_cost_usd is not None and not candidate.is_here:
            ratios.append(float("inf") if cost is None else cost.value / self.max_cost_usd)
        return max(ratios)

    def in_words(self) -> str:
        """`at most $20.00, within 12 h`."""
        words = []
        if self.max_cost_usd is not None:
            words.append(f"at most {format_money(self.max_cost_usd)}")
        if self.deadline_s is not None:
            words.append(f"within {format_seconds(self.deadline_s)}")
        return ", ".join(words) or "no limits"


_JOULES_PER_KWH = 3.6e6
_FIRMEST_FIRST: tuple[Basis, ...] = ("measured here", "calibrated", "roofline", "datasheet", "unknown")


def cost_usd(total_s: Estimate, price: Price) -> Estimate:
    """What a time costs at a price [USD]; a start is paid by the second, storage and egress are left out."""
    return total_s.scaled(price.usd_per_hour / 3600, "USD")


def energy_kwh(power_w: Estimate, total_s: Estimate, *, pue: float = PUE_DATA_CENTRE) -> Estimate:
    """Energy of a device over a time, with its share of the building's [kWh].

    Args:
        power_w: the device's mean draw while the job runs [W].
        total_s: how long it runs [s].
        pue: what the building draws for each watt of the device [fraction], at least 1.

    Raises:
        ValueError: `pue` is below 1.
    """
    if not pue >= 1:
        raise ValueError(f"a PUE is at least 1, got {pue}")
    return _product(power_w, total_s, "J").scaled(pue / _JOULES_PER_KWH, "kWh")


def co2_kg(energy: Estimate, grid: Grid | None = None) -> Estimate:
    """What an energy [kWh] emits on a grid, the world's average if None [kg of CO2 equivalent]."""
    return energy.scaled((grid or grid_of()).g_co2_per_kwh / 1000, "kg")


def cost_assumptions(price: Price | None, *, pue: float = PUE_DATA_CENTRE, grid: Grid | None = None) -> str:
    """What money, energy and carbon of a forecast rest on, on one line.

    >>> assumptions(None, pue=1.54)
    'energy: the device × 1.54 for its building · carbon: world average, 481 g/kWh (2023)'
    """
    parts, grid = [], grid or grid_of()
    if price is not None:
        seen = "without a date" if price.seen_on is None else f"seen {price.seen_on}"
        where = f"{price.provider} {price.region}".strip()
        old = ", stale" if price.is_stale else ""
        parts.append(f"money: {format_money(price.usd_per_hour)}/h {price.market} at {where}, {seen}{old}")
    building = f"the device × {pue:g} for its building" if pue > 1 else "the device alone"
    name = grid.name[0].lower() + grid.name[1:] if grid.code == "world" else grid.name
    parts += [f"energy: {building}", f"carbon: {name}, {grid.g_co2_per_kwh:g} g/kWh ({grid.year})"]
    return " · ".join(parts)


def _product(a: Estimate, b: Estimate, unit: str) -> Estimate:
    """The product of two independent quantities that are not negative; it rests on the weaker of the two."""
    value = a.value * b.value
    below = math.hypot(_relative(a.value - a.low, a.value), _relative(b.value - b.low, b.value))
    above = math.hypot(_relative(a.high - a.value, a.value), _relative(b.high - b.value, b.value))
    basis = max(a.basis, b.basis, key=_FIRMEST_FIRST.index)
    return Estimate(value=value, low=max(0.0, value * (1 - below)), high=value * (1 + above), unit=unit, basis=basis)


def _relative(distance: float, value: float) -> float:
    return distance / value if value else 0.0


ENOUGH_S = 1800.0
"""A run that ends within this on what is here needs nothing rented [s]."""

WORTH_RENTING = 3.0
"""Renting is spoken of where it is at least this many times faster."""

_MORE_SAMPLES = 1.05
"""From so many times the samples on it is told that a run trains on more: in a stated time, faster devices do."""


def choose(
    candidates: Sequence[Candidate], limits: PlanLimits, objective: Objective | None = None
) -> tuple[tuple[Candidate, ...], tuple[Rejection, ...]]:
    """The candidates that keep the limits, the best for the objective first with its reason, and the others.

    Args:
        candidates: one for each device.
        limits: what must be kept.
        objective: what is least in the best; `limits.objective` if None.

    Raises:
        DoesNotFit: none keeps the limits; it names the one that almost does.
    """
    wanted = objective or limits.objective
    keeping = sorted((c for c in candidates if not limits.broken_by(c)), key=lambda c: _key(c, wanted))
    if not keeping:
        raise _nothing_keeps(candidates, limits)
    best, *others = keeping
    ranked = (dataclasses.replace(best, why=_why_best(keeping, limits, wanted)),
              *(dataclasses.replace(c, why=_against(c, best)) for c in others))  # fmt: skip
    rejected = tuple(
        Rejection(device=c.device, plan=c.plan, reason="; ".join(limits.broken_by(c)))
        for c in candidates
        if limits.broken_by(c)
    )
    return ranked, rejected


def advice(chosen: Candidate, rentable: Sequence[Candidate]) -> str:
    """One sentence for somebody with a model and a laptop: is it enough here, or what to rent, and what that changes.

    Args:
        chosen: the best plan for what is here.
        rentable: the best plan for each device that can be rented, with its price.
    """
    here_s = chosen.forecast.total_s.value
    priced = [c for c in rentable if c.forecast.cost_usd is not None]
    faster = [c for c in priced if c.forecast.seconds_per_sample * WORTH_RENTING < chosen.forecast.seconds_per_sample]
    if here_s <= ENOUGH_S or not faster:
        why = "" if here_s <= ENOUGH_S else ", and nothing for rent would be much faster"
        return f"What is here is enough: done in {_with_interval(chosen)}{why}."
    cheapest = min(faster, key=_cost)
    fastest = min(faster, key=lambda c: c.forecast.seconds_per_sample)
    text = f"It runs here in {_with_interval(chosen)}; {_deal(cheapest)}{_samples(cheapest, chosen)}"
    if fastest.forecast.seconds_per_sample * 1.5 < cheapest.forecast.seconds_per_sample:
        text += f", or {_deal(fastest)}{_samples(fastest, chosen)}"
    return text + "."


def rental_advice(why_not_here: str, rentable: Sequence[Candidate]) -> str:
    """One sentence for a job that does not fit here: the cheapest device on which it does, or that there is none."""
    priced = [c for c in rentable if c.forecast.cost_usd is not None]
    if not priced:
        return f"It does not fit here ({why_not_here}), nor on any one device with a price in the catalogue."
    return f"It does not fit here ({why_not_here}); the cheapest that does it: {_deal(min(priced, key=_cost))}."


def _key(candidate: Candidate, objective: Objective) -> tuple[float, ...]:
    """What is to be least, then time; what nobody knows comes last."""
    forecast = candidate.forecast
    time = (forecast.seconds_per_sample, forecast.total_s.value)
    if objective == "money":
        return _cost(candidate), *time
    if objective == "energy":
        return forecast.energy_kwh.value if forecast.energy_kwh is not None else float("inf"), *time
    return *time, _cost(candidate)


def _cost(candidate: Candidate) -> float:
    """What the run costs [USD]: nothing on what is here, infinitely much where nobody knows."""
    if candidate.is_here:
        return 0.0
    return candidate.forecast.cost_usd.value if candidate.forecast.cost_usd is not None else float("inf")


def _why_best(keeping: Sequence[Candidate], limits: PlanLimits, objective: Objective) -> str:
    if len(keeping) == 1:
        return keeping[0].why if limits == PlanLimits() else f"the only one {limits.in_words()}"
    word = {"time": "fastest", "money": "cheapest", "energy": "least energy"}[objective]
    if objective == "money" and limits.deadline_s is not None:
        return f"{word} inside the deadline"
    return f"{word} within the budget" if limits.max_cost_usd is not None else word


def _against(candidate: Candidate, best: Candidate) -> str:
    """How another compares with the best: `2.1x the time, 0.8x the cost`."""
    words = [_ratio(candidate.forecast.seconds_per_sample / best.forecast.seconds_per_sample, "the time", "as fast")]
    mine, theirs = _cost(candidate), _cost(best)
    if 0 < theirs < float("inf") and 0 < mine < float("inf"):
        words.append(_ratio(mine / theirs, "the cost", "cheaper"))
    return ", ".join(words)


def _ratio(ratio: float, more: str, less: str) -> str:
    """`10× the time`, `2.4× as fast`."""
    is_less = ratio < 0.995
    times = 1 / ratio if is_less else ratio
    return f"{times:,.0f}× {less if is_less else more}" if times >= 9.5 else f"{times:.1f}× {less if is_less else more}"


def _with_interval(candidate: Candidate) -> str:
    """`3 min 20 s (3 min to 4 min)`: on a machine that others use the interval is what there is to go by."""
    total = candidate.forecast.total_s
    return f"{format_seconds(total.value)} ({format_seconds(total.low)} to {format_seconds(total.high)})"


def _deal(candidate: Candidate) -> str:
    """`an l4 at RunPod takes 5 h for $2.10`."""
    where = f" at {candidate.price.provider}" if candidate.price is not None else ""
    cost = format_money(_cost(candidate))
    return f"{candidate.device}{where} takes {format_seconds(candidate.forecast.total_s.value)} for {cost}"


def _samples(candidate: Candidate, chosen: Candidate) -> str:
    """` with 12 times the samples`, where a run trains on more of them than the chosen one."""
    ratio = candidate.forecast.total_samples / max(1, chosen.forecast.total_samples)
    return f" with {ratio:.2g} times the samples" if ratio > _MORE_SAMPLES else ""


def _nothing_keeps(candidates: Sequence[Candidate], limits: PlanLimits) -> DoesNotFit:
    if not candidates:
        return DoesNotFit("the job fits on none of these devices")
    nearest = min(candidates, key=limits.excess)
    cost = nearest.forecast.cost_usd
    shown = format_seconds(nearest.forecast.total_s.value) + (f" and {format_money(cost.value)}" if cost else "")
    return DoesNotFit(
        f"no device does it {limits.in_words()}; the nearest is {nearest.device} with {shown}: "
        + "; ".join(limits.broken_by(nearest)),
        remedy="Raise that limit, name more devices with --on all, or train for fewer samples.",
    )

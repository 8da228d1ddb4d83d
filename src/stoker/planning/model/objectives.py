"""Choose among devices by an objective within limits of money and time, and advise the user.

Money, energy and carbon are a rate times a time. Independent uncertainties are joined as relative errors in quadrature,
on each side of the value. A price counts as exact: its uncertainty is its age, which the price itself has.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from stoker.devices import HOST_SHARE, PUE_DATA_CENTRE, Grid, grid_of
from stoker.errors import BadJob, DoesNotFit
from stoker.records import Basis, Candidate, Estimate, Price, Rejection
from stoker.units import format_money, format_seconds

Objective = Literal["time", "money", "energy"]


@dataclass(frozen=True, kw_only=True)
class PlanLimits:
    """The most a run may cost [USD] and last [s]; None: no limit."""

    max_cost_usd: float | None = None
    deadline_s: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("max_cost_usd", self.max_cost_usd), ("deadline_s", self.deadline_s)):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise BadJob(f"{name} must be a positive number, got {value}")

    @property
    def objective(self) -> Objective:
        """The default objective: with a deadline the least money, else the least time."""
        return "time" if self.deadline_s is None else "money"

    def broken_by(self, candidate: Candidate) -> tuple[str, ...]:
        """The limits that a candidate exceeds, as text; a device here costs nothing, an unknown price too much."""
        total_s, cost = candidate.forecast.total_s.value, candidate.forecast.cost_usd
        words: list[str] = []
        if self.deadline_s is not None and total_s > self.deadline_s:
            words.append(f"takes {format_seconds(total_s)}, the deadline is {format_seconds(self.deadline_s)}")
        if self.max_cost_usd is not None and not candidate.is_here:
            if cost is None:
                words.append("the price list has no offer of it")
            elif cost.value > self.max_cost_usd:
                words.append(f"costs {format_money(cost.value)}, the limit is {format_money(self.max_cost_usd)}")
        return tuple(words)

    def excess(self, candidate: Candidate) -> float:
        """Largest ratio of a candidate's need to its limit [1]; at least 1."""
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
    """Cost of a time at a price [USD], paid by the second; storage and egress are left out."""
    return total_s.scaled(price.usd_per_hour / 3600, "USD")


def energy_kwh(power_w: Estimate, total_s: Estimate, *, pue: float = PUE_DATA_CENTRE) -> Estimate:
    """Energy of a device over a time, with its share of the building's [kWh].

    Args:
        power_w: the device's mean draw while the job runs [W].
        total_s: how long it runs [s].
        pue: power of the building over that of the device, with its share of the machine [1], at least 1.

    Raises:
        ValueError: `pue` is below 1.
    """
    if not pue >= 1:
        raise ValueError(f"a PUE is at least 1, got {pue}")
    joules = power_w.value * total_s.value  # of independent quantities; it rests on the weaker of the two
    below = math.hypot(*(_relative(one.value - one.low, one.value) for one in (power_w, total_s)))
    above = math.hypot(*(_relative(one.high - one.value, one.value) for one in (power_w, total_s)))
    energy = Estimate(
        value=joules,
        low=max(0.0, joules * (1 - below)),
        high=joules * (1 + above),
        unit="J",
        basis=max(power_w.basis, total_s.basis, key=_FIRMEST_FIRST.index),
    )
    return energy.scaled(pue / _JOULES_PER_KWH, "kWh")


def co2_kg(energy: Estimate, grid: Grid | None = None) -> Estimate:
    """Emission of an energy [kWh] on a grid [kg of CO2 equivalent]; None: the world's average."""
    return energy.scaled((grid or grid_of()).g_co2_per_kwh / 1000, "kg")


def cost_assumptions(price: Price | None, *, pue: float = PUE_DATA_CENTRE, grid: Grid | None = None) -> str:
    """The assumptions behind money, energy and carbon of a forecast, on one line.

    >>> cost_assumptions(None, pue=1.54)
    'energy: the device × 1.5 for its machine × 1.54 for its building · carbon: world average, 481 g/kWh (2023)'
    """
    parts, grid = [], grid or grid_of()
    if price is not None:
        seen = "without a date" if price.seen_on is None else f"seen {price.seen_on}"
        where = f"{price.provider} {price.region}".strip()
        old = ", stale" if price.is_stale else ""
        parts.append(f"money: {format_money(price.usd_per_hour)}/h {price.market} at {where}, {seen}{old}")
    building = "the device alone"
    if pue > 1:
        building = f"the device × {HOST_SHARE:g} for its machine × {pue:g} for its building"
    name = grid.name[0].lower() + grid.name[1:] if grid.code == "world" else grid.name
    parts += [f"energy: {building}", f"carbon: {name}, {grid.g_co2_per_kwh:g} g/kWh ({grid.year})"]
    return " · ".join(parts)


def _relative(distance: float, value: float) -> float:
    return distance / value if value else 0.0


ENOUGH_S = 1800.0
"""A run that ends here within this time needs no rented device [s]."""

WORTH_RENTING = 3.0
"""Renting is advised if it is at least this many times faster."""

_MORE_SAMPLES = 1.05
"""Least ratio of samples that is mentioned: in a stated time, faster devices train on more."""


def choose(
    candidates: Sequence[Candidate], limits: PlanLimits, objective: Objective | None = None
) -> tuple[tuple[Candidate, ...], tuple[Rejection, ...]]:
    """The candidates that keep the limits, the best for the objective first with its reason, and the others.

    Args:
        candidates: one for each device.
        limits: to be kept.
        objective: to be minimised; `limits.objective` if None.

    Raises:
        DoesNotFit: none keeps the limits; it names the one that almost does.
    """
    objective = objective or limits.objective
    keeping = sorted((c for c in candidates if not limits.broken_by(c)), key=lambda c: _key(c, objective))
    if not keeping:
        raise _none_within_limits(candidates, limits)
    best, *others = keeping
    why = {"time": "fastest", "money": "cheapest", "energy": "least energy"}[objective]
    if not others:
        why = best.why if limits == PlanLimits() else f"the only one {limits.in_words()}"
    elif objective == "money" and limits.deadline_s is not None:
        why += " inside the deadline"
    elif limits.max_cost_usd is not None:
        why += " within the budget"
    ranked = [dataclasses.replace(best, why=why)]
    for other in others:
        words = [_ratio(other.forecast.seconds_per_sample / best.forecast.seconds_per_sample, "the time", "as fast")]
        if 0 < _cost(best) < float("inf") and 0 < _cost(other) < float("inf"):
            words.append(_ratio(_cost(other) / _cost(best), "the cost", "cheaper"))
        ranked.append(dataclasses.replace(other, why=", ".join(words)))
    rejected = tuple(
        Rejection(device=c.device, plan=c.plan, reason="; ".join(limits.broken_by(c)))
        for c in candidates
        if limits.broken_by(c)
    )
    return tuple(ranked), rejected


def advice(chosen: Candidate, rentable: Sequence[Candidate]) -> str:
    """One sentence for a user with a model and a laptop: is it enough here, or what to rent, and what that changes.

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
    """One sentence for a job that does not fit here: the cheapest device on which it does, if any."""
    priced = [c for c in rentable if c.forecast.cost_usd is not None]
    if not priced:
        return f"It does not fit here ({why_not_here}), nor on any one device with a price in the catalogue."
    return f"It does not fit here ({why_not_here}); the cheapest that does it: {_deal(min(priced, key=_cost))}."


def _key(candidate: Candidate, objective: Objective) -> tuple[float, ...]:
    """Sort key: the objective, then time; unknown values come last."""
    forecast = candidate.forecast
    time = (forecast.seconds_per_sample, forecast.total_s.value)
    if objective == "money":
        return _cost(candidate), *time
    if objective == "energy":
        return forecast.energy_kwh.value if forecast.energy_kwh is not None else float("inf"), *time
    return *time, _cost(candidate)


def _cost(candidate: Candidate) -> float:
    """Cost of the run [USD]: 0 on a device here, infinity if unknown."""
    if candidate.is_here:
        return 0.0
    return candidate.forecast.cost_usd.value if candidate.forecast.cost_usd is not None else float("inf")


def _ratio(ratio: float, more: str, less: str) -> str:
    """`10× the time`, `2.4× as fast`."""
    is_less = ratio < 0.995
    times = 1 / ratio if is_less else ratio
    return f"{times:,.0f}× {less if is_less else more}" if times >= 9.5 else f"{times:.1f}× {less if is_less else more}"


def _with_interval(candidate: Candidate) -> str:
    """`3 min 20 s (3 min to 4 min)`."""
    total = candidate.forecast.total_s
    return f"{format_seconds(total.value)} ({format_seconds(total.low)} to {format_seconds(total.high)})"


def _deal(candidate: Candidate) -> str:
    """`an l4 at RunPod takes 5 h for $2.10`."""
    where = f" at {candidate.price.provider}" if candidate.price is not None else ""
    cost = format_money(_cost(candidate))
    return f"{candidate.device}{where} takes {format_seconds(candidate.forecast.total_s.value)} for {cost}"


def _samples(candidate: Candidate, chosen: Candidate) -> str:
    """` with 12 times the samples`, if the run trains on more than the chosen one."""
    ratio = candidate.forecast.total_samples / max(1, chosen.forecast.total_samples)
    return f" with {ratio:.2g} times the samples" if ratio > _MORE_SAMPLES else ""


def _none_within_limits(candidates: Sequence[Candidate], limits: PlanLimits) -> DoesNotFit:
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

"""Among devices: which to take for the objective, within the limits, and what to tell somebody who asks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from stoker.errors import DoesNotFit
from stoker.planning.limits import Limits, Objective
from stoker.records import Candidate, Rejection
from stoker.units import format_money, format_seconds

ENOUGH_S = 1800.0
"""A run that ends within this on what is here needs nothing rented [s]."""

WORTH_RENTING = 3.0
"""Renting is spoken of where it is at least this many times faster."""

_MORE_SAMPLES = 1.05
"""From so many times the samples on it is told that a run trains on more: in a stated time, faster devices do."""


def choose(
    candidates: Sequence[Candidate], limits: Limits, objective: Objective | None = None
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


def _why_best(keeping: Sequence[Candidate], limits: Limits, objective: Objective) -> str:
    if len(keeping) == 1:
        return keeping[0].why if limits == Limits() else f"the only one {limits.in_words()}"
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


def _nothing_keeps(candidates: Sequence[Candidate], limits: Limits) -> DoesNotFit:
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

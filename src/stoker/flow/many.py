"""A job on several devices: its layouts beside each other, what they cost, and why the best is the best."""

from __future__ import annotations

import dataclasses
import time

from stoker import planning
from stoker.devices import PUE_DATA_CENTRE, PUE_HERE, Place, cheapest, grid_of
from stoker.flow.layouts import Layouts, plain
from stoker.flow.planner import Planner
from stoker.planning.spread_words import why_slower, words_on_messages
from stoker.records import Candidate, Decision, Plan, Price, Rejection


def on_many(planner: Planner, place: Place, only: Plan | None = None) -> Decision:
    """The layouts of a job at a place of several devices, the best first; with `only`, that plan.

    Raises:
        BadJob: the job cannot be spread, or `only` does not go with it.
        DoesNotFit: it fits under no layout.
    """
    started, layouts = time.perf_counter(), Layouts(planner, place)
    ranked, rejected = layouts.ranked() if only is None else ((layouts.given(only),), ())
    candidates = tuple(_priced(layouts, one) for one in ranked)
    chosen, *others = candidates
    forecasts, own = layouts.forecasts(chosen.plan.layout), plain(chosen.plan)
    told = [dataclasses.replace(one, why=_times(one, chosen)) for one in others]
    lost = tuple(
        Rejection(device=one.device, plan=one.plan, reason=why_slower(
            layouts.forecasts(one.plan.layout).spread(plain(one.plan)), one.forecast, chosen.forecast
        ))
        for one in others
    )  # fmt: skip
    device = dataclasses.replace(place.device, memory_bytes=place.memory_bytes_each)
    lines = planning.explain(chosen, layouts.profile, device, (), ())
    spread = forecasts.spread(own)
    messages = words_on_messages(spread, [layouts.links(place.count, 1)])
    return Decision(
        device=place.name,
        candidates=(dataclasses.replace(chosen, why="the fastest layout" if others else chosen.why), *told),
        rejected=(*lost, *rejected),
        explanation=(*planner.prepared.notes, *lines, *messages, *layouts.of_lockstep(chosen), planning.assumptions(
            chosen.price, pue=PUE_HERE if place.is_here else PUE_DATA_CENTRE, grid=grid_of()
        )),
        took_s=time.perf_counter() - started,
        breakdown=planning.adding_up(forecasts.breakdown(own), chosen.forecast, is_cpu=place.device.kind == "cpu"),
    )  # fmt: skip


def _times(one: Candidate, chosen: Candidate) -> str:
    return f"{one.forecast.seconds_per_sample / chosen.forecast.seconds_per_sample:.2f}x the time"


def _priced(layouts: Layouts, candidate: Candidate) -> Candidate:
    """The candidate with what all devices together cost, draw and emit."""
    place, forecast = layouts.place, candidate.forecast
    each = None if place.is_here or place.entry is None else cheapest(place.entry.name)
    price: Price | None = None
    if each is not None:
        price = dataclasses.replace(each, usd_per_hour=each.usd_per_hour * place.count)
    pue = PUE_HERE if place.is_here else PUE_DATA_CENTRE
    energy = layouts.forecasts(candidate.plan.layout).energy_kwh(plain(candidate.plan), forecast, pue=pue)
    if energy is not None and not place.is_shared:
        energy = energy.scaled(place.count)
    return dataclasses.replace(
        candidate,
        price=price,
        forecast=dataclasses.replace(
            forecast, energy_kwh=energy, co2_kg=None if energy is None else planning.co2_kg(energy, grid_of()),
            cost_usd=None if price is None else planning.cost_usd(forecast.total_s, price),
        ),
    )  # fmt: skip

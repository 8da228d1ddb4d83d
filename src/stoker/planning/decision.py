"""Which plan: for one device that is here, confirmed by trials; among many devices, by forecast.

What a candidate costs: the price of its device, the energy it takes, and what that puts into the air.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path

from stoker import records
from stoker.devices import (
    PUE_DATA_CENTRE,
    PUE_HERE,
    Place,
    attached_devices,
    catalogue,
    cheapest,
    grid_of,
    planned_devices,
    sample_cpu,
)
from stoker.devices.cpu import attached_cpu, free_cores
from stoker.errors import BadJob, DoesNotFit, NoDevice, nearest
from stoker.jobs import Entry, Job
from stoker.planning.does_not_fit import describe_misfits, fits_nowhere_error
from stoker.planning.explanation import explain, why_not_compiled
from stoker.planning.model.checkpoint_cost import settled
from stoker.planning.model.objectives import (
    ENOUGH_S,
    Objective,
    PlanLimits,
    advice,
    choose,
    co2_kg,
    cost_assumptions,
    cost_usd,
    rental_advice,
)
from stoker.planning.model.run_forecast import complete_breakdown
from stoker.planning.model.shared_cpu import describe_load, widen_for_load
from stoker.planning.multi_device import on_many
from stoker.planning.plan_history import keep_decision, kept_decision
from stoker.planning.plan_ranking import least_demanding
from stoker.planning.planner import Planner, describe_errors, describe_failures, losers_of, may_give_up_threads
from stoker.planning.resolved_job import ResolvedJob, resolve_job
from stoker.records import Breakdown, Candidate, Coupling, Decision, Device, Plan, Price, Rejection
from stoker.units import parse_duration, parse_memory, parse_money

STARTING_S = 120.0
"""Until a rented machine is there, with Python, data and device started [s]: a judgement."""


def plan(  # noqa: PLR0913 - what the command line offers
    job: Job,
    *,
    on: str = "here",
    max_cost: float | str | None = None,
    deadline: float | str | None = None,
    objective: Objective | None = None,
    memory: float | str | None = None,
    threads: int | None = None,
    device_mtbf_h: float | None = None,
    entry: Entry | None = None,
) -> Decision:
    """Choose device and settings for `job`, and forecast what it needs there.

    Args:
        job: what is to be learned.
        on: devices to compare: `here`, `h100,l4,here`, or `all` of the catalogue. Plans for what is here are confirmed
            by short trials; for the rest nothing is run.
        max_cost: the most it may cost [USD]; a number, or `20usd`.
        deadline: the longest it may take [s]; a number, or `12h`.
        objective: what should be least: `time`, `money` or `energy` (default: time; money where there is a deadline).
        memory: the most of a device's memory that may be used [bytes]; a number, or `6GB`.
        threads: the most that compute on a CPU (default: OMP_NUM_THREADS if it is set, else one for each core).
        device_mtbf_h: mean time of one device between two failures [h]; None: that of `devices.failure_rates`.
        entry: the job file it came from.

    Raises:
        BadJob: the job cannot be trained as it is.
        DoesNotFit: no legal plan fits, or none keeps the limits.
        NoDevice: a word of `on` is unknown, or `here` has none.
    """
    limits = PlanLimits(
        max_cost_usd=parse_money(max_cost) if isinstance(max_cost, str) else max_cost,
        deadline_s=parse_duration(deadline) if isinstance(deadline, str) else deadline,
    )
    started = time.perf_counter()
    places, unplanned = _places(on)
    places = tuple(place.limited_to(memory_limit(memory), most_threads(threads)) for place in places)
    planner = Planner(
        resolve_job(job, entry), is_all_elsewhere=not any(place.is_here for place in places),
        device_mtbf_h=require_mtbf(device_mtbf_h),
    )  # fmt: skip
    decision = compare(planner, places, limits, objective)
    if unplanned:
        decision = dataclasses.replace(decision, explanation=(*decision.explanation, *unplanned))
    if all(place.is_here and place.count == 1 for place in places):
        decision = dataclasses.replace(decision, advice=_advice(planner, decision.chosen))
    return dataclasses.replace(settled(decision), took_s=time.perf_counter() - started)


def require_mtbf(hours: float | None) -> float | None:
    """A mean time between failures [h], or none; raises BadJob where it is no time."""
    if hours is not None and not 0 < hours < math.inf:
        raise BadJob(f"device_mtbf_h must be a positive number of hours, got {hours}")
    return hours


def _places(on: str) -> tuple[tuple[Place, ...], tuple[str, ...]]:
    """The places that words mean, and why those of the catalogue that cannot be planned for are left out.

    Raises:
        NoDevice: a word is unknown, or none of the devices can be planned for.
    """
    attached, words = attached_devices(), [word for word in on.split(",") if word.strip()]
    found: dict[str, Place] = {}
    problems: list[NoDevice] = []
    for word in words or [on]:
        try:
            found |= {place.name: place for place in planned_devices(word, attached)}
        except NoDevice as problem:
            if len(words) < 2 or not catalogue().find(word.strip().lower()):
                raise
            problems.append(problem)
    if not found:
        raise problems[0]
    return tuple(found.values()), tuple(problem.message for problem in problems)


def memory_limit(memory: float | str | None) -> float | None:
    """A limit of memory [bytes]; raises BadJob where it is none."""
    limit = parse_memory(memory) if isinstance(memory, str) else memory
    if limit is not None and not limit > 0:
        raise BadJob(f"memory must be a positive number of bytes, got {limit}", remedy='Or a text such as "6GB".')
    return limit


def most_threads(threads: int | None) -> int | None:
    """The most threads that may compute on the CPU here: as asked for, else as OMP_NUM_THREADS says; None: no limit.

    Raises:
        BadJob: it is below 1, or more than there are cores.
    """
    if threads is None:
        said = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
        return int(said) if said.isdigit() and int(said) > 0 else None
    cores = attached_cpu().cores
    if not 1 <= threads <= cores:
        raise BadJob(
            f"--threads {threads}: this process may use {cores} {'core' if cores == 1 else 'cores'}",
            remedy=f"Give a number from 1 to {cores}, or leave it out.",
        )
    return threads


def decide(
    prepared: ResolvedJob,
    device: Device,
    only: Plan | None = None,
    *,
    memory_bytes: float | None = None,
    threads: int | None = None,
    device_mtbf_h: float | None = None,
) -> tuple[Decision, Coupling]:
    """The plan to run on a device that is here, confirmed by trials: now, or before where nothing has changed since.

    With `only`, that plan is tried and taken. `memory_bytes` is the most of the device's memory that may be used,
    `threads` the most threads on a CPU (None: as OMP_NUM_THREADS says), `device_mtbf_h` its mean time between two
    failures [h], if that is known.
    """
    if only is not None:
        _require_usable(only, prepared, device)
    started, planner = time.perf_counter(), Planner(prepared, device_mtbf_h=device_mtbf_h)
    place = planned_devices(device.torch_name, (device,))[0].limited_to(memory_bytes, most_threads(threads))
    kept = kept_decision(prepared, place) if only is None and device_mtbf_h is None else None
    if kept is not None:
        return dataclasses.replace(settled(kept[0]), took_s=time.perf_counter() - started), kept[1]
    if planner.is_too_large_here is not None:
        planner.ranked(place)  # says what it needs
    decision = settled(_confirmed(planner, place, only))
    return dataclasses.replace(decision, took_s=time.perf_counter() - started), planner.coupling


def decide_many(
    prepared: ResolvedJob, place: Place, only: Plan | None = None, *, device_mtbf_h: float | None = None
) -> tuple[Decision, Coupling]:
    """The plan to run on several devices that are here, by forecast; with `only`, that plan is taken.

    `device_mtbf_h` is the mean time of one of them between two failures [h], if that is known.

    Raises:
        BadJob: the job cannot be spread over so many processes, or `only` does not go with it.
        DoesNotFit: it fits under no layout.
    """
    if only is not None:
        _require_usable(only, prepared, place.device)
    started, planner = time.perf_counter(), Planner(prepared, device_mtbf_h=device_mtbf_h)
    decision = settled(on_many(planner, place, only))
    return dataclasses.replace(decision, took_s=time.perf_counter() - started), planner.coupling


def compare(planner: Planner, places: Sequence[Place], limits: PlanLimits, objective: Objective | None) -> Decision:
    """The best plan for each place, the best place first.

    Raises:
        DoesNotFit: the job fits on none of them, or none keeps the limits.
    """
    decisions: dict[str, Decision] = {}
    unfit: list[tuple[Place, DoesNotFit]] = []
    apart: list[str] = []
    for place in places:
        try:
            decisions[place.name] = on_one(planner, place)
        except DoesNotFit as problem:
            unfit.append((place, problem))
        except BadJob as problem:  # of several devices, that it cannot be spread over them says nothing of one
            if place.count == 1 or len(places) == 1:
                raise
            apart.append(f"{place.name} is left out: {problem.message}")
    if not decisions and not unfit:
        raise BadJob("; ".join(apart), remedy="Use one device.")
    if not decisions:
        raise _fits_nowhere(planner, unfit)
    ranked, beyond = choose([d.chosen for d in decisions.values()], limits, objective)
    best = decisions[ranked[0].device]
    if len(places) == 1:  # of several devices, the layouts stand beside each other
        ranked = (ranked[0], *best.candidates[1:])
    too_small = [_unfit(planner, place, problem) for place, problem in unfit]
    rejected = (*beyond, *(one for one in too_small if one is not None), *best.rejected)
    lines = (*best.explanation, *describe_misfits(unfit), *apart)
    if len(ranked) > 1 and not ranked[0].is_here and _are_soon_done(ranked):
        lines = (*lines, "any of these will do: training takes less time than renting and starting a machine")
    return dataclasses.replace(best, candidates=ranked, rejected=rejected, explanation=lines)


def _are_soon_done(candidates: Sequence[Candidate]) -> bool:
    return all(one.forecast.total_s.value < STARTING_S for one in candidates if not one.is_here)


def on_one(planner: Planner, place: Place) -> Decision:
    """The best plan for one place: confirmed by trials where it is here, else by forecast.

    Raises:
        DoesNotFit: no legal plan fits.
    """
    if place.count > 1:
        return on_many(planner, place)
    if place.is_here and planner.is_too_large_here is None:
        return _confirmed(planner, place)
    ranked = planner.ranked(place)
    chosen = dataclasses.replace(priced(planner, place, ranked[0]), why="by forecast")
    lines = explain(chosen, planner.profile(place.device.kind), place.device, (), ())
    if planner.forecasts(place).is_fallback(chosen.plan):
        lines = (*lines, "traced on a CPU in its place: this PyTorch cannot pretend to have such a device")
    return Decision(
        device=place.name,
        candidates=(chosen,),
        rejected=(*losers_of(ranked), *_not_compiled(planner, place, chosen, losers_of(ranked))),
        explanation=(*planner.prepared.notes, *lines, price_assumptions(chosen)),
        took_s=0.0,
        breakdown=_breakdown(planner, place, chosen),
    )


def _confirmed(planner: Planner, place: Place, only: Plan | None = None) -> Decision:
    """The plan that trials confirm, kept for the next start; with `only`, that one is tried and taken."""
    began = sample_cpu()
    search, untraced = planner.confirmed(place, only)
    found = search.chosen()
    others = planner.others_share() if place.device.kind == "cpu" else 0.0
    if others:
        found = dataclasses.replace(found, forecast=widen_for_load(found.forecast, others))
    chosen = priced(planner, place, found)
    lines = explain(
        chosen, planner.profile(place.device.kind), place.device, search.measured, search.rejected,
        is_given=only is not None,
    )  # fmt: skip
    if others:
        lines = (*lines, describe_load(others), *_words_on_threads(chosen.plan, others))
    if untraced:
        lines = (*lines, f"no forecast before the trials: {untraced}")
    rejected = search.losers()
    if only is None and not untraced:
        rejected = (*rejected, *_not_compiled(planner, place, chosen, rejected))
    decision = Decision(
        device=place.name,
        candidates=(chosen,),
        rejected=rejected,
        explanation=(*planner.prepared.notes, *lines, *describe_failures(planner, place), *describe_errors(place)),
        took_s=0.0,
        breakdown=None if untraced or only is not None else _breakdown(planner, place, chosen),
        others_share=others,
    )
    if only is None and not others and planner.device_mtbf_h is None:
        keep_decision(planner.prepared, place, decision, planner.coupling, began)
    return decision


def _words_on_threads(plan: Plan, others: float) -> tuple[str, ...]:
    """That a run begins with fewer threads than its plan has, where other processes use the cores."""
    cores = attached_cpu().cores
    free = free_cores(cores, others * cores)
    if free >= plan.threads or not may_give_up_threads(plan):
        return ()
    return (f"tried with {free} of {plan.threads} threads, and begun so: the rest join once the machine is quiet",)


def _breakdown(planner: Planner, place: Place, chosen: Candidate) -> Breakdown:
    """Where bytes and time of an update go, adding up to what is forecast."""
    found = planner.forecasts(place).breakdown(chosen.plan)
    return complete_breakdown(found, chosen.forecast, is_cpu=place.device.kind == "cpu")


def _not_compiled(
    planner: Planner, place: Place, chosen: Candidate, rejected: Sequence[Rejection]
) -> tuple[Rejection, ...]:
    """The chosen plan compiled, and why it was not taken; nothing where that is told of a compiled plan already."""
    if chosen.plan.compile or any(one.plan.compile for one in rejected):
        return ()
    plan = dataclasses.replace(chosen.plan, compile=True, captured=False)
    missing = planner.cannot_compile(place)
    reason = missing or why_not_compiled(chosen, planner.forecasts(place).forecast(plan))
    return (Rejection(device=chosen.device, plan=plan, reason=reason),)


def _advice(planner: Planner, chosen: Candidate) -> str:
    """For somebody with a model and this machine: is it enough, or what to rent?"""
    if chosen.forecast.total_s.value <= ENOUGH_S:
        return advice(chosen, ())
    try:
        return advice(chosen, _rentable(planner))
    except BadJob as problem:  # it runs here, and cannot be traced for elsewhere
        return f"What it would need elsewhere is unknown: {problem.message}."


def _rentable(planner: Planner) -> list[Candidate]:
    """The best plan for each device of the catalogue that somebody rents out."""
    found: list[Candidate] = []
    for place in planned_devices("all", ()):
        if price_of(place) is not None:
            with contextlib.suppress(DoesNotFit):
                found.append(on_one(planner, place).chosen)
    return found


def _unfit(planner: Planner, place: Place, problem: DoesNotFit) -> Rejection | None:
    """A device that is too small, with the plan that needs the least."""
    least = least_demanding(planner.profile(place.device.kind), place.device, planner.forecasts(place))
    return None if least is None else Rejection(device=place.name, plan=least, reason=problem.message)


def _fits_nowhere(planner: Planner, unfit: Sequence[tuple[Place, DoesNotFit]]) -> DoesNotFit:
    """The error where no place is large enough, with what would do."""
    words = "; ".join(f"{place.name}: {problem.message}" for place, problem in unfit)
    more = "Allow more memory (--memory). " if unfit[0][0].is_limited else ""
    try:
        if any(place.is_here for place, _ in unfit) and (rentable := _rentable(planner)):
            return DoesNotFit(words, remedy=more + rental_advice("see above", rentable))
        return fits_nowhere_error(planner, unfit)
    except BadJob as problem:  # it cannot be traced: nobody knows what it would need elsewhere
        return DoesNotFit(words, remedy=f"{more}What it would need elsewhere is unknown: {problem.message}.")


def _require_usable(plan: Plan, prepared: ResolvedJob, device: Device) -> None:
    """Refuse a plan made for another device or another kind of data."""
    if plan.device != device.torch_name:
        raise BadJob(
            f"the plan is for {plan.device}, but the job is to run on {device.torch_name}",
            remedy=f"Use --on {plan.device}, or make a plan with `stoker plan JOB --on {device.torch_name} --json`.",
        )
    if plan.loader == "workers" and prepared.data.train.is_in_memory:
        raise BadJob(
            f"the plan has {plan.num_workers} loader workers, but the data lie in memory: there is nothing to fetch",
            remedy='Use loader "memory" and num_workers 0.',
        )
    if plan.num_workers > 1 and prepared.data.train.data_class != "indexed":
        raise BadJob(
            f"the plan has {plan.num_workers} loader workers, but the data are a stream, which one reader reads",
            remedy='Use num_workers 1, or the loader "inline".',
        )


def given_plan(given: str | Path | Plan | None) -> Plan | None:
    """The plan of `--plan`: a Plan, or a file with one, with a decision, or with what `stoker plan --json` prints."""
    if given is None or isinstance(given, Plan):
        return given
    path = Path(given)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document.get("record") == "Decision":
            decision = records.from_json(document, Decision)
            if not decision.candidates:
                raise ValueError("it is a decision without candidates")
            return decision.chosen.plan
        return records.from_json(document, Plan)
    except FileNotFoundError:
        near = sorted(p.name for p in path.parent.glob("*.json")) if path.parent.is_dir() else []
        raise BadJob(f"there is no plan file {path}", remedy=nearest(path.name, near) if near else None) from None
    except (OSError, ValueError, AttributeError) as problem:
        raise BadJob(f"{path} holds no plan: {problem}",
                     remedy="Make one with `stoker plan JOB --json > FILE`.") from problem  # fmt: skip


def price_of(place: Place) -> Price | None:
    """The lowest price of an hour on demand; None for what is here, and where nobody is known to offer it."""
    return None if place.is_here else cheapest(place.name)


def priced(planner: Planner, place: Place, candidate: Candidate) -> Candidate:
    """The candidate with its energy, carbon dioxide and cost, as far as they are known."""
    forecast, price = candidate.forecast, price_of(place)
    pue = PUE_HERE if place.is_here else PUE_DATA_CENTRE
    try:
        energy = planner.forecasts(place).energy_kwh(candidate.plan, forecast, pue=pue)
    except BadJob:  # it cannot be traced, and is planned by trials alone
        energy = None
    return dataclasses.replace(
        candidate,
        price=price,
        forecast=dataclasses.replace(
            forecast,
            energy_kwh=energy,
            co2_kg=None if energy is None else co2_kg(energy, grid_of()),
            cost_usd=None if price is None else cost_usd(forecast.total_s, price),
        ),
    )


def price_assumptions(candidate: Candidate) -> str:
    """What its money, energy and carbon rest on, on one line."""
    pue = PUE_HERE if candidate.is_here else PUE_DATA_CENTRE
    return cost_assumptions(candidate.price, pue=pue, grid=grid_of())

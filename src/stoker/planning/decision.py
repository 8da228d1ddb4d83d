"""Choose device and plan: for a device that is here, confirmed by trials; among devices and layouts, by forecast."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from stoker import records
from stoker.devices import Place, attached_devices, catalogue, cheapest, planned_devices
from stoker.devices.cpu import CpuSample, attached_cpu, free_cores
from stoker.devices.hardware import mtbf_h
from stoker.errors import BadJob, DoesNotFit, NoDevice, nearest
from stoker.jobs import Entry, Job
from stoker.loading.order import generators_kept
from stoker.planning.explanation import describe_offload, describe_stand_in, explain, why_not_compiled
from stoker.planning.model.checkpoint_cost import settled
from stoker.planning.model.layout_forecast import local_profile
from stoker.planning.model.memory import largest_that_fits
from stoker.planning.model.objectives import ENOUGH_S, Objective, PlanLimits, advice, choose, rental_advice
from stoker.planning.model.run_forecast import complete_breakdown
from stoker.planning.model.shared_cpu import describe_load, widen_for_load
from stoker.planning.model.slices import length_in_s, sliced
from stoker.planning.multi_device import on_many
from stoker.planning.pinned_plan import plan_of, problem_with, words_of
from stoker.planning.plan_history import keep_decision, kept_decision
from stoker.planning.plan_ranking import SURE_ENOUGH, least_demanding
from stoker.planning.planner import (
    Planner,
    describe_errors,
    describe_failures,
    losers_of,
    may_give_up_threads,
    price_assumptions,
    with_costs,
)
from stoker.planning.resolved_job import ResolvedJob, resolve_job
from stoker.planning.safe_start import safe_plan, safe_start
from stoker.records import Breakdown, Candidate, Coupling, Decision, Device, Plan, Profile, Rejection
from stoker.units import Duration, format_bytes, parse_duration, parse_memory, parse_money

SAFE: Final = "safe"
"""What `--plan` takes in place of a file: the whole batch at once in full precision."""

STARTING_S = 120.0
"""Time to rent and start a machine, with Python, data and device [s]: a judgement."""

_Misfit = tuple[Place, DoesNotFit]
_MOST_PROBLEMS, _MOST_NAMES = 3, 10
"""Devices too small that are listed with their problems, and by name."""

_SAFE_SHARE = 0.9
"""A change of the job is proposed if it then needs at most this share of the device's memory."""


@generators_kept()
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
    slice: Duration | float | str | None = None,  # noqa: A002 - as of `train`
    entry: Entry | None = None,
    plan: Plan | str | Path | Sequence[str] | None = None,
    network: str | None = None,
    preempted_every: float | str | None = None,
) -> Decision:
    """Choose device and settings for `job`, and forecast what it needs there.

    Args:
        job: the job.
        on: devices to compare: `here`, `h100,l4,here`, or `all` of the catalogue. Plans for devices here are confirmed
            by short trials; for the rest nothing is run.
        max_cost: the most it may cost [USD]; a number, or `20usd`.
        deadline: the longest it may take [s]; a number, or `12h`.
        objective: what to minimise: `time`, `money` or `energy` (default: time; money if there is a deadline).
        memory: the most of a device's memory that may be used [bytes]; a number, or `6GB`.
        threads: the most threads on a CPU (default: OMP_NUM_THREADS if it is set, else one for each core).
        device_mtbf_h: mean time of one device between two failures [h]; None: that of `devices.hardware`.
        slice: the time that each process may take, at places that end jobs: also say how many slices the run takes.
        entry: the job file it came from.
        plan: forecast this one: a Plan, a file with one, or words such as `micro_batch=2 shards=8`. A plan that does
            not fit is forecast too: `probability_it_fits` says so. Devices that it does not suit are left out.
        network: between machines of devices elsewhere, and links within one: words such as `8x400gbit` or `domain=1`,
            or a TOML file; None: those of the vendor's machine.
        preempted_every: mean time after which a rented machine is taken away [s]; a number, or `6h`.

    Raises:
        BadJob: the job cannot be trained as it is, or `plan` is legal for it on none of the devices.
        DoesNotFit: no legal plan fits, or none keeps the limits.
        NoDevice: a word of `on` is unknown, or `here` has none.
    """
    limits = PlanLimits(
        max_cost_usd=parse_money(max_cost) if isinstance(max_cost, str) else max_cost,
        deadline_s=parse_duration(deadline) if isinstance(deadline, str) else deadline,
    )
    slice_s = None if slice is None else length_in_s(slice)
    started = time.perf_counter()
    places, unplanned = _places(on, network)
    places = tuple(place.limited_to(memory_limit(memory), most_threads(threads)) for place in places)
    planner = Planner(
        resolve_job(job, entry),
        is_all_elsewhere=not any(place.is_here for place in places),
        device_mtbf_h=require_mtbf(device_mtbf_h),
        preempted_s=preempted_s(preempted_every),
    )
    decision = compare(planner, places, limits, objective, plan)
    if unplanned:
        decision = dataclasses.replace(decision, explanation=(*decision.explanation, *unplanned))
    if plan is None and all(place.is_here and place.count == 1 for place in places):
        chosen = decision.chosen
        try:
            rentable = [] if chosen.forecast.total_s.value <= ENOUGH_S else _rentable(planner)
            text = advice(chosen, rentable)
        except BadJob as problem:  # it runs here, and cannot be traced for elsewhere
            text = f"What it would need elsewhere is unknown: {problem.message}."
        decision = dataclasses.replace(decision, advice=text)
    if slice_s is not None:
        decision = sliced(decision, slice_s)
    return dataclasses.replace(settled(decision), took_s=time.perf_counter() - started)


def require_mtbf(hours: float | None) -> float | None:
    """A mean time between failures [h], or None; raises BadJob if it is not positive and finite."""
    if hours is not None and not 0 < hours < math.inf:
        raise BadJob(f"device_mtbf_h must be a positive number of hours, got {hours}")
    return hours


def preempted_s(every: float | str | None) -> float | None:
    """The mean time between preemptions [s], or None; raises BadJob if it is not positive and finite."""
    value = parse_duration(every, "--preempted-every") if isinstance(every, str) else every
    if value is not None and not 0 < value < math.inf:
        raise BadJob(
            f"preempted_every must be a positive number of seconds, got {value}", remedy='Or a text such as "6h".'
        )
    return value


def _places(on: str, network: str | None = None) -> tuple[tuple[Place, ...], tuple[str, ...]]:
    """The places that `on` names, and why some of the catalogue are left out: they cannot be planned for.

    Raises:
        NoDevice: a word is unknown, or none of the devices can be planned for.
    """
    attached, words = attached_devices(), [word for word in on.split(",") if word.strip()]
    places: dict[str, Place] = {}
    problems: list[NoDevice] = []
    for word in words or [on]:
        try:
            places |= {place.name: place for place in planned_devices(word, attached, network=network)}
        except NoDevice as problem:
            if len(words) < 2 or not catalogue().find(word.strip().lower()):
                raise
            problems.append(problem)
    if not places:
        raise problems[0]
    return tuple(places.values()), tuple(problem.message for problem in problems)


def memory_limit(memory: float | str | None) -> float | None:
    """A limit of memory [bytes], or None; raises BadJob if it is not positive."""
    limit = parse_memory(memory) if isinstance(memory, str) else memory
    if limit is not None and not limit > 0:
        raise BadJob(f"memory must be a positive number of bytes, got {limit}", remedy='Or a text such as "6GB".')
    return limit


def most_threads(threads: int | None) -> int | None:
    """The most threads that may compute on the CPU here: as given, else OMP_NUM_THREADS; None: no limit.

    Raises:
        BadJob: it is below 1, or more than there are cores.
    """
    if threads is None:
        value = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
        return int(value) if value.isdigit() and int(value) > 0 else None
    cores = attached_cpu().cores
    if not 1 <= threads <= cores:
        raise BadJob(
            f"--threads {threads}: this process may use {cores} {'core' if cores == 1 else 'cores'}",
            remedy=f"Give a number from 1 to {cores}, or leave it out.",
        )
    return threads


def decide(
    prepared: ResolvedJob,
    where: Device | Place,
    only: Plan | Literal["safe"] | None = None,
    *,
    memory_bytes: float | None = None,
    threads: int | None = None,
    device_mtbf_h: float | None = None,
    begins_at_once: bool = False,
    cpu_before: CpuSample | None = None,
) -> tuple[Decision, Coupling]:
    """The plan to run on what is here: of one device confirmed by trials, now or earlier; of several by forecast.

    Args:
        prepared: the job.
        where: a device, or a place of one or several of a kind.
        only: this plan is taken; on one device it is tried first. "safe": the plan that is legal whatever the model, of
            which nothing is tried where a run may begin at once.
        memory_bytes: the most of a device's memory that may be used.
        threads: the most threads on a CPU; None: OMP_NUM_THREADS.
        device_mtbf_h: mean time of one device between two failures [h], if known.
        begins_at_once: a run begins under a safe plan where it may, and tries the others on its own updates.
        cpu_before: a sample of the CPU from a while ago; what others used since is left to them at once.

    Raises:
        BadJob: the job cannot be divided over so many processes, or `only` does not suit it.
        DoesNotFit: no legal plan fits.
    """
    place = where if isinstance(where, Place) else planned_devices(where.torch_name, (where,))[0]
    started, planner = time.perf_counter(), Planner(prepared, device_mtbf_h=device_mtbf_h)
    place = place.limited_to(memory_bytes, most_threads(threads))

    def made(decision: Decision) -> Decision:
        took_s = time.perf_counter() - started
        return dataclasses.replace(settled(decision), took_s=took_s, memory_limit_bytes=memory_bytes)

    if only == SAFE and place.count == 1 and (start := safe_start(prepared, place, cpu_before)) is not None:
        return made(dataclasses.replace(start[0], is_settled=True)), start[1]
    if only == SAFE:
        only = safe_plan(planner.profile(place.device.kind), place)
    elif only is not None:
        _require_usable(only, prepared, place.device)
    kept = None
    if place.count > 1:
        decision = on_many(planner, place, only)
    elif only is None and device_mtbf_h is None and (kept := kept_decision(prepared, place, planner.extents)):
        decision = kept[0]
    elif begins_at_once and only is None and (start := safe_start(prepared, place, cpu_before)) is not None:
        return made(start[0]), start[1]
    else:
        if planner.is_too_large_here is not None:
            with contextlib.suppress(NoDevice):  # of a device that the catalogue lacks trials alone can tell
                planner.ranked(place)  # says what it needs
        decision = _confirmed(planner, place, only)
    return made(decision), planner.coupling if kept is None else kept[1]


def compare(
    planner: Planner,
    places: Sequence[Place],
    limits: PlanLimits,
    objective: Objective | None,
    only: Plan | str | Path | Sequence[str] | None = None,
) -> Decision:
    """The best plan for each place, the best place first; with `only`, that plan at each of them.

    Raises:
        DoesNotFit: the job fits on none of them, or none keeps the limits.
    """
    choices: dict[str, _Choice] = {}
    unfit: list[_Misfit] = []
    unusable: list[tuple[Place, BadJob]] = []
    for place in places:
        try:
            pinned = None if only is None else _pinned(only, place, planner.profile_at(place))
            choices[place.name] = _choice(planner, place, pinned)
        except DoesNotFit as problem:
            unfit.append((place, problem))
        except BadJob as problem:  # a job that cannot use several devices may use one, and a given plan suit another
            if len(places) == 1 or (only is None and place.count == 1):
                raise
            unusable.append((place, problem))
    left_out = [f"{place.name} is left out: {problem.message}" for place, problem in unusable]
    if not choices and not unfit:
        first = unusable[0][1]
        if len({problem.message for _, problem in unusable}) == 1:
            raise first
        raise BadJob("; ".join(left_out), remedy=first.remedy)
    if not choices:
        raise _fits_nowhere(planner, unfit)
    chosen = [choice.chosen for choice in choices.values()]
    # Elsewhere the memory of a GPU's host is not known: what is kept there comes after all that fits on devices.
    firm = [one for one in chosen if one.is_here or not one.plan.uses_host_memory]
    ranked, beyond = choose(firm or chosen, limits, objective)
    ranked = (*ranked, *(one for one in chosen if firm and one not in firm))
    best = choices[ranked[0].device].explained()
    if len(places) == 1:  # of several devices: the other layouts
        ranked = (ranked[0], *best.candidates[1:])
    too_small = []
    for place, error in unfit:  # on several devices no one plan needs the least
        if place.count == 1 and (least := _least(planner, place)) is not None:
            too_small.append(Rejection(device=place.name, plan=least, reason=error.message))
    lines = (*best.explanation, *describe_misfits(unfit), *left_out)
    are_short = all(c.forecast.total_s.value < STARTING_S for c in ranked if not c.is_here)
    if len(ranked) > 1 and not ranked[0].is_here and are_short:
        lines = (*lines, "any of these will do: training takes less time than renting and starting a machine")
    return dataclasses.replace(
        best, candidates=ranked, rejected=(*beyond, *too_small, *best.rejected), explanation=lines
    )


def on_one(planner: Planner, place: Place) -> Decision:
    """The best plan for one place: confirmed by trials if it is here, else by forecast.

    Raises:
        DoesNotFit: no legal plan fits.
    """
    return _choice(planner, place, None).explained()


@dataclass(frozen=True)
class _Choice:
    """The plan for a place, and what makes its decision: of many places only the best one's is read."""

    chosen: Candidate
    explained: Callable[[], Decision]


def _choice(planner: Planner, place: Place, only: Plan | None) -> _Choice:
    """As `on_one`; of `only`, if it is given.

    Raises:
        BadJob: `only` is not legal for the job.
    """
    if only is not None:
        profile = planner.profile_at(place)
        problem = problem_with(only, profile, place.device, local_profile(profile, only.layout))
        if problem is not None:
            raise BadJob(f"the plan is not legal: {problem}")
    is_on_many = place.count > 1 or (only is not None and only.layout.world_size > 1)
    if is_on_many or (place.is_here and planner.is_too_large_here is None):
        decision = on_many(planner, place, only) if is_on_many else _confirmed(planner, place, only)
        return _Choice(decision.chosen, lambda: decision)
    if only is not None:
        forecast = planner.forecasts(place).forecast(only)
        ranked: tuple[Candidate, ...] = (
            Candidate(
                device=place.name,
                plan=only,
                forecast=forecast,
                memory_bytes=place.device.memory_bytes,
                is_here=place.is_here,
            ),
        )
    else:
        ranked = planner.ranked(place)
    why = "by forecast" if only is None else "as asked"
    chosen = dataclasses.replace(
        with_costs(place, ranked[0], planner.forecasts(place), planner.price_at(place)), why=why
    )
    return _Choice(chosen, lambda: _by_forecast(planner, place, chosen, ranked, is_given=only is not None))


def _by_forecast(
    planner: Planner, place: Place, chosen: Candidate, ranked: tuple[Candidate, ...], *, is_given: bool
) -> Decision:
    """The decision for a device elsewhere on `chosen`, the first of `ranked`."""
    lines = explain(chosen, planner.profile(place.device.kind), place.device, (), ())
    lines = (*lines, *describe_stand_in(planner.forecasts(place), chosen.plan))
    lines = (*lines, *_describe_offload(planner, place, chosen, is_given=is_given))
    losers = losers_of(ranked)
    return Decision(
        device=place.name,
        candidates=(chosen,),
        rejected=() if is_given else (*losers, *_not_compiled(planner, place, chosen, losers)),
        explanation=(*planner.prepared.notes, *lines, price_assumptions(chosen)),
        took_s=0.0,
        breakdown=_breakdown(planner, place, chosen),
    )


def _confirmed(planner: Planner, place: Place, only: Plan | None = None) -> Decision:
    """The plan that trials confirm, stored for the next start; with `only`, that plan is tried and taken."""
    if only is not None and only.uses_host_memory:
        with contextlib.suppress(BadJob):  # it cannot be traced: the trial decides
            _require_host_memory(planner, place, only)
    search, untraced = planner.confirmed(place, only)
    best = search.chosen()
    others = planner.others_share() if place.device.kind == "cpu" else 0.0
    if others:
        best = dataclasses.replace(best, forecast=widen_for_load(best.forecast, others))
    chosen = with_costs(place, best, planner.forecasts(place), planner.price_at(place))
    lines = explain(
        chosen,
        planner.profile(place.device.kind),
        place.device,
        search.measured,
        search.rejected,
        is_given=only is not None,
    )
    if others:
        lines = (*lines, describe_load(others))
        threads, cores = chosen.plan.threads, attached_cpu().cores
        if (free := free_cores(cores, others * cores)) < threads and may_give_up_threads(chosen.plan):
            line = f"tried with {free} of {threads} threads, and begun so: the rest join once the machine is quiet"
            lines = (*lines, line)
    if only is None and not untraced:
        lines = (*lines, *_describe_offload(planner, place, chosen, is_given=False))
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
    if only is None and planner.device_mtbf_h is None:
        keep_decision(planner.prepared, place, decision, planner.coupling)
    return decision


def _require_host_memory(planner: Planner, place: Place, plan: Plan) -> None:
    """Raise DoesNotFit where this machine's memory does not hold what a plan offloads: trying it would exhaust it."""
    if (problem := planner.forecasts(place).host_problem(plan)) is not None:
        raise DoesNotFit(problem, remedy="Take a machine with more memory, or a smaller model.")


def _describe_offload(planner: Planner, place: Place, chosen: Candidate, *, is_given: bool) -> tuple[str, ...]:
    """Why the optimiser or activations are on the host, and what they take there; none where they are not."""
    if not chosen.plan.uses_host_memory:
        return ()
    forecasts, profile = planner.forecasts(place), planner.profile_at(place)
    least = None if is_given else least_demanding(profile, place.device, forecasts, is_offloaded=False)
    needed = None if least is None else forecasts.needed_bytes(least)
    return describe_offload(forecasts, chosen.plan, place.device, needed)


def _breakdown(planner: Planner, place: Place, chosen: Candidate) -> Breakdown:
    """Parts of an update's memory and time, which add up to the forecast."""
    traced = planner.forecasts(place).breakdown(chosen.plan)
    return complete_breakdown(traced, chosen.forecast, is_cpu=place.device.kind == "cpu")


def _not_compiled(
    planner: Planner, place: Place, chosen: Candidate, rejected: Sequence[Rejection]
) -> tuple[Rejection, ...]:
    """The chosen plan compiled, and why it was not taken; empty if a compiled plan is chosen or rejected already.

    Empty for an offloaded one, too, which is never compiled.
    """
    if chosen.plan.compile or chosen.plan.uses_host_memory or any(rejection.plan.compile for rejection in rejected):
        return ()
    plan = dataclasses.replace(chosen.plan, compile=True, captured=False)
    missing = planner.cannot_compile(place)
    reason = missing or why_not_compiled(chosen, planner.forecasts(place).forecast(plan))
    return (Rejection(device=chosen.device, plan=plan, reason=reason),)


def _rentable(planner: Planner) -> list[Candidate]:
    """The best plan for each device of the catalogue that has a price."""
    candidates: list[Candidate] = []
    for place in planned_devices("all", ()):
        if cheapest(place.name) is not None:
            with contextlib.suppress(DoesNotFit):
                candidates.append(_choice(planner, place, None).chosen)
    return candidates


def describe_misfits(unfit: Sequence[_Misfit]) -> tuple[str, ...]:
    """One line on the devices that are too small, with the problem of the largest; none without such."""
    if not unfit:
        return ()
    largest, problem = max(unfit, key=_all_memory_bytes)
    names = ", ".join(place.name for place, _ in unfit)
    if len(unfit) > _MOST_NAMES:
        names = f"{len(unfit)} of these devices, the largest of them {largest.name}"
    return (f"it does not fit on {names}: {problem.message}",)


def _all_memory_bytes(misfit: _Misfit) -> int:
    """Memory of all devices of a place together [bytes]."""
    return misfit[0].count * misfit[0].memory_bytes_each


def _fits_nowhere(planner: Planner, unfit: Sequence[_Misfit]) -> DoesNotFit:
    """The error if no place is large enough, with the device or the change of the job that would do."""
    problems = "; ".join(f"{place.name}: {problem.message}" for place, problem in unfit)
    largest, too_small = max(unfit, key=_all_memory_bytes)
    more = "Allow more memory (--memory). " if largest.is_limited else ""
    if largest.count > 1 and not largest.is_shared:  # what is too much for several is too much for one
        return DoesNotFit(problems, remedy=f"{more}Take more devices, or ones with more memory.")
    try:
        if any(place.is_here for place, _ in unfit) and (rentable := _rentable(planner)):
            return DoesNotFit(problems, remedy=more + rental_advice("see above", rentable))
        if (least := _least(planner, largest)) is None:
            return too_small  # its groups are larger than its batch, wherever it runs
        remedy = f"{more}{_larger_device(planner)} {_smaller_job(planner, largest, least)}"
        if len(unfit) > _MOST_PROBLEMS:
            problems = (
                f"none of the {len(unfit)} devices is large enough. The largest, {largest.name}: {too_small.message}"
            )
        return DoesNotFit(problems, remedy=remedy)
    except (BadJob, NoDevice) as problem:  # it cannot be traced: its memory elsewhere is unknown
        return DoesNotFit(problems, remedy=f"{more}What it would need elsewhere is unknown: {problem.message}.")


def _larger_device(planner: Planner) -> str:
    """The smallest GPU of the catalogue on which the job fits, of those that have memory for its weights."""
    gpus = (place for place in planned_devices("all", ()) if place.device.kind == "cuda")
    places = sorted(gpus, key=lambda place: place.device.memory_bytes)
    profile = planner.profile("cuda")
    weights = profile.parameter_bytes / (1 if profile.offload_problem else 2)  # which may be bf16 alone
    for place in (place for place in places if place.device.memory_bytes > weights):
        least = _least(planner, place)
        if least is not None and planner.forecasts(place).probability_it_fits(least) >= SURE_ENOUGH:
            return f"The smallest GPU that does it is {_name_and_memory(place)}."
    return f"No one GPU of the catalogue does it; the largest is {_name_and_memory(places[-1])}."


def _smaller_job(planner: Planner, place: Place, least: Plan) -> str:
    """The change of the job that makes it fit on `place`: smaller groups if samples are coupled, else fewer weights.

    Sizes tried are the group's halvings.
    """

    @functools.cache
    def needed_bytes(group: int) -> float:
        job = dataclasses.replace(planner.prepared.job, coupling_group=group)
        changed = Planner(dataclasses.replace(planner.prepared, job=job))
        changed.coupling = dataclasses.replace(planner.coupling, group=group)
        return changed.forecasts(place).needed_bytes(dataclasses.replace(least, micro_batch=group))

    whole = least.micro_batch
    sizes = [whole // 2**k for k in range(1, whole.bit_length())] if planner.coupling.group is not None else []
    group = largest_that_fits(sizes, lambda size: needed_bytes(size) <= _SAFE_SHARE * place.device.memory_bytes)
    if group is None:
        return f"Or train a smaller model: a micro-batch of {whole} is the least that is legal."
    return (
        f"Or change what is learned: with Job(coupling_group={group}) it needs about "
        f"{format_bytes(needed_bytes(group))} of {place.name}."
    )


def _least(planner: Planner, place: Place) -> Plan | None:
    return least_demanding(planner.profile(place.device.kind), place.device, planner.forecasts(place))


def _name_and_memory(place: Place) -> str:
    return f"{place.name} ({format_bytes(place.device.memory_bytes)})"


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


def _pinned(only: Plan | str | Path | Sequence[str], place: Place, profile: Profile) -> Plan:
    """The plan that `only` pins, for the kind of device of `place`."""
    if isinstance(only, str) and "=" not in only:
        only = Path(only)
    if isinstance(only, Plan | Path):
        given = given_plan(only)
        assert given is not None, "something was given"
        plan = safe_plan(profile, place) if given == SAFE else given
        return dataclasses.replace(
            plan, device=place.device.torch_name, device_mtbf_h=mtbf_h(place.device.kind, profile.device_mtbf_h)
        )
    words = [only] if isinstance(only, str) else list(only)
    if len(words) == 1 and "=" not in words[0]:
        return _pinned(words[0], place, profile)
    return dataclasses.replace(
        plan_of(words_of(words), place, profile), device_mtbf_h=mtbf_h(place.device.kind, profile.device_mtbf_h)
    )


def given_plan(given: str | Path | Plan | None) -> Plan | Literal["safe"] | None:
    """The plan of `--plan`: a Plan; a file with a Plan, or a Decision, as of `stoker plan --json`; or `safe`.

    Raises:
        BadJob: there is no such file, or it holds no plan.
    """
    if given is None or isinstance(given, Plan):
        return given
    if str(given) == SAFE:
        return SAFE
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
        remedy = nearest(path.name, near) if near else None
        if "=" in path.name:
            remedy = f"`stoker plan` makes one of such words: `stoker plan JOB --plan {path.name} --json > FILE`."
        raise BadJob(f"there is no plan file {path}", remedy=remedy) from None
    except (OSError, ValueError, AttributeError) as problem:
        raise BadJob(
            f"{path} holds no plan: {problem}", remedy="Make one with `stoker plan JOB --json > FILE`."
        ) from problem

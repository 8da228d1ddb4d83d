"""A job under planning: its coupling, its traces, and on each device the plans ranked by forecast or confirmed here.

How fast this machine's CPU is while a plan is made, beside when `stoker doctor` measured it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Sequence
from datetime import UTC, datetime

import torch

from stoker.devices import Place, cache_key, installed_torch, sample_cpu
from stoker.devices.cpu import attached_cpu, free_cores
from stoker.devices.malloc import give_back, resident_bytes
from stoker.errors import BadJob, DoesNotFit, RunFailed
from stoker.planning.job_traces import TraceBook
from stoker.planning.model.run_forecast import Extents, Needs, TracedForecasts
from stoker.planning.model.shared_cpu import describe_pace, pace_of
from stoker.planning.plan_history import (
    OomAwareForecasts,
    describe_past_errors,
    known_failures,
    not_ruled_out,
    used_by_others,
)
from stoker.planning.plan_ranking import SURE_ENOUGH, Forecasts, has_plenty, least_demanding, rank, untraced_candidates
from stoker.planning.plan_search import PlanSearch
from stoker.planning.resolved_job import ResolvedJob, users_code
from stoker.profiling.ceilings import Turn, measure_anchors
from stoker.profiling.job_profile import fetch_seconds, job_profile
from stoker.profiling.plan_trial import try_plan
from stoker.records import (
    FULL_PRECISIONS,
    Calibration,
    Candidate,
    Coupling,
    Hardware,
    Measurement,
    MicroBenchmark,
    Pace,
    Plan,
    Profile,
    Rejection,
)
from stoker.records.plan import OutOfMemory
from stoker.stepping.coupling import coupling_by_types, find_coupling
from stoker.stepping.model import bytes_of
from stoker.stepping.torch_compile import compiler_missing
from stoker.store import cache_root, calibration_log, operations_cache
from stoker.units import MIB, Duration, format_bytes

TRIAL_S = 1.0
"""Seconds of training in one trial of a plan, beyond its first update."""

_PROBED_FOR_ELSEWHERE = 64 * MIB
"""Weights of a model that is probed here though no place named is here: a second or two for knowing its coupling."""

_PROBE_COPIES = 6
"""A probe holds about so many copies of the weights: the model, its gradients, what they are compared with."""


_Where = tuple[str, int]
"""A place by its name and its memory [bytes], of which only a part may be allowed."""


class Planner:
    """What is known of a job before it runs; each fact is found when first asked for."""

    def __init__(
        self, prepared: ResolvedJob, *, is_all_elsewhere: bool = False, device_mtbf_h: float | None = None
    ) -> None:
        self.prepared, self._is_all_elsewhere, self.device_mtbf_h = prepared, is_all_elsewhere, device_mtbf_h
        self._began = sample_cpu()
        self._profiles: dict[str, Profile] = {}
        self._forecasts: dict[_Where, TracedForecasts] = {}
        self._failures: dict[_Where, tuple[OutOfMemory, ...]] = {}
        self._heedings: dict[_Where, Forecasts] = {}

    @functools.cached_property
    def is_too_large_here(self) -> str | None:
        """Why the model is not run on this machine's CPU, not even to probe it; None where it is."""
        weights, there = bytes_of(self.prepared.model.parameters()), attached_cpu().memory_bytes
        if self._is_all_elsewhere and weights > _PROBED_FOR_ELSEWHERE:
            return "nothing so large is run here to plan it for elsewhere"
        if not there or _PROBE_COPIES * weights <= there:
            return None
        return f"its weights take {format_bytes(weights)}, this machine has {format_bytes(there)}"

    @functools.cached_property
    def coupling(self) -> Coupling:
        """How samples influence each other: probed, or by types where the model is too large to be probed here."""
        prepared = self.prepared
        if self.is_too_large_here is not None:
            return coupling_by_types(prepared.job, prepared.model, self.is_too_large_here)
        with users_code("the model or the loss", prepared.entry):
            return find_coupling(prepared.job, prepared.data.train)

    @functools.cached_property
    def fetch_s(self) -> float:
        """What one process takes to fetch a sample that is not in memory [s], measured here."""
        with users_code("fetching samples", self.prepared.entry):
            return fetch_seconds(self.prepared.data.train)

    @functools.cached_property
    def needs(self) -> Needs:
        """What the job's updates need."""
        return Needs(TraceBook(self.prepared, self.coupling))

    def profile(self, kind: str) -> Profile:
        """The job's facts, for devices of this kind."""
        prepared = self.prepared
        if kind not in self._profiles:
            found = job_profile(prepared.job, prepared.data, self.coupling, prepared.model, device_kind=kind)
            self._profiles[kind] = dataclasses.replace(found, device_mtbf_h=self.device_mtbf_h)
        return self._profiles[kind]

    def extents(self, samples_per_s: float) -> Extents:
        """How much there is to do; a budget of seconds is turned into samples by the rate."""
        prepared = self.prepared
        updates = self.total_updates(samples_per_s)
        every = prepared.job.evaluate_every
        evaluations = 0 if prepared.data.valid is None else prepared.extent.evaluations(every, updates) + 1
        return Extents(
            total_samples=prepared.extent.position(updates).samples, total_updates=updates, evaluations=evaluations
        )

    def total_updates(self, samples_per_s: float) -> int:
        """Updates of the whole run."""
        until = self.prepared.job.until
        if until.unit == "seconds":
            until = Duration(max(1.0, until.value * samples_per_s), "samples")
        return self.prepared.extent.updates_in(until)

    def forecasts(self, place: Place) -> TracedForecasts:
        """Forecasts of plans on `place`, which need not be here."""
        if _where(place) not in self._forecasts:
            self._forecasts[_where(place)] = TracedForecasts(
                self.profile(place.device.kind), functools.partial(measured_hardware, place), self.needs, self.extents,
                calibrations=[c for c in calibrations_of(place) if c.basis != "measured here"],
                fetch_s=self.fetch_s,
                held_bytes=resident_bytes() if place.device.kind == "cpu" else 0,
            )  # fmt: skip
        return self._forecasts[_where(place)]

    def ranked(self, place: Place) -> tuple[Candidate, ...]:
        """Plans for `place`, the fastest first, by forecast.

        Raises:
            BadJob: the model cannot be traced.
            DoesNotFit: no legal plan fits.
        """
        with users_code("the model or the loss", self.prepared.entry):
            return rank(
                self.profile(place.device.kind), place.device, self._heeding(place), name=place.name,
                is_here=place.is_here, is_limited=place.is_limited, can_compile=self.cannot_compile(place) is None,
            )  # fmt: skip

    def failures(self, place: Place) -> tuple[OutOfMemory, ...]:
        """Plans of this job that ran out of memory on such a device while they trained."""
        if _where(place) not in self._failures:
            self._failures[_where(place)] = known_failures(self.prepared, place)
        return self._failures[_where(place)]

    def _heeding(self, place: Place) -> Forecasts:
        """Forecasts under which what ran out of memory does not fit; where nothing else would, it is tried again."""
        if _where(place) not in self._heedings:
            self._heedings[_where(place)] = self._made_heeding(place)
        return self._heedings[_where(place)]

    def _made_heeding(self, place: Place) -> Forecasts:
        forecasts, device = self.forecasts(place), place.device
        failures = self.failures(place)
        if not failures:
            return forecasts
        heeding = OomAwareForecasts(forecasts, failures, device.torch_name)
        least = least_demanding(self.profile(device.kind), device, forecasts)
        return forecasts if least is None or heeding.probability_it_fits(least) == 0 else heeding

    def cannot_compile(self, place: Place) -> str | None:
        """What a compiled plan would need and this machine lacks; None where nothing does, or for what is elsewhere."""
        return compiler_missing(torch.device(place.device.torch_name)) if place.is_here else None

    def confirmed(self, place: Place, only: Plan | None = None) -> tuple[PlanSearch, str]:
        """The search among plans for a place that is here, its trials done, and why it had no forecasts, if so.

        Raises:
            BadJob, DoesNotFit: nothing can be trained here.
        """
        facts = self.profile(place.device.kind)
        candidates, problem = self._candidates(place, only)
        search = PlanSearch(candidates, facts, place.device, self.extents)
        are_forecast = only is None and not problem
        with users_code("the model or the loss", self.prepared.entry):
            self._try_promising(search, place, are_forecast=are_forecast)
            doubtful = search.in_doubt()
            for plan in doubtful:
                self._tried(search, plan)
            if doubtful:  # what they took this time may make others worth a trial
                self._try_promising(search, place, are_forecast=are_forecast)
        return search, problem

    def _try_promising(self, search: PlanSearch, place: Place, *, are_forecast: bool) -> None:
        """Try plans until none is expected to pay back its trial; of those that were forecast more is known before."""
        while (plan := search.next_plan()) is not None:
            if are_forecast and (lack := self._lack_of_memory(place, plan, search.candidates)) is not None:
                search.reject(plan, lack, for_memory=True)
                continue
            found = self._tried(search, plan)
            if found and found.compile_s and found.not_compiled is None and are_forecast:
                self._remember_compiling(place, found)

    def _lack_of_memory(self, place: Place, plan: Plan, candidates: Sequence[Candidate]) -> str | None:
        """Why a plan is not even tried: it is forecast to need more memory than may be used. None where it is not.

        Plans that were ranked fit; of the others, which are guesses, nobody has asked. Where there is plenty, nobody
        need: a trace takes longer than a trial.
        """
        if not self.failures(place) and has_plenty(plan, candidates, place.device):
            return None
        forecasts = self._heeding(place)
        try:
            if forecasts.probability_it_fits(plan) >= SURE_ENOUGH:
                return None
        except BadJob:  # what cannot be traced, its trial tells
            return None
        needed, there = forecasts.needed_bytes(plan), place.device.memory_bytes
        return f"it is forecast to need {format_bytes(needed)} of memory, and may take {format_bytes(there)}"

    def _tried(self, search: PlanSearch, plan: Plan) -> Measurement | None:
        """Try a plan and tell the search; None where it cannot be used.

        Raises:
            BadJob: the run's own first updates fail as they were written, in fp32.
        """
        job, data, known = self.prepared.job, self.prepared.data, search.known_gradient_error(plan)
        try:
            found = try_plan(
                job,
                plan,
                self.coupling,
                data,
                budget_s=TRIAL_S,
                known_error=known,
                most_threads=self._free_threads(plan),
            )
        except DoesNotFit as error:
            search.reject(plan, str(error), for_memory=True)
        except RunFailed as error:
            if plan.precision in FULL_PRECISIONS and not (plan.captured or plan.compile):
                raise BadJob(error.message, remedy=error.remedy) from error
            search.reject(plan, error.message)
        else:
            search.record(found)
            return found
        finally:
            give_back()  # what one trial had of the heap is not to be counted as the next one's, or the run's
        return None

    def others_share(self) -> float:
        """What other processes used of the CPU since planning began [0 to 1]; 0 where it is too little to matter."""
        return used_by_others(self._began)

    def _free_threads(self, plan: Plan) -> int | None:
        """How many threads a trial may compute with: those that other processes leave, as a run would begin."""
        if plan.device != "cpu" or not may_give_up_threads(plan):
            return None
        cores = attached_cpu().cores
        return free_cores(cores, self.others_share() * cores)

    def _remember_compiling(self, place: Place, found: Measurement) -> None:
        """Keep what compiling took beside its forecast, for the next plan."""
        expected = self.forecasts(place).update(found.plan).compile_s
        build = installed_torch()
        if expected is None or build is None:
            return
        calibration = Calibration(
            device_model=place.device.model, torch_version=build.version, run=self.prepared.spec.name,
            quantity="compile_s", forecast=expected.value, measured=found.compile_s,
            at=datetime.now(UTC).isoformat(timespec="seconds"), basis=expected.basis,
        )  # fmt: skip
        with contextlib.suppress(RunFailed):  # a cache that cannot be written makes the next forecast less certain
            calibration_log(cache_root()).append(calibration)

    def _candidates(self, place: Place, only: Plan | None) -> tuple[tuple[Candidate, ...], str]:
        """Plans to try on a place that is here, the likeliest first, and why there is no forecast of any, if so."""
        facts = self.profile(place.device.kind)
        if only is not None:
            return untraced_candidates(facts, place.device, name=place.name, plans=(only,)), ""
        try:
            ranked = self.ranked(place)
        except BadJob as error:
            plans = untraced_candidates(facts, place.device, name=place.name)
            return not_ruled_out(plans, self.failures(place)) or plans, error.message
        others = untraced_candidates(facts, place.device, name=place.name, after=ranked)
        return (*ranked, *not_ruled_out(others, self.failures(place))), ""


def _where(place: Place) -> _Where:
    return place.name, place.device.memory_bytes


def calibrations_of(place: Place) -> tuple[Calibration, ...]:
    """Forecasts and measurements of earlier runs on a device of this model."""
    return calibration_log(cache_root()).read(device_model=place.device.model)


def describe_errors(place: Place) -> tuple[str, ...]:
    """One line on how far forecasts have been off on this device, before trials and after them, if any were.

    And one where the device, which is here, runs at another pace than when it was measured.
    """
    pace = measured_hardware(place, None).pace
    return (*describe_past_errors(calibrations_of(place)), *(describe_pace(pace) if pace else ()))


def describe_failures(planner: Planner, place: Place) -> tuple[str, ...]:
    """One line for each size of micro-batch that ran out of memory on this device in earlier runs of the job."""
    by_size = {one.plan.micro_batch: one for one in planner.failures(place)}
    return tuple(
        f"micro-batch {size} is not proposed: it ran out of memory here in {one.run} ({one.at[:10]})"
        for size, one in sorted(by_size.items())
    )


def measured_hardware(place: Place, threads: int | None) -> Hardware:
    """A place's figures, with the times of operations if `stoker doctor` measured them here.

    A CPU is measured on one thread and on all cores; of numbers in between nothing better is known than of all. It is
    looked at again now, since its speed changes from hour to hour.
    """
    build, whole = installed_torch(), place.hardware.device  # which has all cores, however few threads are allowed
    if not place.is_here or build is None:
        return place.hardware
    cache, key = operations_cache(cache_root()), cache_key(whole, build.version)
    if place.device.kind != "cpu" or threads is None:
        return _at_its_pace(dataclasses.replace(place.hardware, benchmark=cache.read(key)))
    some = cache.read(key, f"{threads} threads")
    share = threads / max(1, whole.cores)
    hardware = dataclasses.replace(
        place.hardware,
        device=dataclasses.replace(place.device, cores=threads),
        dense_flops={dtype: rate * share for dtype, rate in place.hardware.dense_flops.items()},
        benchmark=some or cache.read(key),
    )
    return _at_its_pace(hardware)


def _at_its_pace(hardware: Hardware) -> Hardware:
    """With how fast it is now, where it was measured before."""
    benchmark = hardware.benchmark
    return hardware if benchmark is None else dataclasses.replace(hardware, pace=pace_now(benchmark))


def losers_of(ranked: tuple[Candidate, ...]) -> tuple[Rejection, ...]:
    """The plans behind the first of a device, with what they lose by."""
    best = ranked[0]
    return tuple(
        Rejection(
            device=c.device, plan=c.plan,
            reason=f"{best.forecast.samples_per_s.value / c.forecast.samples_per_s.value:.2f}x the time, by forecast",
        )
        for c in ranked[1:]
    )  # fmt: skip


def may_give_up_threads(plan: Plan) -> bool:
    """Whether a run under `plan` may compute with fewer threads while other processes use the CPU."""
    return not plan.compile and not torch.are_deterministic_algorithms_enabled()


_HOLDS_S = 300.0
"""For so long one look has to do [s]: plans of one job are compared at one pace."""


def pace_now(benchmark: MicroBenchmark) -> Pace | None:
    """The pace of the CPU that `benchmark` was measured on, which is here, with as many threads; half a second.

    None where nothing was kept to compare with, as by earlier versions.
    """
    if benchmark.device.kind != "cpu" or not benchmark.anchors_s:
        return None
    return pace_of(benchmark.anchors_s, _turns_now(benchmark.threads, int(time.monotonic() / _HOLDS_S)))


@functools.lru_cache(maxsize=16)
def _turns_now(threads: int, period: int) -> tuple[Turn, ...]:  # noqa: ARG001 - `period` is there to be looked up by
    return measure_anchors(threads=threads)

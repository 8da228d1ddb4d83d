"""The planner of one job: its coupling, traces and forecasts, and on each device its plans, ranked or tried."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Sequence
from datetime import UTC, datetime

import torch

from stoker.activity import doing
from stoker.devices import (
    HOST_SHARE,
    PUE_DATA_CENTRE,
    PUE_HERE,
    Place,
    cache_key,
    cheapest,
    installed_torch,
    sample_cpu,
)
from stoker.devices.cpu import attached_cpu, free_cores
from stoker.devices.hardware import PREEMPTED_S, hardware_of, mtbf_h, restart_s
from stoker.devices.malloc import give_back, resident_bytes
from stoker.errors import BadJob, DoesNotFit, NoDevice, RunFailed
from stoker.loading.order import generators_kept
from stoker.planning.divided_job import DividedJob
from stoker.planning.job_traces import TraceBook
from stoker.planning.model.objectives import co2_kg, cost_assumptions, cost_usd
from stoker.planning.model.run_forecast import MOST_KEPT_OF_ONE, Extents, Needs, TracedForecasts
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
from stoker.profiling.job_profile import block_names, fetch_seconds, job_profile
from stoker.profiling.micro_benchmark import host_seconds
from stoker.profiling.plan_trial import try_plan
from stoker.records import (
    FULL_PRECISIONS,
    Calibration,
    Candidate,
    Coupling,
    Hardware,
    Layout,
    Measurement,
    MicroBenchmark,
    Pace,
    Plan,
    Price,
    Profile,
    Rejection,
)
from stoker.records.plan import OutOfMemory
from stoker.stepping.coupling import coupling_by_types, find_coupling
from stoker.stepping.model import bytes_of
from stoker.stepping.step_failures import ran_out_of_memory
from stoker.stepping.torch_compile import compiler_missing
from stoker.store import cache_root, calibration_log, operations_cache, operations_key
from stoker.units import MIB, Duration, format_bytes

TRIAL_S = 1.0
"""Training in one trial of a plan, beyond its first update [s]."""

_PROBED_FOR_ELSEWHERE = 64 * MIB
"""Weights [bytes] up to which a model is probed here though no place named is here: takes a second or two."""

_PROBE_COPIES = 6
"""A probe holds about so many copies of the weights: the model, its gradients, what they are compared with."""


_Where = tuple[str, int]
"""Name of a place, and its memory that may be used [bytes]."""


class Planner:
    """Facts of a job before it runs, each computed on first use."""

    def __init__(
        self,
        prepared: ResolvedJob,
        *,
        is_all_elsewhere: bool = False,
        device_mtbf_h: float | None = None,
        preempted_s: float | None = None,
    ) -> None:
        self.prepared, self._is_all_elsewhere, self.device_mtbf_h = prepared, is_all_elsewhere, device_mtbf_h
        self._preempted_s = preempted_s
        self._began = sample_cpu()
        self._profiles: dict[str, Profile] = {}
        self._forecasts: dict[_Where, TracedForecasts] = {}
        self._failures: dict[_Where, tuple[OutOfMemory, ...]] = {}
        self._oom_aware: dict[_Where, Forecasts] = {}
        self._calibrations: dict[str, tuple[Calibration, ...]] = {}

    @functools.cached_property
    def is_too_large_here(self) -> str | None:
        """Why the model is not run on this machine's CPU, not even to probe it; None if it is."""
        weights, memory_bytes = bytes_of(self.prepared.model.parameters()), attached_cpu().memory_bytes
        if self._is_all_elsewhere and weights > _PROBED_FOR_ELSEWHERE:
            return "nothing so large is run here to plan it for elsewhere"
        if not memory_bytes or _PROBE_COPIES * weights <= memory_bytes:
            return None
        return f"its weights take {format_bytes(weights)}, this machine has {format_bytes(memory_bytes)}"

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
        """Time in which one process fetches a sample that is not in memory [s], measured here."""
        with users_code("fetching samples", self.prepared.entry):
            return fetch_seconds(self.prepared.data.train)

    @functools.cached_property
    def needs(self) -> Needs:
        """The needs of the job's updates."""
        book = TraceBook(self.prepared, self.coupling)
        return Needs(book, block_names(self.prepared.model), most_kept=MOST_KEPT_OF_ONE)

    @functools.cached_property
    def divided_job(self) -> DividedJob:
        """What layouts divide the job into."""
        return DividedJob(self.prepared, self.needs.trace)

    def profile(self, kind: str) -> Profile:
        """The job's facts, for devices of this kind."""
        prepared = self.prepared
        if kind not in self._profiles:
            profile = job_profile(prepared.job, prepared.data, self.coupling, prepared.model, device_kind=kind)
            self._profiles[kind] = dataclasses.replace(
                profile.of_site(prepared.sites), device_mtbf_h=self.device_mtbf_h
            )
        return self._profiles[kind]

    def profile_at(self, place: Place) -> Profile:
        """The job's facts at a place: machines that are taken away fail more often, with all their devices at once."""
        machine = place.cluster.node_devices
        profile = dataclasses.replace(self.profile(place.device.kind), machine_devices=machine)
        if self._preempted_s is None or place.is_here:
            return profile
        own_per_h = 1 / mtbf_h(place.device.kind, self.device_mtbf_h)
        taken_per_h = 3600 / (self._preempted_s * min(place.count, machine))
        per_h = own_per_h + taken_per_h
        lost_s = (own_per_h * restart_s(place.count, machine) + taken_per_h * PREEMPTED_S) / per_h
        return dataclasses.replace(profile, device_mtbf_h=1 / per_h, restart_s=lost_s)

    def price_at(self, place: Place) -> Price | None:
        """The lowest price of an hour of all devices of a place elsewhere; a spot price for machines taken away."""
        if place.is_here:
            return None
        name = place.entry.name if place.entry else place.name
        each = cheapest(name, "spot", count=place.count) if self._preempted_s is not None else None
        each = each or cheapest(name, count=place.count)
        return None if each is None else dataclasses.replace(each, usd_per_hour=each.usd_per_hour * place.count)

    def extents(self, samples_per_s: float) -> Extents:
        """How much there is to do; a budget of seconds is turned into samples by the rate."""
        prepared = self.prepared
        updates = self.total_updates(samples_per_s)
        every = prepared.job.evaluation.every
        evaluations = 0 if prepared.data.valid is None else prepared.extent.evaluations(every, updates) + 1
        return Extents(
            total_samples=prepared.extent.position(updates).samples, total_updates=updates, evaluations=evaluations
        )

    def total_updates(self, samples_per_s: float) -> int:
        """Number of updates of the whole run."""
        until = self.prepared.job.until
        if until.unit == "seconds":
            until = Duration(max(1.0, until.value * samples_per_s), "samples")
        return self.prepared.extent.updates_in(until)

    def forecasts(self, place: Place) -> TracedForecasts:
        """Forecasts of plans on `place`, which need not be here."""
        if _where(place) not in self._forecasts:
            self._forecasts[_where(place)] = TracedForecasts(
                self.profile_at(place),
                functools.partial(measured_hardware, place),
                self.needs,
                self.extents,
                calibrations=self.calibrations(place),
                fetch_s=self.fetch_s,
                held_bytes=resident_bytes() if place.device.kind == "cpu" else 0,
            )
        return self._forecasts[_where(place)]

    def calibrations(self, place: Place) -> tuple[Calibration, ...]:
        """Forecasts from traces alone and measurements of earlier runs on a device of this model."""
        model = place.device.model
        if model not in self._calibrations:
            known = calibrations_of(place)
            self._calibrations[model] = tuple(one for one in known if one.basis != "measured here")
        return self._calibrations[model]

    def ranked(self, place: Place) -> tuple[Candidate, ...]:
        """Plans for `place` by forecast, fastest first.

        Raises:
            BadJob: the model cannot be traced.
            DoesNotFit: no legal plan fits.
        """
        with users_code("the model or the loss", self.prepared.entry):
            return rank(
                self.profile_at(place),
                place.device,
                self._oom_aware_forecasts(place),
                name=place.name,
                is_here=place.is_here,
                is_limited=place.is_limited,
                can_compile=self.cannot_compile(place) is None,
            )

    def failures(self, place: Place) -> tuple[OutOfMemory, ...]:
        """Plans of this job that ran out of memory on such a device while they trained."""
        if _where(place) not in self._failures:
            self._failures[_where(place)] = known_failures(self.prepared, place)
        return self._failures[_where(place)]

    def _oom_aware_forecasts(self, place: Place) -> Forecasts:
        """Forecasts under which plans that ran out of memory do not fit, unless no other plan would fit."""
        if _where(place) not in self._oom_aware:
            forecasts: Forecasts = self.forecasts(place)
            device = place.device
            if failures := self.failures(place):
                aware = OomAwareForecasts(forecasts, failures, device.torch_name)
                facts = self.profile(device.kind)
                for is_offloaded in (False, True):
                    least = least_demanding(facts, device, self.forecasts(place), is_offloaded=is_offloaded)
                    if least is not None and aware.probability_it_fits(least) > 0:
                        forecasts = aware
                        break
            self._oom_aware[_where(place)] = forecasts
        return self._oom_aware[_where(place)]

    def cannot_compile(self, place: Place) -> str | None:
        """The tool that this machine lacks to compile plans; None if it lacks nothing, and for a place elsewhere."""
        return compiler_missing(torch.device(place.device.torch_name)) if place.is_here else None

    def confirmed(self, place: Place, only: Plan | None = None) -> tuple[PlanSearch, str]:
        """The finished search among plans for a place that is here, and why it had no forecasts ("" if it had).

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
            if doubtful:  # their second times may make other plans worth a trial
                self._try_promising(search, place, are_forecast=are_forecast)
        return search, problem

    def _try_promising(self, search: PlanSearch, place: Place, *, are_forecast: bool) -> None:
        """Try plans until none is expected to pay back its trial."""
        while (plan := search.next_plan()) is not None:
            if are_forecast and (lack := self._lack_of_memory(place, plan, search.candidates)) is not None:
                search.reject(plan, lack, for_memory=True)
                continue
            trial = self._tried(search, plan)
            if trial and trial.compile_s and trial.not_compiled is None and are_forecast:
                self._record_compile_time(place, trial)

    def _lack_of_memory(self, place: Place, plan: Plan, candidates: Sequence[Candidate]) -> str | None:
        """Why a plan is not even tried: its memory forecast exceeds the limit. None if it does not.

        Ranked plans fit; untraced ones are checked here, unless there is memory in plenty: a trace takes longer than a
        trial.
        """
        if not self.failures(place) and has_plenty(plan, candidates, place.device):
            return None
        forecasts = self._oom_aware_forecasts(place)
        try:
            if forecasts.probability_it_fits(plan) >= SURE_ENOUGH:
                return None
        except (BadJob, NoDevice):  # it cannot be traced: the trial decides
            return None
        needed, allowed = forecasts.needed_bytes(plan), place.device.memory_bytes
        return f"it is forecast to need {format_bytes(needed)} of memory, and may take {format_bytes(allowed)}"

    def _tried(self, search: PlanSearch, plan: Plan) -> Measurement | None:
        """Try a plan and report to the search; None if the plan cannot be used.

        Raises:
            BadJob: the run's own first updates fail as they were written, in fp32.
        """
        job, data, known = self.prepared.job, self.prepared.data, search.known_gradient_error(plan)
        free_threads = None
        if plan.device == "cpu" and may_give_up_threads(plan):
            cores = attached_cpu().cores
            free_threads = free_cores(cores, self.others_share() * cores)
        coupling = self.coupling
        try:
            with doing(f"trying {plan.in_words()}"):
                trial = try_plan(
                    job, plan, coupling, data, budget_s=TRIAL_S, known_error=known, most_threads=free_threads
                )
        except DoesNotFit as error:
            search.reject(plan, str(error), for_memory=True)
        except RunFailed as error:
            if plan.precision in FULL_PRECISIONS and not (plan.captured or plan.compile):
                raise BadJob(error.message, remedy=error.remedy) from error
            search.reject(plan, error.message)
        else:
            search.record(trial)
            return trial
        finally:
            give_back()  # heap of one trial must not count as the next one's, or the run's
        return None

    def others_share(self) -> float:
        """Share of the CPU that other processes used since planning began [0 to 1]; 0 if too little to matter."""
        return used_by_others(self._began)

    def _record_compile_time(self, place: Place, trial: Measurement) -> None:
        """Store the measured compile time with its forecast, to calibrate the next plan."""
        expected = self.forecasts(place).update(trial.plan).compile_s
        build = installed_torch()
        if expected is None or build is None:
            return
        calibration = Calibration(
            device_model=place.device.model,
            torch_version=build.version,
            run=self.prepared.spec.name,
            quantity="compile_s",
            forecast=expected.value,
            measured=trial.compile_s,
            at=datetime.now(UTC).isoformat(timespec="seconds"),
            basis=expected.basis,
        )
        with contextlib.suppress(RunFailed):  # a cache that cannot be written makes the next forecast less certain
            calibration_log(cache_root()).append(calibration)

    def _candidates(self, place: Place, only: Plan | None) -> tuple[tuple[Candidate, ...], str]:
        """Plans to try on a place that is here, likeliest first, and why none has a forecast ("" if they have)."""
        facts = self.profile(place.device.kind)
        if only is not None:
            return untraced_candidates(facts, place.device, name=place.name, plans=(only,)), ""
        try:
            ranked = self.ranked(place)
        except (BadJob, NoDevice) as error:  # it cannot be traced, or the device is not in the catalogue
            plans = untraced_candidates(facts, place.device, name=place.name)
            return not_ruled_out(plans, self.failures(place)) or plans, error.message
        others = untraced_candidates(facts, place.device, name=place.name, after=ranked)
        return (*ranked, *not_ruled_out(others, self.failures(place))), ""


def _where(place: Place) -> _Where:
    return place.name, place.device.memory_bytes


_MOST_CALIBRATIONS = 600
"""Calibrations of a device model that are looked at, the newest: of some 200 runs."""


def calibrations_of(place: Place) -> tuple[Calibration, ...]:
    """Forecasts and measurements of the last runs on a device of this model."""
    return calibration_log(cache_root()).read(newest=_MOST_CALIBRATIONS, device_model=place.device.model)


def describe_errors(place: Place) -> tuple[str, ...]:
    """A line on past forecast errors on this device, and one if its speed has changed since it was measured."""
    pace = measured_hardware(place, None).pace
    return (*describe_past_errors(calibrations_of(place)), *(describe_pace(pace) if pace else ()))


def describe_failures(planner: Planner, place: Place) -> tuple[str, ...]:
    """One line for each size of micro-batch that ran out of memory on this device in earlier runs of the job."""
    by_size = {failure.plan.micro_batch: failure for failure in planner.failures(place)}
    return tuple(
        f"micro-batch {size} is not proposed: it ran out of memory here in {failure.run} ({failure.at[:10]})"
        for size, failure in sorted(by_size.items())
    )


def measured_hardware(place: Place, threads: int | None) -> Hardware:
    """A place's figures, with operation times and current speed if `stoker doctor` measured it here.

    A CPU is measured on one thread and on all cores; other thread counts use the measurement of all cores.
    """
    build, whole = installed_torch(), place.hardware.device  # which has all cores, however few threads are allowed
    hardware = place.hardware
    if place.is_here and place.device.kind == "cuda":
        host = attached_cpu()
        rate = hardware_of(host).bandwidth_bytes_per_s
        hardware = dataclasses.replace(
            hardware, host_memory_bytes=host.memory_bytes or None, host_bandwidth_bytes_per_s=rate
        )
    if not place.is_here or build is None:
        return hardware
    cache, key = operations_cache(cache_root()), cache_key(whole, build.version)
    benchmark = None
    if place.device.kind == "cpu" and threads is not None:
        benchmark, share = cache.read(*operations_key(key, threads)), threads / max(1, whole.cores)
        hardware = dataclasses.replace(
            hardware,
            device=dataclasses.replace(place.device, cores=threads),
            dense_flops={dtype: rate * share for dtype, rate in hardware.dense_flops.items()},
        )
    benchmark = benchmark or cache.read(*operations_key(key, None))
    hardware = dataclasses.replace(hardware, benchmark=benchmark)
    if benchmark is None and place.device.kind == "cuda" and place.count == 1 and torch.cuda.is_available():
        return dataclasses.replace(hardware, host_s=_host_now(place.device.torch_name))
    return hardware if benchmark is None else dataclasses.replace(hardware, pace=pace_now(benchmark))


def with_costs(place: Place, candidate: Candidate, forecasts: TracedForecasts, price: Price | None) -> Candidate:
    """The candidate with the cost, energy and carbon dioxide of all its devices, as far as they are known."""
    forecast, energy = candidate.forecast, None
    plan = dataclasses.replace(candidate.plan, layout=Layout())
    pue = PUE_HERE if place.is_here else HOST_SHARE * PUE_DATA_CENTRE
    with contextlib.suppress(BadJob):  # it cannot be traced, and is planned by trials alone
        energy = forecasts.energy_kwh(plan, forecast, pue=pue)
    if energy is not None and not place.is_shared:
        energy = energy.scaled(place.count)
    forecast = dataclasses.replace(
        forecast,
        energy_kwh=energy,
        co2_kg=None if energy is None else co2_kg(energy),
        cost_usd=None if price is None else cost_usd(forecast.total_s, price),
    )
    return dataclasses.replace(candidate, price=price, forecast=forecast)


def price_assumptions(candidate: Candidate) -> str:
    """The assumptions behind its money, energy and carbon, on one line."""
    return cost_assumptions(candidate.price, pue=PUE_HERE if candidate.is_here else PUE_DATA_CENTRE)


def losers_of(ranked: tuple[Candidate, ...]) -> tuple[Rejection, ...]:
    """The plans of a device after the best, each with its time as a ratio of the best's."""
    best = ranked[0]
    return tuple(
        Rejection(
            device=c.device,
            plan=c.plan,
            reason=f"{best.forecast.samples_per_s.value / c.forecast.samples_per_s.value:.2f}x the time, by forecast",
        )
        for c in ranked[1:]
    )


def may_give_up_threads(plan: Plan) -> bool:
    """True if a run under `plan` may compute with fewer threads while other processes use the CPU."""
    return not plan.compile and not torch.are_deterministic_algorithms_enabled()


_HOST_ROUNDS = 8


@functools.lru_cache(maxsize=16)
def _host_now(device: str) -> dict[str, float]:
    """How long this host takes to start operations on a GPU, which decides small updates; takes half a second.

    Empty where others have filled the GPU: the trials find and report what does not fit there.
    """
    try:
        # As other parts of planning: the caller keeps its generators, and may have turned gradients off.
        with doing(f"timing the host of {device}"), generators_kept(), torch.enable_grad():
            return host_seconds(device=device, rounds=_HOST_ROUNDS)
    except RuntimeError as problem:
        if not ran_out_of_memory(problem):
            raise
        return {}


_HOLDS_S = 300.0
"""A speed measurement is reused for this long [s]: plans of one job are compared at one speed."""


def pace_now(benchmark: MicroBenchmark) -> Pace | None:
    """Current speed of this CPU against `benchmark`, with as many threads; takes half a second.

    None on a GPU, and if the benchmark has no anchors.
    """
    if benchmark.device.kind != "cpu" or not benchmark.anchors_s:
        return None
    return pace_of(benchmark.anchors_s, _turns_now(benchmark.threads, int(time.monotonic() / _HOLDS_S)))


@functools.lru_cache(maxsize=16)
def _turns_now(threads: int, period: int) -> tuple[Turn, ...]:  # noqa: ARG001 - `period` is there to be looked up by
    with doing("timing this CPU"):
        return measure_anchors(threads=threads)

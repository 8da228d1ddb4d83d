"""The start of a run before any plan is tried: under the one that is legal whatever the job.

What: the whole optimiser batch as one micro-batch, in full precision, is legal under any coupling of samples, so that
nothing is compared, traced or timed before the first update; other plans are tried on the run's own updates
(`training.plan_trials`). Workers fetch samples where that takes a good part of the time. Use when: a process alone
trains on this CPU, and there is memory in plenty by a pass of a few samples. Costs: the first updates under that plan.
Does not combine with: what `plan_first_because` lists; there plans are tried first, on a throw-away model.
"""

from __future__ import annotations

import dataclasses
import gc
import time

import torch
from torch.autograd.graph import saved_tensors_hooks

from stoker.devices import Place
from stoker.devices.cpu import CpuSample, attached_cpu, free_cores
from stoker.devices.malloc import resident_bytes
from stoker.imports import collector_paused
from stoker.jobs.batch_size import TokenBatch
from stoker.jobs.freezing import Freeze
from stoker.loading.batches import in_order
from stoker.planning.model.run_forecast import Extents, forecast_from_trial
from stoker.planning.model.search_space import execution_settings
from stoker.planning.plan_history import used_by_others
from stoker.planning.planner import may_give_up_threads
from stoker.planning.resolved_job import ResolvedJob, users_code
from stoker.profiling.ceilings import computing_threads
from stoker.profiling.job_profile import fetch_seconds, job_profile
from stoker.records import Candidate, Coupling, Decision, Estimate, Forecast, Measurement, Plan, Profile
from stoker.stepping.coupling import at_first
from stoker.stepping.model import bytes_of
from stoker.stepping.step import Step
from stoker.units import format_count, format_seconds

_FEW = 2
"""Samples of the pass by which memory and time of the whole batch are guessed."""

_PLENTY = 0.4
"""Share of the device's memory that the whole batch may take by that guess, which may be off by a factor of two."""

_COPIES = 4
"""Copies of the weights in training: themselves, gradients, and two moments."""

_SLOW_S = 0.2
"""Time of a first pass [s] from which on the kernels that it also made are a small part: it is not repeated."""

_FETCH_SHARE = 0.1
"""Share of an update's time that the training process itself may fetch samples for; from there on workers do."""

_WITHIN = 5.0
"""Factor within which the guess of an update's time is expected: larger batches use the cores better."""


def plan_first_because(prepared: ResolvedJob, place: Place) -> str | None:
    """Why plans are tried before this run begins, on a throw-away model; None where it may begin at once."""
    job, data = prepared.job, prepared.data
    reasons = {
        "the length of the run follows from its rate": job.until.unit == "seconds",
        "the job has a step of its own": job.step is not None,
        "sites make updates of their own": job.sync is not None,
        "coupled samples come in groups": job.coupling_group is not None,
        "batches have different numbers of samples": isinstance(job.batch, TokenBatch),
        "layers are thawed during the run": isinstance(job.freeze, Freeze) and job.freeze.is_gradual,
        "one reader reads a stream": not (data.train.is_in_memory or data.train.data_class == "indexed"),
        "the device is not this CPU": place.device.kind != "cpu" or not place.is_here or place.count > 1,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def safe_start(
    prepared: ResolvedJob, place: Place, before: CpuSample | None = None
) -> tuple[Decision, Coupling] | None:
    """The decision to begin at once, with a guess for a forecast; None where plans have to be tried first.

    `before` is a sample of the CPU from a while ago: what others used since is left to them (the decision's
    `others_share`).

    Raises:
        BadJob: the model or the loss cannot be evaluated on the job's samples.
    """
    if plan_first_because(prepared, place) is not None:
        return None
    started, job, data = time.perf_counter(), prepared.job, prepared.data
    with users_code("the model or the loss", prepared.entry):
        coupling = at_first(job, data.train)
        profile = job_profile(job, data, coupling, prepared.model, device_kind=place.device.kind)
        if not profile.has_one_shape:
            return None
        plan = safe_plan(profile, place)
        share = used_by_others(before) if may_give_up_threads(plan) else 0.0
        free_threads = free_cores(attached_cpu().cores, share * attached_cpu().cores)
        guess = _guessed(prepared, plan, coupling, min(plan.threads, free_threads))
        if guess is not None and fetch_seconds(data.train) > _FETCH_SHARE * guess.update_s[0] / job.batch_size:
            plan = dataclasses.replace(plan, loader="workers", num_workers=place.device.cores)
    if guess is None or guess.peak_bytes > _PLENTY * place.device.memory_bytes:
        return None
    guess = dataclasses.replace(guess, peak_bytes=guess.peak_bytes + resident_bytes())
    updates, extent = prepared.extent.updates_in(job.until), prepared.extent
    evaluations = 0 if data.valid is None else extent.evaluations(job.evaluation.every, updates) + 1
    extents = Extents(total_samples=extent.position(updates).samples, total_updates=updates, evaluations=evaluations)
    chosen = Candidate(
        device=place.name,
        plan=plan,
        forecast=_uncertain(forecast_from_trial(guess, profile, extents)),
        memory_bytes=place.device.memory_bytes,
        why="begun under",
    )
    total, samples = chosen.forecast.total_s, format_count(extents.total_samples)
    interval = f"{format_seconds(total.low)} to {format_seconds(total.high)}"
    lines = (
        f"begins under {plan.in_words()}, which is legal whatever the model",
        f"to finish: {interval}, until then a guess, for {samples} samples in {updates} updates",
    )
    decision = Decision(
        device=place.name,
        candidates=(chosen,),
        rejected=(),
        explanation=(*prepared.notes, *lines),
        took_s=time.perf_counter() - started,
        is_settled=False,
        others_share=share,
    )
    return decision, coupling


def safe_plan(profile: Profile, place: Place) -> Plan:
    """The plan that is legal under any coupling: the whole batch at once, in full precision, contiguous."""
    settings = execution_settings(profile, place.device)
    plain = next(p for p in settings if p.precision in ("fp32", "fp64") and p.memory_format == "contiguous")
    return dataclasses.replace(plain, micro_batch=profile.batch, malloc="retained")


def _guessed(prepared: ResolvedJob, plan: Plan, coupling: Coupling, threads: int) -> Measurement | None:
    """Memory that an update adds and its time, from a pass of a few samples; None where the model needs more.

    A step refers to itself: what this one had is freed here, before the run makes its own weights.
    """
    with collector_paused():
        guess = _passed(prepared, plan, coupling, threads)
        gc.collect(0)  # what was made within the block, and nothing that is older
    return guess


def _passed(prepared: ResolvedJob, plan: Plan, coupling: Coupling, threads: int) -> Measurement | None:
    """The measurement of `_guessed`."""
    job, data = prepared.job, prepared.data
    with computing_threads(threads):
        step = Step(job, plan, coupling)
        few, saved = min(_FEW, job.batch_size), dict[int, int]()
        own = {tensor.untyped_storage().data_ptr() for tensor in (*step.model.parameters(), *step.model.buffers())}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        batch = next(iter(in_order(data.train, step.pipeline(data.train, augmented=True), few)))
        try:
            began = time.perf_counter()
            with saved_tensors_hooks(note, lambda tensor: tensor):
                step.gradients(batch, 0)
            took_s = time.perf_counter() - began
            if took_s < _SLOW_S:
                began = time.perf_counter()
                step.gradients(batch, 0)
                took_s = time.perf_counter() - began
        except (RuntimeError, ValueError):  # so few samples are not the model's: its memory is unknown
            return None
    weights = bytes_of(step.model.parameters())
    of_batch = sum(saved.values()) * job.batch_size / few
    return Measurement(
        plan=plan,
        samples_per_update=job.batch_size,
        update_s=(took_s * job.batch_size / few,),
        evaluate_s_per_sample=took_s / few / 3,
        peak_bytes=int(2 * of_batch + _COPIES * weights),
        state_bytes=_COPIES * weights,
        took_s=took_s,
    )


def _uncertain(forecast: Forecast) -> Forecast:
    """The forecast with intervals as wide as the guess that it rests on."""

    def wide(estimate: Estimate) -> Estimate:
        value = estimate.value
        return dataclasses.replace(estimate, low=value / _WITHIN, high=value * _WITHIN, basis="unknown")

    return dataclasses.replace(
        forecast,
        step_s=wide(forecast.step_s),
        samples_per_s=wide(forecast.samples_per_s),
        evaluate_s=wide(forecast.evaluate_s),
        checkpoint_s=wide(forecast.checkpoint_s),
        total_s=wide(forecast.total_s),
        peak_bytes=wide(forecast.peak_bytes),
    )

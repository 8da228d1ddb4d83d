"""The parts of one training step on a device that need not be here, for a Job or any function that trains."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, overload

import torch

from stoker.devices import Place, attached_devices, planned_devices
from stoker.errors import BadJob, DoesNotFit, NoDevice
from stoker.jobs import Job
from stoker.loading.fields import tensors_of
from stoker.loading.order import generators_kept
from stoker.planning.model.memory import MemoryForecast, forecast_memory
from stoker.planning.model.search_space import kernel_generation, num_micro_batches, trace_settings
from stoker.planning.model.update_time import UpdateTime, counted, operation_times, update_time
from stoker.planning.plan_ranking import least_demanding
from stoker.planning.planner import Planner, measured_hardware
from stoker.planning.resolved_job import resolve_job, users_code
from stoker.profiling.tracing.session import trace_step
from stoker.records import Estimate, Plan, Share, Trace, TraceSettings

StepFunction = Callable[[Any], Any]
"""One update of a given batch: forward, backward, optimiser."""


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """Memory and time of one training step on a device.

    `device` is the catalogue's name, or `cpu`, `cuda:0` if it is here; `plan` is how a Job is executed, None for a step
    function. `flops` are those of a whole update, a multiply-add counted as two. `peak_bytes` is the peak of live
    tensors, library workspaces included; `reserved_bytes` is what the allocator then holds of the device (on a CPU the
    same). `peak_shares` [bytes] split the peak by purpose and user's line, `step_shares` [s] the time, each largest
    first. `step_s` is the time of an update [s]. `trace` has the update's operations; of several micro-batches the
    first two, the second of which stands for all that follow.
    """

    device: str
    plan: Plan | None
    flops: int
    peak_bytes: int
    reserved_bytes: int
    peak_shares: tuple[Share, ...]
    step_s: Estimate
    step_shares: tuple[Share, ...]
    trace: Trace = field(repr=False)


@overload
def profile(job: Job, /, *, on: str = "here", micro_batch: int | None = None) -> StepProfile: ...


@overload
def profile(
    step_fn: StepFunction, example_batch: Any, /, *, on: str = "here", hints: Mapping[str, int] | None = None
) -> StepProfile: ...


@generators_kept()
def profile(
    job_or_step: Job | StepFunction,
    example_batch: Any = None,
    /,
    *,
    on: str = "here",
    micro_batch: int | None = None,
    hints: Mapping[str, int] | None = None,
) -> StepProfile:
    """Memory and time of one update on a device, and the lines they go to. Nothing is trained.

    A Job's update is traced under the plan that is likely best there; if none fits, under the one that needs the least.
    A step function is traced as it is. Its model and optimiser are found among the variables it closes over, the
    globals it names and the object it is bound to; copies are traced, the originals stay as they are.

    Args:
        job_or_step: a Job, or a function of a batch that makes one update: forward, backward, optimiser.
        example_batch: for a step function: a tensor, or a tuple, list or dict of tensors, of the shapes of a batch.
        on: one device: `here`, or a name of the catalogue such as `h100`.
        micro_batch: for a Job: samples that go through the model at once; None: the plan's.
        hints: for a step function: sizes that depend on the data, by line: `{"train_me.py:42": 128}`.

    Returns:
        FLOPs, bytes and seconds of one update, and its trace.

    Raises:
        BadJob: the step cannot be traced (operation and line are named), or the micro-batch changes what is learned.
        DoesNotFit: the job's samples are coupled in groups larger than its batch, so that no plan is legal.
        NoDevice: `on` is unknown, or means several devices.
    """
    place = _one_place(on)
    if isinstance(job_or_step, Job):
        if example_batch is not None or hints:
            raise BadJob("a Job brings its own batches", remedy="Leave out example_batch and hints.")
        return _of_job(job_or_step, place, micro_batch)
    if not callable(job_or_step):
        raise BadJob(f"profile(…) was given a {type(job_or_step).__name__}, wanted a stoker.Job or a step function")
    if example_batch is None or micro_batch is not None:
        raise BadJob(
            "a step function takes its batch as it is given",
            remedy="Call stoker.profile(step_fn, example_batch), without micro_batch.",
        )
    return _of_function(job_or_step, example_batch, place, hints or {})


def _one_place(on: str) -> Place:
    places = planned_devices(on, attached_devices())
    if len(places) == 1 and places[0].count == 1:
        return places[0]
    if len(places) == 1:
        raise NoDevice(
            f"on={on!r} means {places[0].count} devices, and a profile is of one",
            remedy="stoker.plan(job, on=…) forecasts several.",
        )
    names = ", ".join(place.name for place in places)
    remedy = f"Name one, such as on={places[0].name!r}."
    raise NoDevice(f"on={on!r} means {len(places)} devices: {names}", remedy=remedy)


def _of_job(job: Job, place: Place, micro_batch: int | None) -> StepProfile:
    planner = Planner(resolve_job(job), is_all_elsewhere=not place.is_here)
    plan = _likeliest(planner, place, micro_batch)
    facts = planner.profile(place.device.kind)
    settings = trace_settings(plan, facts, place.hardware.compute_capability or "")
    micro_batches = num_micro_batches(facts, plan)
    with users_code("the model or the loss", planner.prepared.entry):
        trace = planner.needs.trace(settings)
    memory, time = planner.needs.peak(settings, micro_batches), planner.forecasts(place).update(plan)
    return _step_profile(trace, memory, time, micro_batches=micro_batches, device=place.name, plan=plan)


def _likeliest(planner: Planner, place: Place, micro_batch: int | None) -> Plan:
    """The best plan by forecast, or the one that needs the least; with another micro-batch if one is given."""
    facts = planner.profile(place.device.kind)
    if micro_batch is not None and (problem := facts.coupling.problem_with(micro_batch, facts.batch)):
        legal = ", ".join(map(str, facts.coupling.legal_micro_batches(facts.batch)))
        raise BadJob(f"micro_batch={micro_batch}: {problem}", remedy=f"Legal, for instance: {legal}.")
    try:
        plan = planner.ranked(place)[0].plan
    except DoesNotFit:
        least = least_demanding(facts, place.device, planner.forecasts(place))
        if least is None:
            raise
        plan = least
    return plan if micro_batch is None else dataclasses.replace(plan, micro_batch=micro_batch)


def _of_function(step_fn: StepFunction, batch: Any, place: Place, hints: Mapping[str, int]) -> StepProfile:
    is_cpu = place.device.kind == "cpu"
    hardware = measured_hardware(place, torch.get_num_threads()) if is_cpu else place.hardware
    capability = "" if is_cpu else kernel_generation(hardware.compute_capability or "")
    sizes = [size for tensor in tensors_of(batch) for size in tensor.shape[:1]]
    micro_batch = sizes[0] if sizes else 1  # the first dimension of the batch's first tensor
    settings = TraceSettings(target="cpu" if is_cpu else "cuda", capability=capability, micro_batch=micro_batch)
    with users_code("the step", None):
        trace = trace_step(step_fn, batch, settings, hints=hints)
    time = update_time(counted(trace), operation_times(hardware), hardware)
    return _step_profile(trace, forecast_memory(trace), time, micro_batches=1, device=place.name, plan=None)


def _step_profile(
    trace: Trace, memory: MemoryForecast, time: UpdateTime, *, micro_batches: int, device: str, plan: Plan | None
) -> StepProfile:
    repeats = {0: 1, 1: micro_batches - 1}  # the second micro-batch of a trace stands for all but the first
    flops = sum(
        trace.operations[one.operation].flops * (1 if one.phase == "optimizer" else repeats[one.part])
        for one in trace.occurrences
    )
    return StepProfile(
        device=device,
        plan=plan,
        flops=flops,
        peak_bytes=memory.allocated,
        reserved_bytes=memory.reserved,
        peak_shares=memory.shares,
        step_s=time.step_s,
        step_shares=time.shares,
        trace=trace,
    )

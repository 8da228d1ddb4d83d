"""The bottleneck of a finished run, from its report and a forecast of its update."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import torch

from stoker.devices import Place, attached_devices, cache_key, planned_devices
from stoker.errors import StokerError
from stoker.planning.model.bottleneck import Remedy, RunTimes, UpdateBounds, as_profiled, find_bottleneck, update_bounds
from stoker.planning.model.run_forecast import TracedForecasts
from stoker.planning.model.search_space import num_micro_batches, trace_settings
from stoker.planning.model.update_time import operation_times
from stoker.planning.plan_ranking import SURE_ENOUGH
from stoker.planning.planner import Planner, measured_hardware
from stoker.planning.resolved_job import ResolvedJob
from stoker.records import Bottleneck, Ceilings, Device, Estimate, Plan, Profile, Report
from stoker.records.progress import is_validation
from stoker.reporting.history import live_history, settled_switch, since_settled
from stoker.reporting.summary import forecast_rows, time_split
from stoker.store import cache_root, ceilings_cache

FEWEST_UPDATES = 5
"""Updates after the first one that a verdict needs: the first also waits for what is made once."""

WORTH_TRACING_S = 60.0
"""A run whose plan was not traced before is traced afterwards if it took this long [s], or was profiled."""
_LARGER_BATCHES = (2, 4)


def bottleneck_of(prepared: ResolvedJob, report: Report) -> Bottleneck | None:
    """The bottleneck of the run in `report`; None if the report has no plan, no times, or too few updates.

    The report's decision is taken to be the last one in force. The update is traced again if its trace was not kept;
    nothing of the job is run.
    """
    decision, device = report.decision, report.device
    times = _times(report)
    is_enough = times.updates >= FEWEST_UPDATES and sum(times.split_s.values()) > 0
    if decision is None or device is None or not is_enough:
        return None
    plan = decision.chosen.plan
    ceilings = ceilings_cache(cache_root()).read(cache_key(device, torch.__version__))
    bounds: UpdateBounds | str = "the update was not traced, since the run was short"
    considered: list[Remedy] = []
    is_asked = report.kernels is not None
    if is_asked or decision.breakdown is not None or report.run.wall_s >= WORTH_TRACING_S:
        try:
            forecasts = _UpdateForecasts(prepared, report, device)
            bounds = forecasts.bounds(plan, ceilings)
            bounds = as_profiled(bounds, report.kernels) if report.kernels is not None else bounds
            considered = list(forecasts.remedies(plan, times))
        except StokerError as problem:  # the run is done; an update that cannot be traced is reported as unknown
            bounds = f"the update cannot be traced: {problem.message}"
    return find_bottleneck(times, plan, device, bounds=bounds, ceilings=ceilings, considered=considered)


def _times(report: Report) -> RunTimes:
    """Training time by phase.

    Updates that were rolled back and repeated count once, those before settling do not, and neither does the first.
    """
    events, settled = since_settled(report), settled_switch(report)
    since = settled.update if settled is not None and len(events) < len(live_history(report.events)) else 0
    first = next((event for event in events if event.kind == "progress"), None)
    if first is not None and first.fields.get("updates") == 1:  # it has an event of its own
        events, since = tuple(event for event in events if event is not first), 1
    split = {share.phase: share.seconds for share in time_split(dataclasses.replace(report, events=events))}
    rows = {row.quantity: row.measured for row in forecast_rows(report)}
    total = report.decision.chosen.forecast.total_updates if report.decision is not None else 0
    evaluations_s: dict[int, float] = {}  # of all validation sets, by position
    for fields in (event.fields for event in events if event.kind == "evaluated" and is_validation(event)):
        evaluations_s[fields["samples"]] = evaluations_s.get(fields["samples"], 0.0) + float(fields["took_s"])
    return RunTimes(
        split_s={phase: split.get(phase, 0.0) for phase in ("update", "data", "evaluation", "checkpoint")},
        updates=report.run.updates - since,
        samples_per_update=report.run.total_samples / total if total else 0.0,
        samples_per_s=rows.get("throughput"),
        evaluations_s=[*evaluations_s.values()],
        num_checkpoints=sum(event.kind == "checkpointed" for event in events),
    )


class _UpdateForecasts:
    """Forecasts of one update on the run's device, as planning makes them."""

    def __init__(self, prepared: ResolvedJob, report: Report, device: Device) -> None:
        self._planner, self._device = Planner(prepared), device
        if report.coupling is not None:
            self._planner.coupling = report.coupling  # probed when the run began
        # The device as it is now: its memory may have changed a little since the run began, as from boot to boot.
        self._place: Place = planned_devices(device.torch_name, attached_devices())[0]

    @property
    def _profile(self) -> Profile:
        return self._planner.profile(self._device.kind)

    @property
    def _forecasts(self) -> TracedForecasts:
        return self._planner.forecasts(self._place)

    def bounds(self, plan: Plan, ceilings: Ceilings | None) -> UpdateBounds:
        """Time of the plan's update by what it waits for."""
        hardware = measured_hardware(self._place, plan.threads)
        capability = self._place.hardware.compute_capability or ""
        works = [
            self._planner.needs.work(trace_settings(p, self._profile, capability), num_micro_batches(self._profile, p))
            for p in (plan, plan.without_checkpointing())
        ]
        return update_bounds(
            works[0],
            self._forecasts.update(plan),
            operation_times(hardware),
            hardware,
            ceilings,
            without_recomputation=works[1],
            precision=plan.precision,
            is_compiled=plan.compile,
        )

    def remedies(self, plan: Plan, times: RunTimes) -> Iterator[Remedy]:
        """Savings of plans that the planner could not choose, and of larger batches."""
        updates_s, now_s = times.split_s["update"], self._forecasts.update(plan).step_s.value
        if plan.checkpointed_blocks:
            step_s = self._forecasts.update(plan.without_checkpointing()).step_s
            change = f"Take a device with more memory: {plan.checkpointed_blocks} blocks are computed twice to save it."
            yield _remedy(change, updates_s, step_s.scaled(1 / now_s))
        yield from self._larger_batches(plan, updates_s, now_s)

    def _larger_batches(self, plan: Plan, updates_s: float, now_s: float) -> Iterator[Remedy]:
        """Savings of larger batches, if the samples are separable and the batches fit."""
        profile = self._profile
        if profile.coupling.kind != "separable" or plan.micro_batch < profile.batch or profile.mean_batch is not None:
            return  # a batch stated in tokens has no fixed number of samples to multiply
        for factor in _LARGER_BATCHES:
            batch = factor * profile.batch
            larger = dataclasses.replace(plan, micro_batch=batch)
            forecasts = TracedForecasts(
                dataclasses.replace(profile, batch=batch),
                functools.partial(measured_hardware, self._place),
                self._planner.needs,
                self._planner.extents,
            )
            if factor * batch > profile.num_train or forecasts.probability_it_fits(larger) < SURE_ENOUGH:
                return
            change = f"Take a batch of {batch} for {profile.batch} (Job(batch={batch})); it changes what is learned."
            ratio = forecasts.update(larger).step_s.scaled(1 / (factor * now_s))
            yield _remedy(change, updates_s, ratio, changes_job=True)


def _remedy(change: str, updates_s: float, ratio: Estimate, *, changes_job: bool = False) -> Remedy:
    """A change after which updates take `ratio` of the `updates_s` they took."""
    saved, low, high = (updates_s * (1 - factor) for factor in (ratio.value, ratio.high, ratio.low))
    return Remedy(change=change, saved_s=saved, low_s=low, high_s=high, basis=ratio.basis, changes_job=changes_job)

"""Past of a job on a device: decisions kept for the next start, plans that ran out of memory, errors of forecasts."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

import numpy as np
import torch
from torch import nn

from stoker.devices import Place, cache_key, installed_torch, load_between, sample_cpu
from stoker.devices.cpu import CpuSample, attached_cpu
from stoker.errors import RunFailed, StokerError
from stoker.jobs.job_description import describe, describe_settings
from stoker.loading.fields import tensors_of
from stoker.planning.explanation import explain_again
from stoker.planning.job_traces import code_digest, versions_of
from stoker.planning.model.run_forecast import Extents, forecast_of_extents
from stoker.planning.plan_ranking import Forecasts
from stoker.planning.resolved_job import ResolvedJob
from stoker.records import Calibration, Candidate, Coupling, Decision, Forecast, Plan, digest
from stoker.records.codec import JSON
from stoker.records.plan import KeptDecision, OutOfMemory
from stoker.stepping.torch_compile import compiler_missing
from stoker.store import cache_root
from stoker.store.record_caches import out_of_memory_log, plan_cache

LONGER = 4.0
"""A plan is kept for runs of up to so many times the updates: in longer ones more plans would pay their trials."""

SHORTER = 0.5
"""A compiled or captured plan is kept for runs of this share of the updates or more: each run pays for it again."""

_UNDER_LOAD_S = 86400.0
"""Age to which a plan is kept that was chosen while other processes computed [s]."""


def kept_decision(
    prepared: ResolvedJob, place: Place, extents: Callable[[float], Extents]
) -> tuple[Decision, Coupling] | None:
    """The stored decision for such updates on this device, if it still holds, with a forecast of this run.

    Args:
        prepared: the job.
        place: the device.
        extents: of this run at a rate [samples/s].
    """
    kept = plan_cache(cache_root()).read(_key(prepared, place))
    if kept is None or kept.decision.chosen.plan.device_mtbf_h is None:  # written by a version with a fixed interval
        return None
    chosen, share = kept.decision.chosen, kept.decision.others_share
    age_s = (datetime.now(UTC) - datetime.fromisoformat(kept.at)).total_seconds()
    length = extents(chosen.forecast.samples_per_s.value)
    updates, before = length.total_updates, chosen.forecast.total_updates
    is_too_short = (chosen.plan.compile or chosen.plan.captured) and updates < SHORTER * before
    if is_too_short or updates > LONGER * before or (share and age_s > _UNDER_LOAD_S):
        return None
    held_out, test = sum(map(len, prepared.data.held_out.values())), prepared.data.test
    forecast = forecast_of_extents(
        chosen.forecast, length, num_valid=held_out, num_test=0 if test is None else len(test)
    )
    if (once := forecast.compile_s) is not None:  # in the process that chose it, a trial had paid for that
        total = forecast.total_s
        total = dataclasses.replace(
            total, value=total.value + once.value, low=total.low + once.low, high=total.high + once.high
        )
        forecast = dataclasses.replace(forecast, total_s=total)
    chosen = dataclasses.replace(chosen, forecast=forecast)
    line = f"planned on {kept.at[:10]}, and kept since nothing has changed; `stoker plan` plans again"
    if share:
        line = f"{line}. Others used {share:.0%} of the CPU then, so its times are uncertain"
    decision = dataclasses.replace(
        kept.decision,
        candidates=(chosen, *kept.decision.candidates[1:]),
        others_share=0.0,
        explanation=(*explain_again(kept.decision.explanation, chosen), line),
    )
    return decision, kept.coupling


def keep_decision(prepared: ResolvedJob, place: Place, decision: Decision, coupling: Coupling) -> None:
    """Store a decision for the next start, of whatever learning rate and length."""
    kept = KeptDecision(decision=decision, coupling=coupling, at=datetime.now(UTC).isoformat(timespec="seconds"))
    with contextlib.suppress(RunFailed):  # a cache that cannot be written costs the next start its planning
        plan_cache(cache_root()).write(kept, _key(prepared, place))


def used_by_others(began: CpuSample | None) -> float:
    """Share of the CPU that other processes used since `began` [0 to 1]; 0 if too little to matter, or unknown.

    It is unknown for less than 0.1 s: the system counts in ticks of 10 ms.
    """
    now = sample_cpu()
    if began is None or now is None or now.total_s - began.total_s < 0.1 * attached_cpu().cores:
        return 0.0
    load = load_between(began, now)
    return 0.0 if load.is_quiet else min(1.0, load.others + load.stolen)


def _key(prepared: ResolvedJob, place: Place) -> str:
    """Digest of what a decision depends on.

    What an update computes: code, model, loss, kind of optimiser, batch, samples; not its rates, and neither the seed
    nor the length of the run. The device with its memory (in steps of 256 MiB, since it differs a little from boot to
    boot; a limit that the user set, to the byte); versions of the packages that run the model; the compiler; and the
    plans that ran out of memory since.
    """
    build = installed_torch()
    device = cache_key(place.device, "unknown" if build is None else build.version)
    memory = place.device.memory_bytes if place.is_limited else place.device.memory_bytes >> 28
    missing = compiler_missing(torch.device(place.device.torch_name))
    failures = [failure.at for failure in known_failures(prepared, place)]
    return digest([_update_identity(prepared), device, memory, versions_of(prepared.model), missing, failures])


def _update_identity(prepared: ResolvedJob) -> str:
    """Digest of what the job's updates compute, whatever their rates, seed and number.

    All code of a job file that is executed counts, and the code that model, loss and transforms reach by name, in
    whatever folder. The job's parameters count by what becomes of them: what makes the model with its closure, its
    modules with their plain attributes, the settings and the data.
    """
    job, entry, model = prepared.job, prepared.entry, prepared.model
    made_by = None if isinstance(job.model, nn.Module) else job.model
    code = [None if entry is None else entry.digest, code_digest(prepared)]
    modules = [
        [
            name,
            type(module).__qualname__,
            {
                key: item
                for key, item in sorted(vars(module).items())
                if isinstance(item, bool | int | float | str | tuple | None)
            },
        ]
        for name, module in model.named_modules()
    ]
    settings = {key: value for key, value in describe_settings(job).items() if key not in _NOT_OF_UPDATES}
    spec, described = prepared.spec, _without_rates([describe(made_by), settings, describe(modules)])
    return digest([code, memory_identity(prepared), described, spec.data_class, spec.data_fingerprint])


def _without_rates(value: JSON) -> JSON:
    """A description without learning rates."""
    if isinstance(value, Mapping):
        return {key: _without_rates(item) for key, item in value.items() if key != "lr"}
    return [_without_rates(item) for item in value] if isinstance(value, list | tuple) else value


_NOT_OF_UPDATES = frozenset({"until", "schedule", "evaluation", "seed", "on_non_finite", "metrics", "stop"})
"""Settings of a job that change neither time nor memory of its updates."""


def known_failures(prepared: ResolvedJob, place: Place) -> tuple[OutOfMemory, ...]:
    """Plans of this job that ran out of memory on such a device, without those that say nothing about it.

    Plans of several processes are left out: each held a part of the model, or had a part of the device.
    """
    log = out_of_memory_log(cache_root())
    if not log.path.exists():
        return ()
    known = log.read(device_model=place.device.model, job=memory_identity(prepared))
    return relevant_failures([f for f in known if f.plan.layout.world_size == 1], place.device.memory_bytes)


def memory_identity(prepared: ResolvedJob) -> str:
    """Digest of what the memory of a job's updates depends on: model, settings, shapes and dtypes of a sample."""
    tensors = tensors_of(prepared.data.train.fetch(np.zeros(1, dtype=np.int64), 0))
    sample = [f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in tensors]
    state = [(name, f"{tensor.dtype} {tuple(tensor.shape)}") for name, tensor in prepared.model.state_dict().items()]
    settings = {key: value for key, value in describe_settings(prepared.job).items() if key not in _NOT_OF_UPDATES}
    return digest([type(prepared.model).__qualname__, repr(prepared.model), state, _without_rates(settings), sample])


LEAST_SHARE = 0.5
"""A failure counts only if the process could use at least this share of the device's memory."""


def relevant_failures(failures: Sequence[OutOfMemory], memory_bytes: int) -> tuple[OutOfMemory, ...]:
    """The failures that count for a device with so much memory [bytes]; all if it is unknown (0)."""
    least = LEAST_SHARE * memory_bytes
    return tuple(f for f in failures if f.reachable_bytes is None or f.reachable_bytes >= least)


def not_ruled_out(candidates: Sequence[Candidate], failures: Sequence[OutOfMemory]) -> tuple[Candidate, ...]:
    """The candidates without those that need at least as much memory as a failed plan by every setting."""
    return tuple(c for c in candidates if not any(one.rules_out(c.plan) for one in failures))


class OomAwareForecasts:
    """Forecasts under which a plan that needs as much memory as a failed one does not fit.

    Args:
        forecasts: of plans on one device.
        failures: of the same job on such a device.
        torch_name: the device in PyTorch.
    """

    def __init__(self, forecasts: Forecasts, failures: Sequence[OutOfMemory], torch_name: str) -> None:
        self._forecasts, self._failures = forecasts, failures
        self._too_much = math.inf
        for failure in failures:
            with contextlib.suppress(StokerError):  # a plan that cannot be traced any more still rules out others
                needed = forecasts.needed_bytes(dataclasses.replace(failure.plan, device=torch_name))
                self._too_much = min(self._too_much, needed)

    def probability_it_fits(self, plan: Plan) -> float:
        """Probability that the device's memory is enough [0 to 1]; 0 if it was not."""
        return 0.0 if self._was_too_much(plan) else self._forecasts.probability_it_fits(plan)

    def fits(self, plan: Plan, probability: float) -> bool:
        """Whether `probability_it_fits` is at least so large."""
        return self._forecasts.fits(plan, probability) and not self._was_too_much(plan)

    def _was_too_much(self, plan: Plan) -> bool:
        return any(one.rules_out(plan) for one in self._failures) or self.needed_bytes(plan) >= self._too_much

    def needed_bytes(self, plan: Plan) -> float:
        """Memory needed [bytes]."""
        return self._forecasts.needed_bytes(plan)

    def forecast(self, plan: Plan) -> Forecast:
        """Time and memory of the run."""
        return dataclasses.replace(self._forecasts.forecast(plan), probability_it_fits=self.probability_it_fits(plan))


TO_SPEAK_OF_S = 5.0
"""Shorter runs [s], forecast and measured, are left out: they are mostly start and stop."""


def describe_past_errors(calibrations: Sequence[Calibration]) -> tuple[str, ...]:
    """One line with the median errors of forecasts, before trials and after them; none without calibrations.

    Args:
        calibrations: of one device.
    """
    words = []
    for when, is_tried in (("from traces alone", False), ("after trials", True)):
        for quantity, name in (("total_s", "time"), ("peak_bytes", "memory")):
            matching = [c for c in calibrations if c.quantity == quantity and (c.basis == "measured here") == is_tried]
            if error := typical_error(matching):
                words.append(f"{name} {when} {error}")
    return (f"errors of forecasts here so far (median): {', '.join(words)}",) if words else ()


def typical_error(calibrations: Sequence[Calibration]) -> str:
    """The median error as text, 0.5x counted as large as 2x; empty if no run counts."""
    factors = [
        abs(math.log(c.measured / c.forecast))
        for c in calibrations
        if min(c.measured, c.forecast) > 0 and (c.quantity != "total_s" or max(c.measured, c.forecast) >= TO_SPEAK_OF_S)
    ]
    if not factors:
        return ""
    factor = math.exp(statistics.median(factors))
    return "over ten times off" if factor > 10 else f"{factor - 1:.1%}"

"""Plans kept from one start of a job to the next: trials are made once for a job, a device and a PyTorch.

Plans of a job that ran out of memory, as the planner meets them again.

Forecasts that heed what happened: a plan of this job that ran out of memory here is not proposed again.

How far forecasts have been off on a device, from what runs wrote down of themselves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime

import numpy as np
import torch

from stoker.devices import Place, cache_key, installed_torch, load_between, sample_cpu
from stoker.devices.cpu import CpuSample
from stoker.errors import RunFailed, StokerError
from stoker.jobs.job_description import describe_settings
from stoker.loading.fields import map_tensors
from stoker.planning.job_traces import versions_of
from stoker.planning.plan_ranking import Forecasts
from stoker.planning.resolved_job import ResolvedJob
from stoker.records import Calibration, Candidate, Coupling, Decision, Forecast, Plan, digest
from stoker.records.plan import KeptDecision, OutOfMemory
from stoker.stepping.torch_compile import compiler_missing
from stoker.store import cache_root
from stoker.store.record_caches import out_of_memory_log, plan_cache


def kept_decision(prepared: ResolvedJob, place: Place) -> tuple[Decision, Coupling] | None:
    """What was decided for this very job on this device, if that still holds."""
    key = _key(prepared, place)
    found = None if key is None else plan_cache(cache_root()).read(key)
    if found is None or found.decision.chosen.plan.device_mtbf_h is None:  # of a version with a fixed interval
        return None
    line = f"planned on {found.at[:10]}, and kept since nothing has changed; `stoker plan` plans anew"
    return dataclasses.replace(found.decision, explanation=(*found.decision.explanation, line)), found.coupling


def keep_decision(
    prepared: ResolvedJob, place: Place, decision: Decision, coupling: Coupling, began: CpuSample | None
) -> None:
    """Keep a decision for the next start, unless others used the machine while it was made, since `began`."""
    key = _key(prepared, place)
    if key is None or began is None or used_by_others(began):
        return
    kept = KeptDecision(decision=decision, coupling=coupling, at=datetime.now(UTC).isoformat(timespec="seconds"))
    with contextlib.suppress(RunFailed):  # a cache that cannot be written costs the next start its planning
        plan_cache(cache_root()).write(kept, key)


def used_by_others(began: CpuSample | None) -> float:
    """The share of the CPU that others used since `began` [0 to 1]; 0 where it is too little to matter, or unknown."""
    now = sample_cpu()
    if began is None or now is None:
        return 0.0
    load = load_between(began, now)
    return 0.0 if load.is_quiet else min(1.0, load.others + load.stolen)


def _key(prepared: ResolvedJob, place: Place) -> str | None:
    """What a decision depends on; None for a job without a file, whose code nobody can compare.

    The job; the device with its memory (in steps of 256 MiB, since it differs a little from boot to boot; a limit that
    somebody set, to the byte); versions of all that runs the model; whether there is a compiler; and which of its plans
    ran out of memory meanwhile.
    """
    if prepared.entry is None:
        return None
    build = installed_torch()
    device = cache_key(place.device, "unknown" if build is None else build.version)
    memory = place.device.memory_bytes if place.is_limited else place.device.memory_bytes >> 28
    missing = compiler_missing(torch.device(place.device.torch_name))
    failures = [one.at for one in known_failures(prepared, place)]
    return digest([prepared.spec.digest(), device, memory, versions_of(prepared.model), missing, failures])


_NOT_OF_MEMORY = frozenset({
    "until", "schedule", "evaluate_every", "select", "seed", "on_non_finite", "metrics",
})  # fmt: skip
"""Settings of a job that the memory of its updates does not depend on."""


def known_failures(prepared: ResolvedJob, place: Place) -> tuple[OutOfMemory, ...]:
    """Plans of this job that ran out of memory on a device like this one, where that says something of it.

    Those of several processes say nothing: each of them held a part of the model, or had a part of the device.
    """
    log = out_of_memory_log(cache_root())
    if not log.path.exists():
        return ()
    known = log.read(device_model=place.device.model, job=memory_identity(prepared))
    return relevant_failures([one for one in known if one.plan.layout.world_size == 1], place.device.memory_bytes)


def memory_identity(prepared: ResolvedJob) -> str:
    """What the memory of a job's updates depends on, as a digest: model, settings, and the form of a sample."""
    sample: list[str] = []
    one = prepared.data.train.fetch(np.zeros(1, dtype=np.int64), 0)
    map_tensors(one, lambda tensor: sample.append(f"{tensor.dtype} {tuple(tensor.shape)}"))
    state = [(name, f"{tensor.dtype} {tuple(tensor.shape)}") for name, tensor in prepared.model.state_dict().items()]
    settings = {key: value for key, value in describe_settings(prepared.job).items() if key not in _NOT_OF_MEMORY}
    return digest([type(prepared.model).__qualname__, repr(prepared.model), state, settings, sample])


LEAST_SHARE = 0.5
"""Where a process had less than this share of its device, what ran out says nothing of the device itself."""


def relevant_failures(failures: Sequence[OutOfMemory], memory_bytes: int) -> tuple[OutOfMemory, ...]:
    """Those failures that say something of a device with so much memory [bytes]; all of them if it is unknown (0)."""
    return tuple(one for one in failures
                 if one.reachable_bytes is None or one.reachable_bytes >= LEAST_SHARE * memory_bytes)  # fmt: skip


def not_ruled_out(candidates: Sequence[Candidate], failures: Sequence[OutOfMemory]) -> tuple[Candidate, ...]:
    """Those candidates that need less than each plan that ran out of memory, on one account at least."""
    return tuple(c for c in candidates if not any(one.rules_out(c.plan) for one in failures))


class OomAwareForecasts:
    """The same forecasts, except that what needs as much as a plan that ran out of memory does not fit.

    Args:
        forecasts: of plans on one device.
        failures: of the same job on such a device.
        torch_name: what PyTorch calls the device.
    """

    def __init__(self, forecasts: Forecasts, failures: Sequence[OutOfMemory], torch_name: str) -> None:
        self._forecasts, self._failures = forecasts, failures
        self._too_much = math.inf
        for one in failures:
            with contextlib.suppress(StokerError):  # a plan that cannot be traced any more still rules out others
                needed = forecasts.needed_bytes(dataclasses.replace(one.plan, device=torch_name))
                self._too_much = min(self._too_much, needed)

    def probability_it_fits(self, plan: Plan) -> float:
        """That the device's memory is enough: 0 where it was not."""
        if any(one.rules_out(plan) for one in self._failures) or self.needed_bytes(plan) >= self._too_much:
            return 0.0
        return self._forecasts.probability_it_fits(plan)

    def needed_bytes(self, plan: Plan) -> float:
        """Memory [bytes]."""
        return self._forecasts.needed_bytes(plan)

    def forecast(self, plan: Plan) -> Forecast:
        """All of it."""
        return dataclasses.replace(self._forecasts.forecast(plan), probability_it_fits=self.probability_it_fits(plan))


TO_SPEAK_OF_S = 5.0
"""Runs that were shorter [s], by forecast and by the clock, are left out: starting and stopping is most of them."""

_BEYOND_PER_CENT = 10.0
"""Factors above which a figure per cent says less than words do."""


def describe_past_errors(calibrations: Sequence[Calibration]) -> tuple[str, ...]:
    """One line on how far forecasts have been off, before trials and after them; none where there is nothing to tell.

    Args:
        calibrations: of one device.
    """
    words = []
    for when, is_tried in (("from traces alone", False), ("after trials", True)):
        for quantity, name in (("total_s", "time"), ("peak_bytes", "memory")):
            found = [c for c in calibrations if c.quantity == quantity and (c.basis == "measured here") == is_tried]
            if error := typical_error(found):
                words.append(f"{name} {when} {error}")
    return (f"errors of forecasts here so far (median): {', '.join(words)}",) if words else ()


def typical_error(calibrations: Sequence[Calibration]) -> str:
    """The median error in words, half as much as wrong as twice as much; empty where no run is worth counting."""
    factors = [
        abs(math.log(c.measured / c.forecast))
        for c in calibrations
        if min(c.measured, c.forecast) > 0
        and (c.quantity != "total_s" or max(c.measured, c.forecast) >= TO_SPEAK_OF_S)
    ]  # fmt: skip
    if not factors:
        return ""
    factor = math.exp(statistics.median(factors))
    return "over ten times off" if factor > _BEYOND_PER_CENT else f"{factor - 1:.1%}"

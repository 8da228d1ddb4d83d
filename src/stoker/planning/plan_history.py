"""Past of a job on a device: decisions kept for the next start, plans that ran out of memory, errors of forecasts."""

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
    """The stored decision for this job on this device, if it still holds."""
    key = _key(prepared, place)
    kept = None if key is None else plan_cache(cache_root()).read(key)
    if kept is None or kept.decision.chosen.plan.device_mtbf_h is None:  # written by a version with a fixed interval
        return None
    line = f"planned on {kept.at[:10]}, and kept since nothing has changed; `stoker plan` plans anew"
    return dataclasses.replace(kept.decision, explanation=(*kept.decision.explanation, line)), kept.coupling


def keep_decision(
    prepared: ResolvedJob, place: Place, decision: Decision, coupling: Coupling, began: CpuSample | None
) -> None:
    """Store a decision for the next start, unless other processes used the machine since `began`."""
    key = _key(prepared, place)
    if key is None or began is None or used_by_others(began):
        return
    kept = KeptDecision(decision=decision, coupling=coupling, at=datetime.now(UTC).isoformat(timespec="seconds"))
    with contextlib.suppress(RunFailed):  # a cache that cannot be written costs the next start its planning
        plan_cache(cache_root()).write(kept, key)


def used_by_others(began: CpuSample | None) -> float:
    """Share of the CPU that other processes used since `began` [0 to 1]; 0 if too little to matter, or unknown."""
    now = sample_cpu()
    if began is None or now is None:
        return 0.0
    load = load_between(began, now)
    return 0.0 if load.is_quiet else min(1.0, load.others + load.stolen)


def _key(prepared: ResolvedJob, place: Place) -> str | None:
    """Digest of what a decision depends on; None for a job without a file, whose code cannot be compared.

    The job; the device with its memory (in steps of 256 MiB, since it differs a little from boot to boot; a limit that
    the user set, to the byte); versions of the packages that run the model; the compiler; and the plans that ran out of
    memory since.
    """
    if prepared.entry is None:
        return None
    build = installed_torch()
    device = cache_key(place.device, "unknown" if build is None else build.version)
    memory = place.device.memory_bytes if place.is_limited else place.device.memory_bytes >> 28
    missing = compiler_missing(torch.device(place.device.torch_name))
    failures = [failure.at for failure in known_failures(prepared, place)]
    return digest([prepared.spec.digest(), device, memory, versions_of(prepared.model), missing, failures])


_NOT_OF_MEMORY = frozenset({
    "until", "schedule", "evaluate_every", "select", "seed", "on_non_finite", "metrics",
})  # fmt: skip
"""Settings of a job that do not change the memory of its updates."""


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
    sample: list[str] = []
    one = prepared.data.train.fetch(np.zeros(1, dtype=np.int64), 0)
    map_tensors(one, lambda tensor: sample.append(f"{tensor.dtype} {tuple(tensor.shape)}"))
    state = [(name, f"{tensor.dtype} {tuple(tensor.shape)}") for name, tensor in prepared.model.state_dict().items()]
    settings = {key: value for key, value in describe_settings(prepared.job).items() if key not in _NOT_OF_MEMORY}
    return digest([type(prepared.model).__qualname__, repr(prepared.model), state, settings, sample])


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
        if any(failure.rules_out(plan) for failure in self._failures) or self.needed_bytes(plan) >= self._too_much:
            return 0.0
        return self._forecasts.probability_it_fits(plan)

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
        if min(c.measured, c.forecast) > 0
        and (c.quantity != "total_s" or max(c.measured, c.forecast) >= TO_SPEAK_OF_S)
    ]  # fmt: skip
    if not factors:
        return ""
    factor = math.exp(statistics.median(factors))
    return "over ten times off" if factor > 10 else f"{factor - 1:.1%}"

"""Plans kept from one start of a job to the next: trials are made once for a job, a device and a PyTorch."""

from __future__ import annotations

import contextlib
import dataclasses
from datetime import UTC, datetime

import torch

from stoker.devices import Place, cache_key, installed_torch, load_between, sample_cpu
from stoker.devices.load import CpuSample
from stoker.errors import RunFailed
from stoker.flow.memory_failures import known_failures
from stoker.flow.preparation import Prepared
from stoker.flow.traces import versions_of
from stoker.records import Coupling, Decision, digest
from stoker.records.plan import KeptDecision
from stoker.stepping.compiling import compiler_missing
from stoker.store import cache_root
from stoker.store.plans import PlanCache


def kept_decision(prepared: Prepared, place: Place) -> tuple[Decision, Coupling] | None:
    """What was decided for this very job on this device, if that still holds."""
    key = _key(prepared, place)
    found = None if key is None else _cache().read(key)
    if found is None or found.decision.chosen.plan.device_mtbf_h is None:  # of a version with a fixed interval
        return None
    line = f"planned on {found.at[:10]}, and kept since nothing has changed; `stoker plan` plans anew"
    return dataclasses.replace(found.decision, explanation=(*found.decision.explanation, line)), found.coupling


def keep_decision(
    prepared: Prepared, place: Place, decision: Decision, coupling: Coupling, began: CpuSample | None
) -> None:
    """Keep a decision for the next start, unless others used the machine while it was made, since `began`."""
    key = _key(prepared, place)
    if key is None or began is None or used_by_others(began):
        return
    kept = KeptDecision(decision=decision, coupling=coupling, at=datetime.now(UTC).isoformat(timespec="seconds"))
    with contextlib.suppress(RunFailed):  # a cache that cannot be written costs the next start its planning
        _cache().write(key, kept)


def used_by_others(began: CpuSample | None) -> float:
    """The share of the CPU that others used since `began` [0 to 1]; 0 where it is too little to matter, or unknown."""
    now = sample_cpu()
    if began is None or now is None:
        return 0.0
    load = load_between(began, now)
    return 0.0 if load.is_quiet else min(1.0, load.others + load.stolen)


def _cache() -> PlanCache:
    return PlanCache(cache_root() / "plans")


def _key(prepared: Prepared, place: Place) -> str | None:
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

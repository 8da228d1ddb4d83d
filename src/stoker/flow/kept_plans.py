"""Plans kept from one start of a job to the next: trials are made once for a job, a device and a PyTorch."""

from __future__ import annotations

import contextlib
import dataclasses
from datetime import UTC, datetime
from importlib.metadata import version

from stoker.devices import Place, cache_key, installed_torch, load_between, sample_cpu
from stoker.devices.load import CpuSample
from stoker.errors import RunFailed
from stoker.flow.memory_failures import known_failures
from stoker.flow.preparation import Prepared
from stoker.flow.traces import TRACE_LAYOUT
from stoker.records import Coupling, Decision, digest
from stoker.records.plan import KeptDecision
from stoker.store import cache_root
from stoker.store.plans import PlanCache


def kept_decision(prepared: Prepared, place: Place) -> tuple[Decision, Coupling] | None:
    """What was decided for this very job on this device, if that still holds."""
    found = _cache().read(_key(prepared, place))
    if found is None:
        return None
    line = f"planned on {found.at[:10]}, and kept since nothing has changed; `stoker plan` plans anew"
    return dataclasses.replace(found.decision, explanation=(*found.decision.explanation, line)), found.coupling


def keep_decision(
    prepared: Prepared, place: Place, decision: Decision, coupling: Coupling, began: CpuSample | None
) -> None:
    """Keep a decision for the next start, unless others used the machine while it was made, since `began`."""
    now = sample_cpu()
    if began is None or now is None or not load_between(began, now).is_quiet:
        return
    kept = KeptDecision(decision=decision, coupling=coupling, at=datetime.now(UTC).isoformat(timespec="seconds"))
    with contextlib.suppress(RunFailed):  # a cache that cannot be written costs the next start its planning
        _cache().write(_key(prepared, place), kept)


def _cache() -> PlanCache:
    return PlanCache(cache_root() / "plans")


def _key(prepared: Prepared, place: Place) -> str:
    """What a decision depends on: the job, device and PyTorch, how Stoker traces, and which plans failed meanwhile."""
    build = installed_torch()
    failures = [one.at for one in known_failures(prepared, place)]
    torch_version = "unknown" if build is None else build.version
    device = cache_key(place.device, torch_version)
    return digest([prepared.spec.digest(), device, version("stoker"), TRACE_LAYOUT, failures])

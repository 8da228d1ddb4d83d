"""The planner's loop: rank, measure, choose."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

from stoker import planning, profiling, records
from stoker.devices import attached_devices, resolve_place
from stoker.errors import BadJob, DoesNotFit, RunFailed, nearest
from stoker.flow.preparation import Prepared, prepare, users_code
from stoker.jobs import Entry, Job
from stoker.records import Coupling, Decision, Device, Measurement, Plan
from stoker.stepping import find_coupling
from stoker.units import Duration

_TRIAL_S = 1.0
"""Seconds of training in one trial of a plan, beyond its first update."""


def plan(job: Job, *, on: str = "here", entry: Entry | None = None) -> Decision:
    """Choose how to execute `job` on the device `on`, by short trials on it.

    Raises:
        BadJob: the job cannot be trained as it is.
        DoesNotFit: no legal plan fits.
        NoDevice: `on` is unknown or not attached.
    """
    return decide(prepare(job, entry), resolve_place(on, attached_devices()))[0]


def decide(prepared: Prepared, device: Device, only: Plan | None = None) -> tuple[Decision, Coupling]:
    """The planner's loop: rank, measure, choose. With `only`, that plan is measured and taken."""
    job, data = prepared.job, prepared.data
    if only is not None:
        _require_usable(only, prepared, device)
    started = time.perf_counter()
    with users_code("the model or the loss", prepared.entry):
        coupling = find_coupling(job, data.train)
        facts = profiling.profile(job, data, device, coupling)

        def extents(measured: Measurement) -> planning.Extents:
            updates = total_updates(prepared, measured)
            total = prepared.extent.position(updates).samples
            evaluations = 0 if data.valid is None else prepared.extent.evaluations(job.evaluate_every, updates) + 1
            return planning.Extents(total_samples=total, total_updates=updates, evaluations=evaluations)

        search = planning.Search(facts, device, extents)
        while (candidate := only or search.next_plan()) is not None:
            try:
                search.record(profiling.try_plan(job, candidate, coupling, data, budget_s=_TRIAL_S))
            except DoesNotFit as problem:
                search.reject(candidate, str(problem))
            except RunFailed as problem:  # these are the run's own first updates
                if candidate.precision == "fp32":
                    raise BadJob(problem.message, remedy=problem.remedy) from problem
                search.reject(candidate, problem.message)
            if only is not None:
                break
    return dataclasses.replace(search.decision(), took_s=time.perf_counter() - started), coupling


def _require_usable(plan: Plan, prepared: Prepared, device: Device) -> None:
    """Refuse a plan made for another device or another kind of data."""
    if plan.device != device.torch_name:
        raise BadJob(
            f"the plan is for {plan.device}, but the job is to run on {device.torch_name}",
            remedy=f"Use --on {plan.device}, or make a plan with `stoker plan JOB --on {device.torch_name} --json`.",
        )
    if plan.loader == "workers" and prepared.data.train.is_in_memory:
        raise BadJob(
            f"the plan has {plan.num_workers} loader workers, but the data lie in memory: there is nothing to fetch",
            remedy='Use loader "memory" and num_workers 0.',
        )


def total_updates(prepared: Prepared, measured: Measurement) -> int:
    """Updates of the whole run; a budget of seconds is turned into samples by the measured rate."""
    until = prepared.job.until
    if until.unit == "seconds":
        times = sorted(measured.update_s)
        rate = measured.samples_per_update / times[len(times) // 2]
        until = Duration(max(1.0, until.value * rate), "samples")
    return prepared.extent.updates_in(until)


def given_plan(given: str | Path | Plan | None) -> Plan | None:
    """The plan of `--plan`: a Plan, or a file with one, with a decision, or with what `stoker plan --json` prints."""
    if given is None or isinstance(given, Plan):
        return given
    path = Path(given)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document.get("record") == "Decision":
            decision = records.from_json(document, Decision)
            if not decision.candidates:
                raise ValueError("it is a decision without candidates")
            return decision.chosen.plan
        return records.from_json(document, Plan)
    except FileNotFoundError:
        near = sorted(p.name for p in path.parent.glob("*.json")) if path.parent.is_dir() else []
        raise BadJob(f"there is no plan file {path}", remedy=nearest(path.name, near) if near else None) from None
    except (OSError, ValueError, AttributeError) as problem:
        raise BadJob(f"{path} holds no plan: {problem}",
                     remedy="Make one with `stoker plan JOB --json > FILE`.") from problem  # fmt: skip

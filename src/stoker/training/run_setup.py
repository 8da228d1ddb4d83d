"""The setup of a run on disk: its directory, new or continued, what is written into it, and the plan in force.

Its environment is the determinism class: all that must be equal for two runs to be bit-equal.
"""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stoker import records
from stoker.devices import attached_devices
from stoker.errors import BadRun, StokerError
from stoker.jobs import Job
from stoker.planning.resolved_job import ResolvedJob
from stoker.records import ONE_PROCESS, Coupling, Decision, Device, Environment, Event, Layout, Plan
from stoker.stepping.layouts.compatibility import micro_batch_problem
from stoker.store import (
    RunDirectory,
    choose_directory,
    describe_changes,
    find_run,
    headway_of,
    name_in,
    require_same_spec,
    runs_root,
    unfinished_before,
)
from stoker.training.recovery import Replanned, emit_replanned
from stoker.training.telemetry import Sink
from stoker.units import Duration


def choose_run_directory(
    prepared: ResolvedJob, run_dir: str | Path | None, resume: str | None, parent: RunDirectory | None, *, new: bool
) -> tuple[RunDirectory, str | None]:
    """The directory to train in, and a message about the choice, if there is one."""
    if resume is None:
        choice = choose_directory(
            runs_root(),
            prepared.spec,
            run_dir=None if run_dir is None else Path(run_dir),
            new=new,
            job_name=prepared.spec.name,
            forked_from=None if parent is None else name_in(runs_root(), parent),
            earlier=prepared.spec_by_text,
        )
        because = choice.because
        if not (choice.continues or new or run_dir or parent):
            because = "\n".join(filter(None, (because, _left_unfinished(prepared)))) or None
        return choice.directory, because
    directory = find_run(runs_root(), resume)
    run = directory.read_run()
    require_same_spec(directory, prepared.spec, prepared.spec_by_text)
    if run.status == "finished":
        raise BadRun(f"{run.name} is finished: there is nothing to resume",
                     remedy=f"Train on from it under a longer job with --fork {run.name}.")  # fmt: skip
    return directory, f"{run.name} is continued, as asked."


def _left_unfinished(prepared: ResolvedJob) -> str | None:
    """The message for a job file that was changed while a run of it is unfinished: the run, the change, the ways on."""
    left = unfinished_before(runs_root(), prepared.spec)
    if not left:
        return None
    directory, theirs = left[0]
    changes = "; ".join(describe_changes(prepared.spec_like(theirs), theirs, most=4))
    others = f" {len(left) - 1} more of this job file are unfinished (`stoker runs`)." if len(left) > 1 else ""
    return (
        f"{directory.name} is unfinished, {headway_of(directory.read_headway())}, and is not continued, since the job "
        f"has changed: {changes}. This run starts at 0. To go on from the other one's last checkpoint under the job as "
        f"it is now: --fork {directory.name}; to continue it, undo the change, then --resume {directory.name}.{others}"
    )


def require_same_plan(directory: RunDirectory, given: Plan | None) -> None:
    """Refuse a plan that is not the one the run began with."""
    decision = directory.read_decision()
    if given is None or decision is None:
        return
    began = decision.chosen.plan
    if began != dataclasses.replace(
        given, checkpoint_every_s=began.checkpoint_every_s, device_mtbf_h=began.device_mtbf_h
    ):
        raise BadRun(
            f"{directory.name} began under another plan and goes on under it: {began.in_words()}",
            remedy="Drop --plan to continue it, or start another run with --new.",
        )


def saving_every(interval: Duration | None, device_mtbf_h: float | None, decision: Decision) -> Decision:
    """The decision with another time between checkpoints in its plan, or another failure rate to compute it from."""
    if interval is None and device_mtbf_h is None:
        return decision
    plan = dataclasses.replace(decision.chosen.plan, device_mtbf_h=device_mtbf_h)
    if interval is not None:
        plan = dataclasses.replace(plan, checkpoint_every_s=interval.value, device_mtbf_h=None)
    return with_plan(decision, plan)


def create_run(
    directory: RunDirectory,
    prepared: ResolvedJob,
    device: Device,
    decision: Decision,
    coupling: Coupling,
    parent: RunDirectory | None,
) -> None:
    """Create the run on disk."""
    run = records.Run(
        name=directory.name,
        status="unfinished",
        created_at=datetime.now(UTC).isoformat(timespec="microseconds"),
        spec_digest=prepared.spec.digest(),
        total_samples=decision.chosen.forecast.total_samples,
        forked_from=None if parent is None else name_in(runs_root(), parent),
    )
    RunDirectory.create(
        directory.path, run, prepared.spec, decision=decision, device=device, coupling=coupling,
        environment=environment(device, decision.chosen.plan),
    )  # fmt: skip


@contextmanager
def discard_on_error(directory: RunDirectory) -> Iterator[None]:
    """Delete the new run directory if it cannot be filled."""
    try:
        yield
    except StokerError:
        with suppress(StokerError):  # the first error is the one to report
            directory.discard()
        raise


def device_of(directory: RunDirectory, asked: Device, on: str) -> Device:
    """The attached device that the run began on.

    Raises:
        BadRun: the device is not attached, or another one was asked for by name.
    """
    decision = directory.read_decision()
    began = asked.torch_name if decision is None else decision.chosen.plan.device
    device = next((device for device in attached_devices() if device.torch_name == began), None)
    if device is None or (on != "here" and asked.torch_name != began):
        why = "is not attached to this machine" if device is None else f"is not {on}"
        raise BadRun(
            f"{directory.name} began on {began}, which {why}, and goes on where it began",
            remedy=f"Start another run with --new, or from this one's state with --fork {directory.name}.",
        )
    return device


def chosen_plan(
    directory: RunDirectory, checkpoint_every: Duration | None, device_mtbf_h: float | None = None
) -> tuple[Decision, Coupling]:
    """The plan in force, with the checkpoint interval asked for now; a change is written for the other processes."""
    decision, coupling = directory.read_decision(), directory.read_coupling()
    if decision is None or coupling is None:
        raise BadRun(f"{directory.path} has lost its plan", remedy="Start another run with --new.")
    present = decision_in_force(directory, decision)
    asked = saving_every(checkpoint_every, device_mtbf_h, present)
    if asked != present:
        directory.write_changed_plan(asked.chosen.plan)
    return asked, coupling


def plan_for_layout(layout: Layout, plan: Plan, coupling: Coupling, job: Job) -> Plan:
    """The plan in another layout, with its micro-batch, or the least that is legal there.

    Each process takes its part of a group of coupled samples in one pass: fewer processes take larger parts.
    """
    sharing = layout if job.sync is None else ONE_PROCESS
    size = plan.micro_batch
    if coupling.group is not None and micro_batch_problem(coupling, size, job.batch, sharing) is not None:
        size = math.ceil(min(coupling.group, job.batch) / sharing.data_size)
    return dataclasses.replace(plan, layout=layout, micro_batch=size)


def fit_plan_to_ranks(
    directory: RunDirectory,
    job: Job,
    chosen: tuple[Decision, Coupling],
    count: int,
    device: Device,
    sinks: Sequence[Sink],
) -> tuple[Decision, Coupling]:
    """The plan for `count` processes; a change is written into the run.

    Raises:
        BadRun: the layout that the run began with cannot be spread over so many processes.
    """
    decision, coupling = chosen
    old = decision.chosen.plan
    if old.layout.world_size == count:
        return chosen
    began = directory.read_decision()
    first = old.layout if began is None else began.chosen.plan.layout  # `old` may have lost processes, or been one
    layout = ONE_PROCESS if count == 1 else first.resized(count)
    if layout is None:
        raise BadRun(
            f"{directory.name} was spread over {first.in_words()}, which {count} processes cannot take over",
            remedy=f"Use a multiple of {first.stages * first.tensor} processes, one (`--on here`), or start "
            "another run with --new.",
        )
    threads = max(1, device.cores // count) if device.kind == "cpu" else old.threads
    new = plan_for_layout(layout, dataclasses.replace(old, threads=threads, captured=False), coupling, job)
    directory.write_changed_plan(new)
    change = Replanned(old=old, new=new, why=f"{count} processes go on where {old.layout.world_size} stopped")
    emit_replanned(lambda kind, **fields: emit_event(sinks, kind, **fields), change, directory.read_run().samples)
    return with_plan(decision, new), coupling


def emit_event(sinks: Sequence[Sink], kind: records.EventKind, **fields: Any) -> None:
    """Send an event that happened now."""
    event = Event(kind=kind, at=time.time(), fields=fields)
    for sink in sinks:
        sink(event)


def decision_in_force(directory: RunDirectory, decision: Decision) -> Decision:
    """The decision with the plan in force: the one the run began with, or what replaced it."""
    changed = directory.read_changed_plan()
    return decision if changed is None else with_plan(decision, changed)


def with_plan(decision: Decision, plan: Plan) -> Decision:
    """The decision with another plan in the place of the chosen one, whose forecast stays."""
    candidates = (dataclasses.replace(decision.chosen, plan=plan), *decision.candidates[1:])
    return dataclasses.replace(decision, candidates=candidates)


_FLAGS = ("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "CUBLAS_WORKSPACE_CONFIG")


def environment(device: Device, plan: Plan) -> Environment:
    """The determinism class of a run of `plan` on `device` in this process."""
    flags = {name: os.environ[name] for name in _FLAGS if name in os.environ}
    return Environment(
        device_model=device.model,
        device_kind=device.kind,
        threads=plan.threads,
        torch_version=torch.__version__,
        python_version=platform.python_version(),
        platform=f"{sys.platform}-{platform.machine()}",
        libraries={"numpy": np.__version__, "cuda": str(torch.version.cuda), "driver": device.driver},
        flags={
            **flags,
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "deterministic_algorithms": str(torch.are_deterministic_algorithms_enabled()),
            "matmul_precision": torch.get_float32_matmul_precision(),
        },
    )

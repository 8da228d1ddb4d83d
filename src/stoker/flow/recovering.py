"""Training on through what can be mended: changes of plan written down, runs taken up from their last checkpoint."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from datetime import UTC, datetime

import torch

from stoker import training
from stoker.errors import RunFailed
from stoker.flow.memory_failures import memory_identity
from stoker.flow.preparation import Prepared
from stoker.flow.starting import Session
from stoker.records import Decision, Device, Plan
from stoker.records.out_of_memory import OutOfMemory
from stoker.store import RunDirectory, cache_root
from stoker.store.out_of_memory import OutOfMemoryStore


def in_force(directory: RunDirectory, decision: Decision) -> Decision:
    """The decision with the plan that the run goes on under: the one it began with, or what that gave way to."""
    changed = directory.read_changed_plan()
    return decision if changed is None else with_plan(decision, changed)


def with_plan(decision: Decision, plan: Plan) -> Decision:
    """The decision with another plan in the chosen one's place; its forecast stays what was forecast."""
    return dataclasses.replace(
        decision, candidates=(dataclasses.replace(decision.chosen, plan=plan), *decision.candidates[1:])
    )


def train_through(
    begin: Callable[[Decision], Session], decision: Decision, note: Callable[[training.Replanned], None]
) -> Session:
    """Train to the end, or until asked to stop; where a session asks to be rolled back, another takes its place.

    Each of them changes the plan in a direction in which there are few steps (fewer samples at once, then fp32), so
    that this ends.

    Args:
        begin: makes a session from what the run's directory holds.
        decision: what it begins under.
        note: writes a change of plan down.
    """
    while True:
        session = begin(decision)
        try:
            session.position = session.loop.run(session.position)
        except training.RollBack as request:
            change = request.change
        else:
            return session
        telemetry, samples = session.loop.telemetry, session.loop.reached.samples
        # Whatever holds the old model is let go of before a new one is made.
        del session
        gc.collect()
        if change.new.device.startswith("cuda"):
            torch.cuda.empty_cache()
        note(change)
        training.tell_replanned(telemetry.emit, change, samples)
        telemetry.emit("recovered", samples=samples, what="rolled back", why=change.why)
        decision = with_plan(decision, change.new)


def noting(
    prepared: Prepared, directory: RunDirectory, device: Device, decision: Decision
) -> Callable[[training.Replanned], None]:
    """A function that writes a change of plan into the run, for a resume, and into the cache, for the next plan."""

    def note(change: training.Replanned) -> None:
        directory.write_changed_plan(change.new)
        if change.old.micro_batch == change.new.micro_batch:
            return
        is_forecast = change.old == decision.chosen.plan
        failure = OutOfMemory(
            device_model=device.model,
            torch_version=torch.__version__,
            job=memory_identity(prepared),
            plan=change.old,
            run=directory.name,
            at=datetime.now(UTC).isoformat(timespec="seconds"),
            forecast_bytes=decision.chosen.forecast.peak_bytes.value if is_forecast else None,
            reachable_bytes=change.reachable_bytes,
        )
        try:
            OutOfMemoryStore(cache_root() / "calibration").append(failure)
        except RunFailed:  # a cache that cannot be written costs the next run one update done twice
            return

    return note

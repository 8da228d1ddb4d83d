"""A run in this process alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from stoker import profiling, training
from stoker.devices.malloc import apply_malloc
from stoker.errors import RunFailed
from stoker.flow.finishing import final_metrics, finish, stopped
from stoker.flow.opening import tell
from stoker.flow.preparation import Prepared, users_code
from stoker.flow.profiled_updates import profile_updates
from stoker.flow.recovering import noting, train_through
from stoker.flow.runs import Run
from stoker.flow.starting import Session, ready
from stoker.records import Coupling, Decision, Device, Event
from stoker.store import RunDirectory
from stoker.training import Sink


def train_alone(
    prepared: Prepared,
    directory: RunDirectory,
    device: Device,
    chosen: tuple[Decision, Coupling],
    sinks: Sequence[Sink],
    *,
    profile: bool = False,
    others_share: float = 0.0,
    on_update: Callable[[training.Update], None] | None = None,
) -> Run:
    """Train, test and report the run in `directory`, whose lock is held, from where it is.

    Args:
        prepared: the job made ready.
        directory: the run's.
        device: what it runs on.
        chosen: what it begins under, and how samples influence each other.
        sinks: receive every event, the run's own log among them.
        profile: run a few updates under PyTorch's profiler.
        others_share: of the CPU, that other processes used just now, while the plan was chosen [0 to 1].
        on_update: looks on at every update.

    Raises:
        RunFailed: training could not go on; what was saved is intact.
    """
    decision, coupling = chosen
    plan = decision.chosen.plan

    def sink(event: Event) -> None:
        for one in sinks:
            one(event)

    if problem := apply_malloc(plan.malloc):
        tell(sinks, "warned", message=f"memory is had as it is by default: {problem}")
    with (
        profiling.threads(plan.threads), training.stop_on_signals() as stop,
        users_code("training", prepared.entry, RunFailed), profiling.PeakMemory(plan.device) as peak,
    ):  # fmt: skip
        note, began = noting(prepared, directory, device, decision), time.monotonic()

        def begin(chosen: Decision) -> Session:
            session = ready(
                prepared, directory, device, decision=chosen, coupling=coupling, sink=sink, stop=stop, replanned=note,
                age_s=time.monotonic() - began,
            )  # fmt: skip
            if profile:
                profile_updates(session)
            session.loop.on_update = on_update
            session.loop.threads = training.thread_keeper(
                session.step, session.loop.telemetry.emit,
                usual_samples_per_s=decision.chosen.forecast.samples_per_s.value, others_share=others_share,
            )  # fmt: skip
            return session

        session = train_through(begin, decision, note)
        if not session.is_complete:
            return stopped(session, stop.reason or "asked")
        return finish(session, final_metrics(session), peak.num_bytes)

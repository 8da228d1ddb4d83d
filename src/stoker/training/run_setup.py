"""The setup of a run on disk: its directory, new or continued, and what is written into it.

Its environment is the determinism class: all that must be equal for two runs to be bit-equal.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch

from stoker import records
from stoker.devices import attached_devices
from stoker.errors import BadRun, StokerError
from stoker.loading.datasets import input_columns_of
from stoker.planning.resolved_job import ResolvedJob
from stoker.records import Coupling, Decision, Device, Environment, Plan, PlanSwitch
from stoker.store import (
    RunDirectory,
    choose_directory,
    default_directory,
    describe_changes,
    find_run,
    headway_of,
    name_in,
    require_same_spec,
    runs_root,
    unfinished_before,
)
from stoker.store.remote_runs import RemoteRuns, bring_home
from stoker.store.run_files import LAUNCH


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
        )
        _require_here(choice.directory)
        because = choice.because
        if not (choice.continues or new or run_dir or parent):
            because = "\n".join(filter(None, (because, _left_unfinished(prepared)))) or None
        return choice.directory, because
    directory = find_run(runs_root(), resume)
    _require_here(directory)
    run = directory.read_run()
    require_same_spec(directory, prepared.spec)
    if run.status == "finished":
        raise BadRun(
            f"{run.name} is finished: there is nothing to resume",
            remedy=f"Train on from it under a longer job with --fork {run.name}.",
        )
    return directory, f"{run.name} is continued, as asked."


def bring_kept_runs(
    remote: RemoteRuns, prepared: ResolvedJob, run_dir: str | Path | None, *, resume: str | None, fork: str | None
) -> list[str]:
    """Fetch the runs that this command may mean and that are further where they are kept; what people should know.

    Args:
        remote: where runs are kept.
        prepared: the job.
        run_dir: the run's directory, if it was given.
        resume: the run named by `--resume`.
        fork: the run named by `--fork`, whose newest checkpoint is needed.

    Raises:
        BadRun: a run there cannot be read or used.
    """
    said: list[str] = []
    for name, is_parent in ((resume, False), (fork, True)):
        if name is not None and "/" not in name:
            bring_home(remote, runs_root() / name, said.append, family=False, is_parent=is_parent)
    base = default_directory(runs_root(), prepared.spec.name, prepared.spec) if run_dir is None else Path(run_dir)
    bring_home(remote, base, said.append)
    return said


def _left_unfinished(prepared: ResolvedJob) -> str | None:
    """The message for a job that was changed while a run of it is unfinished: the run, the change, the ways on."""
    left = unfinished_before(runs_root(), prepared.spec)
    if not left:
        return None
    directory, theirs = left[0]
    changes = "; ".join(describe_changes(prepared.spec, theirs, most=4))
    others = f" {len(left) - 1} more of this job are unfinished (`stoker runs`)." if len(left) > 1 else ""
    return (
        f"{directory.name} is unfinished, {headway_of(directory.read_headway())}, and is not continued, since the job "
        f"has changed: {changes}. This run starts at 0. To go on from the other one's last checkpoint under the job as "
        f"it is now: --fork {directory.name}; to continue it, undo the change, then --resume {directory.name}.{others}"
    )


def note_continuation_here(directory: RunDirectory) -> None:
    """Write into the record of a run that was executed elsewhere that it goes on here.

    Its place knows nothing of it: without a note the same command would go on there from an older checkpoint.
    """
    launch = directory.read_launch()
    if launch is not None and not launch.continued_here_at:
        moment = datetime.now(UTC).isoformat(timespec="milliseconds")
        directory.write(LAUNCH, replace(launch, continued_here_at=moment))


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
        directory.path,
        run,
        prepared.spec,
        decision=decision,
        device=device,
        coupling=coupling,
        columns=input_columns_of(prepared.job),
        environment=environment(device, decision.chosen.plan),
    )
    if not decision.is_settled:
        began = decision.chosen.plan
        directory.append_switch(
            PlanSwitch(update=0, samples=0, plan=began, kind="trial", why="legal whatever the model")
        )


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


def _require_here(directory: RunDirectory) -> None:
    """Nothing unless the run goes on elsewhere, as far as is known here; then BadRun is raised."""
    launch = directory.read_launch()
    if launch is not None and launch.is_going_on:
        raise BadRun(
            f"{directory.name} is {launch.state.phase} at {launch.place}, as last seen.",
            remedy=f"`stoker attach {directory.name}` shows it. `stoker stop {directory.name}` ends it there and "
            "fetches it; --resume then continues it here.",
        )

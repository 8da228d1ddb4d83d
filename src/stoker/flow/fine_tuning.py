"""Training what is left of a pruned network, with the whole one as its teacher: a run like any other."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from torch import nn

from stoker import records
from stoker.compressing.pruning import Distillation, rebuilt
from stoker.errors import RunFailed
from stoker.flow.preparation import prepare
from stoker.flow.running import train
from stoker.flow.runs import PRUNING, Run
from stoker.jobs import Job, schedules
from stoker.records.pruning import Pruning
from stoker.store import RunDirectory, runs_root, write_atomic
from stoker.training import Sink
from stoker.units import Duration

SHARE_OF_TRAINING = 0.25
"""How long a pruned network is trained for, of what the job itself was."""

RATE = 0.3
"""The highest learning rate of that, of the job's own: what is left is near where it shall be."""


@dataclass(frozen=True)
class Reduced:
    """A schedule at a share of its height."""

    share: float
    schedule: schedules.Schedule

    def __call__(self, progress: float) -> float:
        """The factor of the learning rate at `progress`."""
        return self.share * self.schedule(progress)


def tuning_job(job: Job, module: nn.Module, teacher: nn.Module, until: Duration, *, name: str) -> Job:
    """The job that trains what is left of a network: the original's data and loss, and the whole network as teacher.

    What would be chosen by validation data is left out: a pruned network is accepted on rows of it that nothing was
    chosen by, its weights included. So the last weights are kept, and nothing stops early. How the original began,
    was averaged and was spread over machines is not taken over either, nor are its mixtures of samples.

    Raises:
        BadJob: the loss or step does not go with a teacher.
    """
    return dataclasses.replace(
        job, model=module, loss=Distillation(teacher, job), label_smoothing=0.0, until=until, name=name,
        schedule=Reduced(RATE, schedules.warmup_cosine()), select="last", stop=(), test=None, recipe=None, mix=None,
        ema=None, swa=None, sync=None, init=None, freeze=None,
    )  # fmt: skip


def share_of(until: Duration) -> Duration:
    """A quarter of a job's length, in its own unit."""
    value = SHARE_OF_TRAINING * until.value
    return dataclasses.replace(until, value=float(math.ceil(value)) if until.unit == "updates" else value)


def trained(original: Run, job: Job, teacher: nn.Module, pruning: Pruning, sink: Sink | None) -> Run:
    """A run that trained the network of a pruning on: continued if it was stopped, and taken if it is finished.

    Args:
        original: the run whose model was pruned.
        job: its job, made ready.
        teacher: its model.
        pruning: what was decided.
        sink: receives the run's events; None: a display on standard error.

    Raises:
        BadJob: the job's loss or step does not go with a teacher.
        RunFailed: training was asked to stop, or could not go on.
    """
    name = f"{original.name}-pruned-{pruning.target:g}x"
    tuning = tuning_job(job, rebuilt(teacher, pruning.cut), teacher, pruning.until, name=name)
    directory = RunDirectory(runs_root() / f"{name}-{prepare(tuning).spec.digest()[:6]}")
    if not directory.is_run or directory.read_run().status != "finished":
        train(tuning, run_dir=directory.path, sink=sink)
    run = Run(directory, job)
    if run.status != "finished":
        raise RunFailed(
            f"{run.name} was stopped before what is left of {original.name} was trained",
            remedy="The same command goes on where it was.",
        )
    record = dataclasses.replace(pruning, run=run.name, before=original.cuts)
    write_atomic(run.path / PRUNING, records.dumps(record) + "\n", what="what was pruned")
    return run

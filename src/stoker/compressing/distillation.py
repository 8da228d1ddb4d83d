"""Train a pruned network with the whole one as its teacher: a run of the job with a distillation loss.

What: the job's own loss plus the distance from the teacher's answer to the same input: for classes the Kullback-Leibler
divergence of both distributions at a temperature, times its square, which keeps gradients in scale; for numbers the
squared distance. The teacher sees the student's inputs, augmentation included, in evaluation mode.
Use when: a pruned network has to recover. The teacher says more of each sample than its label, so that little training
is enough.
Costs: a forward pass of the teacher with every micro-batch.
Does not combine with: losses of the form loss(model, batch), which do not expose the output.
Source: Hinton et al. 2015, "Distilling the Knowledge in a Neural Network", https://arxiv.org/abs/1503.02531, section 2.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from stoker.errors import BadJob, RunFailed
from stoker.jobs import Job, Loss, schedules
from stoker.loading.fields import Content, tensors_of
from stoker.loading.lengths import IGNORED_TARGET
from stoker.planning.resolved_job import resolve_job
from stoker.records.compression import Pruning
from stoker.stepping.foreign_models import in_full_precision, scores
from stoker.stepping.losses import takes_model
from stoker.stepping.named_losses import LOSSES
from stoker.store import RunDirectory, runs_root
from stoker.store.run_files import PRUNING
from stoker.training.pruned_network import rebuild_pruned
from stoker.training.run_handle import Run
from stoker.training.telemetry import Sink
from stoker.training.train import train
from stoker.units import Duration

TEMPERATURE = 4.0
TEACHERS_SHARE = 0.7
"""Share of the teacher's part in the loss."""

_CLASSES = {"cross_entropy": 1, "token_cross_entropy": -1}
"""Dimension of the classes, by the name of the loss."""


class Distillation(nn.Module):
    """The loss of a job whose model learns from its labels and from a teacher: `Job(loss=…)`.

    A module, so that the teacher moves with the job's tensors and is described by its weights.

    Args:
        teacher: has the inputs and output shapes of the job's model; copied, in evaluation mode.
        job: its loss, inputs and target are used.
        temperature: divides both logits; a higher one gives more weight to classes that are not the answer.
        share: weight of the teacher's part [0 to 1].

    Raises:
        BadJob: see `require_output`.
    """

    def __init__(
        self, teacher: nn.Module, job: Job, *, temperature: float = TEMPERATURE, share: float = TEACHERS_SHARE
    ) -> None:
        super().__init__()
        require_output(job)
        self.teacher = copy.deepcopy(teacher).eval().requires_grad_(requires_grad=False)
        self.loss: Any = job.objective.loss
        self.label_smoothing = job.objective.label_smoothing
        self.inputs, self.target = job.fields.inputs, job.fields.target
        self.temperature, self.share = temperature, share
        self._fields = job.fields

    def forward(self, model: Callable[..., Any], batch: Content) -> Loss:
        """Summed loss of a batch, with the count of the job's own loss."""
        output = in_full_precision(self._fields.call(model, batch))
        target = self._fields.target_of(batch)
        own = self._own(output, target)
        with torch.no_grad():
            taught = in_full_precision(self._fields.call(self.teacher, batch))
        pairs = zip(_tensors(scores(output)), _tensors(scores(taught)), strict=True)
        distance = sum((self._distance(a, b, target) for a, b in pairs), start=torch.zeros_like(own.sum))
        return Loss((1 - self.share) * own.sum + self.share * distance, own.count)

    def _own(self, output: Any, target: Any) -> Loss:
        """The job's own loss."""
        function: Callable[..., Any] = LOSSES[self.loss] if isinstance(self.loss, str) else self.loss
        if self.label_smoothing:
            function = functools.partial(function, label_smoothing=self.label_smoothing)
        is_users = not isinstance(self.loss, str) and not type(self.loss).__module__.startswith("torch.nn")
        loss = function(output if is_users else scores(output), target)
        if isinstance(loss, Loss):
            return loss
        rows = len(_tensors(output)[0])
        return Loss(loss * rows, rows) if loss.dim() == 0 else Loss(loss.sum(), loss.numel())

    def _distance(self, output: torch.Tensor, taught: torch.Tensor, target: Any) -> torch.Tensor:
        """Distance from the teacher, summed over samples, or over tokens that have a target."""
        if isinstance(self.loss, str) and self.loss in _CLASSES:
            dim = _CLASSES[self.loss]
            student = F.log_softmax(output / self.temperature, dim)
            teacher = F.log_softmax(taught / self.temperature, dim)
            each = F.kl_div(student, teacher, reduction="none", log_target=True).sum(dim)
            if isinstance(target, torch.Tensor) and not target.is_floating_point() and target.shape == each.shape:
                each = each * (target != IGNORED_TARGET)
            return each.sum() * self.temperature**2
        if self.loss == "binary_cross_entropy":
            logits, soft = output / self.temperature, torch.sigmoid(taught / self.temperature)
            return F.binary_cross_entropy_with_logits(logits, soft, reduction="sum") * self.temperature**2
        return F.mse_loss(output, taught, reduction="sum")


def require_output(job: Job) -> None:
    """Refuse a job that a teacher cannot take part in.

    Raises:
        BadJob: its loss is not of single samples by their output and target.
    """
    function = job.objective.loss.forward if isinstance(job.objective.loss, nn.Module) else job.objective.loss
    if job.step is not None or job.objective.loss in (None, "own") or (callable(function) and takes_model(function)):
        raise BadJob(
            "a teacher needs the model's output, and this job's loss or step keeps it to itself",
            remedy="Pruning goes with losses by name, or of the form loss(output, target).",
        )
    if job.objective.scope == "batch":
        raise BadJob("pruning takes losses of single samples, and this job's is of a whole batch")


def _tensors(output: Any) -> list[torch.Tensor]:
    """The tensors of floating point in an output, in order."""
    return [tensor for tensor in tensors_of(output) if tensor.is_floating_point()]


SHARE_OF_TRAINING = 0.25
"""Length of a pruned network's training, relative to the job's."""

RATE = 0.3
"""Its highest learning rate, relative to the job's: the network is close to a solution already."""


@dataclass(frozen=True)
class Reduced:
    """A schedule at a share of its height."""

    share: float
    schedule: schedules.Schedule

    def __call__(self, progress: float) -> float:
        """Factor of the learning rate at `progress` [1]."""
        return self.share * self.schedule(progress)


def tuning_job(job: Job, module: nn.Module, teacher: nn.Module, until: Duration, *, name: str) -> Job:
    """The job that trains a pruned network: the original's data and loss, and the whole network as teacher.

    Nothing is chosen by validation data, since a pruned network is accepted on rows of it: the last weights are kept,
    and nothing stops early. Initial weights, averaging, synchronisation and mixing of the original are left out too.

    Raises:
        BadJob: the loss or step does not go with a teacher.
    """
    objective = dataclasses.replace(job.objective, loss=Distillation(teacher, job), label_smoothing=0.0)
    return dataclasses.replace(
        job,
        model=module,
        loss=objective,
        until=until,
        name=name,
        schedule=Reduced(RATE, schedules.warmup_cosine()),
        stop=(),
        test=None,
        recipe=None,
        mix=None,
        average=None,
        evaluation=dataclasses.replace(job.evaluation, select="last"),
        sync=None,
        init=None,
        freeze=None,
    )


def share_of(until: Duration) -> Duration:
    """A quarter of a job's length, in its own unit."""
    value = SHARE_OF_TRAINING * until.value
    return dataclasses.replace(until, value=float(math.ceil(value)) if until.unit == "updates" else value)


def trained(original: Run, job: Job, teacher: nn.Module, pruning: Pruning, sink: Sink | None) -> Run:
    """The finished run that trained a pruned network; continued if it was stopped.

    Args:
        original: the run whose model was pruned.
        job: its job, resolved.
        teacher: its model.
        pruning: the decision.
        sink: receives the run's events; None: a display on standard error.

    Raises:
        BadJob: the job's loss or step does not go with a teacher.
        RunFailed: training was stopped, or failed.
    """
    name = f"{original.name}-pruned-{pruning.target:g}x"
    tuning = tuning_job(job, rebuild_pruned(teacher, pruning.cut), teacher, pruning.until, name=name)
    directory = RunDirectory(runs_root() / f"{name}-{resolve_job(tuning).spec.digest()[:6]}")
    if not directory.is_run or directory.read_run().status != "finished":
        train(tuning, run_dir=directory.path, sink=sink)
    run = Run(directory, job)
    if run.status != "finished":
        raise RunFailed(
            f"{run.name} was stopped before what is left of {original.name} was trained",
            remedy="The same command goes on where it was.",
        )
    record = dataclasses.replace(pruning, run=run.name, before=original.cuts)
    directory.write(PRUNING, record)
    return run

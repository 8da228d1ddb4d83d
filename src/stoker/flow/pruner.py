"""What pruning works with: a run, its job made ready, its model as exported, and where networks are timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from stoker import exporting
from stoker.artifacts import Artifact
from stoker.compressing import Course
from stoker.compressing.pruning import prunable, require_output, scores_of
from stoker.engines.torch_module import as_tensor
from stoker.errors import BadJob
from stoker.exporting import About, JobInputs, job_inputs, named_outputs
from stoker.flow.generators import generators_kept
from stoker.flow.preparation import Prepared, prepare, users_code
from stoker.flow.rows_of_jobs import stored_as
from stoker.flow.runs import Run, load
from stoker.jobs import Job
from stoker.loading.keys import Stream, key_of
from stoker.loading.order import KeyedPermutation
from stoker.records import BATCH, EngineName, ServingPrecision
from stoker.records.pruning import Importance
from stoker.stepping.losses import Objective

_BATCHES, _ROWS = 16, 64
"""Batches of training data that gradients are taken of, and samples in each."""


@dataclass(frozen=True)
class Pruner:
    """What pruning works with: the run and its job made ready, the model as exported, and where it is timed."""

    run: Run
    prepared: Prepared
    teacher: nn.Module
    taken: JobInputs
    course: Course
    runs_in: tuple[EngineName, ServingPrecision]
    proved_on: str
    tell: Callable[[str], None]

    def ask(self, module: nn.Module) -> Sequence[torch.Tensor]:
        """The outputs of a network like the teacher for the first training rows."""
        rows = self.taken.arrays(range(4), self.prepared.data.train)
        return tuple(named_outputs(self.taken.call(module, *map(as_tensor, rows.values()))).values())

    def export(self, module: nn.Module, out: Path) -> Artifact:
        """A network like the teacher, with the signature of the model given.

        Raises:
            BadArtifact: it cannot be exported.
        """
        manifest = self.course.source.manifest
        named = {
            spec.name: {at: dim for at, dim in enumerate(spec.shape) if isinstance(dim, str) and dim != BATCH}
            for spec in manifest.inputs
        }
        about = About(
            name=manifest.name, dynamic={name: dims for name, dims in named.items() if dims}, dims=manifest.dims,
            labels=manifest.labels,
        )  # fmt: skip
        rows = self.taken.arrays(np.linspace(0, self.taken.samples.num_at_hand - 1, num=8).astype(np.int64))
        return exporting.export_call(module.eval(), self.taken.call, rows, out, about)


def pruner_of(
    source: Artifact, job: Job | None, course: Course, *, fast_dtypes: Sequence[str], proved_on: str,
    tell: Callable[[str], None],
) -> Pruner:  # fmt: skip
    """What it takes to prune the model of a version that was exported from a run.

    Raises:
        BadJob: it came from elsewhere, or the job's loss or step does not go with a teacher.
        BadRun: its run is gone.
    """
    origin = source.manifest.source
    if origin.kind != "run":
        raise BadJob(
            f"{source.path} was not exported from a run (it came from {origin.kind} {origin.name}): what is left after "
            "pruning has to be trained on, and there is no job to train it by",
            remedy="Prune the version that `stoker export RUN` wrote, or leave --prune out.",
        )
    run = load(origin.name)
    with users_code("the job's data", None), generators_kept():
        prepared = prepare(job or run.job())
        require_output(prepared.job)
        teacher = run.model(prepared.job)
        samples = prepared.data.valid or prepared.data.test or prepared.data.train
        taken = stored_as(job_inputs(prepared.job, teacher, samples), source.manifest)
    engine: tuple[EngineName, ServingPrecision] = (source.manifest.engine, source.manifest.precision)
    if "bf16" in fast_dtypes and engine[0] == "openvino":
        engine = ("openvino", "bf16")
    return Pruner(run, prepared, teacher, taken, course, engine, proved_on, tell)


def channel_scores(pruner: Pruner, importance: Importance) -> dict[str, NDArray[np.float64]]:
    """How important each channel that can go is, for what it costs; see `scores_of`.

    Raises:
        CannotPrune: none can go.
    """
    groups = prunable(pruner.teacher, pruner.ask)
    return scores_of(
        pruner.teacher, pruner.ask, groups, importance=importance, gradients=lambda module: _gradients(pruner, module)
    )


def _gradients(pruner: Pruner, module: nn.Module) -> Iterator[None]:
    """Leave the gradient of the job's loss on some training batches, one after another, in `module`'s parameters."""
    objective, samples = Objective(pruner.prepared.job), pruner.prepared.data.train
    count = samples.num_at_hand
    order = KeyedPermutation(count, key_of(Stream.HOLDOUT, pruner.prepared.job.seed, len(samples), 2))
    for start in range(0, min(count, _BATCHES * _ROWS), _ROWS):
        rows = order(np.arange(start, min(start + _ROWS, count), dtype=np.int64))
        module.zero_grad(set_to_none=True)
        loss = objective.loss(module, samples.prepare(samples.fetch(rows, 0)), len(rows))
        (loss.sum / loss.count).backward()
        yield

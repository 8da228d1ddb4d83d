"""The subject of a verification: a job with its data, plan and coupling, and a time limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from stoker.jobs import Job
from stoker.jobs.run_length import Extent
from stoker.loading.batches import Batch, BatchSource
from stoker.loading.datasets import Datasets
from stoker.records import Coupling, Loader, Plan, Position, Verdict
from stoker.stepping.step import Step

Level = Literal["bit-equal", "same mathematics", "same law", "none"]


class Timebox:
    """A time limit [s] that begins at construction."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self.seconds, self.clock = seconds, clock
        self.started = clock()

    @property
    def spent_s(self) -> float:
        """Time since the beginning [s]."""
        return self.clock() - self.started

    @property
    def is_over(self) -> bool:
        """Whether no time is left."""
        return self.spent_s >= self.seconds


@dataclass(frozen=True)
class Subject:
    """A job under its plan; `begins_under` is another one for a run's first updates, which the plan takes over from."""

    job: Job
    data: Datasets
    plan: Plan
    coupling: Coupling
    begins_under: Plan | None = None

    @property
    def extent(self) -> Extent:
        """The epochs, updates and samples of the run."""
        return self.data.extent(self.job)

    @property
    def plain_loader(self) -> Loader:
        """The loader without worker processes."""
        return "memory" if self.data.train.is_in_memory else "inline"

    @property
    def total_updates(self) -> int:
        """Number of updates of the run, for the schedule [updates]; one epoch where the job is given seconds."""
        extent = self.extent
        return extent.updates_per_epoch if self.job.until.unit == "seconds" else extent.updates_in(self.job.until)

    def without_workers(self) -> Subject:
        """The same with batches made in this process: many short streams would each start workers."""
        return replace(self, plan=replace(self.plan, loader=self.plain_loader, num_workers=0))

    def source(self, step: Step) -> BatchSource:
        """The source of training batches for `step`."""
        pipeline = step.pipeline(self.data.train, augmented=True)
        return BatchSource(self.data.train, pipeline, self.extent, self.job.seed, step.plan)

    def first_batch(self, step: Step, size: int) -> Batch:
        """The first `size` samples of training."""
        train = self.data.train
        indices = self.source(step).order.indices(0, 0, min(size, len(train)))
        return Batch(train.fetch(indices, 0), indices, 0, step.pipeline(train, augmented=True))

    def progress(self, position: Position) -> float:
        """Share of the run before `position` [0 to 1]; beyond the end of a short run it begins at 0 again."""
        total = self.extent.position(self.total_updates).samples
        return (position.samples % total) / total


def verdict(question: str, answer: str, evidence: str, level: Level | None) -> Verdict:
    """The verdict on a question: passed at a level of the contract; or None, and it does not hold."""
    passed = level is not None
    return Verdict(question=question, answer=answer, passed=passed, level=level or "none", evidence=evidence)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal in type, shape and every bit (NaN equals the same NaN)."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    mine, theirs = (tensor.detach().cpu().contiguous().reshape(-1) for tensor in (one, other))
    if not mine.numel():
        return True
    return bool(np.array_equal(mine.view(torch.uint8).numpy(), theirs.view(torch.uint8).numpy()))

"""A job made small enough to be examined in the time there is: fewer samples in everything, in proportion."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from stoker.jobs import Job
from stoker.jobs.batch_size import with_rates_scaled
from stoker.jobs.more_optimizers import ScheduleFree
from stoker.records import Coupling, Plan
from stoker.verifying.subject import Subject

_SMALLEST = 8


def affordable_batch(batch: int, num_samples: float) -> int:
    """The batch, halved until it has at most `num_samples` samples, but not below eight.

    >>> affordable_batch(512, 100), affordable_batch(512, 1e9), affordable_batch(512, 0), affordable_batch(3, 0)
    (64, 512, 8, 3)
    """
    while batch > num_samples and batch // 2 >= _SMALLEST:
        batch //= 2
    return batch


def scaled(subject: Subject, batch: int) -> Subject:
    """The subject with an optimiser batch of `batch` samples; group and micro-batch keep their share of it.

    The learning rate shrinks with the batch, so that training stays as stable as it is (Goyal et al. 2017,
    https://arxiv.org/abs/1706.02677, section 2.1).
    """
    job, coupling = subject.job, subject.coupling
    if batch == job.batch:
        return subject
    group = (
        None if coupling.group is None else max(min(2, coupling.group), math.ceil(coupling.group * batch / job.batch))
    )
    small = replace(coupling, group=group)
    micro_batch = _micro_batch(subject.plan, small, coupling, batch, job.batch)
    return replace(
        subject,
        job=replace(
            job,
            batch=batch,
            coupling_group=None if job.coupling_group is None else group,
            **_slower(job, batch / job.batch),
        ),
        plan=replace(subject.plan, micro_batch=micro_batch),
        coupling=small,
    )


def _slower(job: Job, share: float) -> dict[str, Any]:
    """What of the job is replaced for a learning rate at a share of its height."""
    if isinstance(job.optimizer, ScheduleFree):  # takes no schedule
        return {"optimizer": with_rates_scaled(job.optimizer, share)}
    return {"schedule": lambda progress: job.schedule(progress) * share}


def other_micro_batches(coupling: Coupling, batch: int, taken: set[int]) -> list[int]:
    """Legal micro-batches other than those `taken`, the most telling first: those that leave a rest, then small ones.

    >>> separable = Coupling(kind="separable", group=None, causes=(), evidence="")
    >>> other_micro_batches(separable, 64, {64, 16})
    [7, 5, 3, 1, 32]
    >>> other_micro_batches(separable, 70, {70})
    [3, 7, 5, 1, 35]
    """
    sizes = [7, 5, 3, 1, batch // 2] if coupling.kind == "separable" else coupling.legal_micro_batches(batch)
    legal = [size for size in sizes if size not in taken and coupling.problem_with(size, batch) is None]
    return sorted(dict.fromkeys(legal), key=lambda size: batch % size == 0)


def reference_micro_batch(coupling: Coupling, batch: int) -> int:
    """What other plans are compared with: the whole batch of a separable job, else every group alone."""
    return batch if coupling.group is None else coupling.group


def _micro_batch(plan: Plan, small: Coupling, coupling: Coupling, batch: int, whole: int) -> int:
    if plan.micro_batch >= whole:
        return batch
    if coupling.group is None or small.group is None:
        return max(1, math.ceil(plan.micro_batch * batch / whole))
    return min(batch, plan.micro_batch // coupling.group * small.group)

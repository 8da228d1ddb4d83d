"""Averaged weights (SWA, schedule-free) in a run: when weights are taken, and batch-norm statistics at their mean.

What: batch norms of an average never saw data. Their statistics are computed from whole groups of training samples, in
training order from the start of epoch 0 and augmented as there. They pass through the model as the job's loss does,
with the averaged weights in place and all else in evaluation mode. Statistics are plain means over these groups, unlike
the decaying means of training.
Use when: `stoker.SWA` and schedule-free optimisers. Models without batch norms, and other averages, need none of it.
Costs: forward passes before each evaluation. Every process makes all of them, each group in one piece.
Does not combine with: models of which no process holds all.
Source: Izmailov et al. 2018, https://arxiv.org/abs/1803.05407, section 3.2; `torch.optim.swa_utils.update_bn` passes
over all data, with dropout on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from stoker.errors import BadJob
from stoker.jobs.averages import SWA
from stoker.jobs.run_length import Extent
from stoker.loading.batches import Batch, BatchSource
from stoker.loading.order import RandomStream, generators_kept, key_of, seed_generators
from stoker.records import Position
from stoker.stepping.batch_norm import batch_norms, statistics_of
from stoker.stepping.model import in_evaluation
from stoker.stepping.precision import autocasting, products_in
from stoker.stepping.step import Step
from stoker.stepping.uncompiled import uncompiled
from stoker.stepping.weight_averaging import ExponentialAverage

_BATCHES = 50
"""Default number of training batches for statistics."""


def average_is_due(settings: SWA, extent: Extent, total_updates: int, before: Position, after: Position) -> bool:
    """Whether the weights after the update from `before` to `after` go into the mean."""
    if after.updates == total_updates:
        return True
    has_begun = after.samples >= settings.start * extent.position(total_updates).samples
    return has_begun and extent.intervals(settings.every, before) < extent.intervals(settings.every, after)


def require_renewable(step: Step, source: BatchSource) -> None:
    """Refuse data that cannot be read again for statistics.

    Raises:
        BadJob: the averaged weights will need statistics, and the data are a stream.
    """
    is_of_training = step.average is None or isinstance(step.average, ExponentialAverage)
    if is_of_training or not _tracking(step.model) or source.samples.data_class == "indexed":
        return
    raise BadJob(
        f"the averaged weights need running statistics of their own for each batch norm, from the first training "
        f"batches, and {source.samples.name} is a {source.samples.data_class} that is read once",
        remedy="Use indexed data, another norm, or stoker.EMA in place of this average.",
    )


def renew_statistics(step: Step, source: BatchSource) -> None:
    """Compute batch-norm statistics for the step's averaged weights, where they need their own."""
    average, norms = step.average, _tracking(step.model)
    if average is None or isinstance(average, ExponentialAverage) or not average.needs_statistics or not norms:
        return
    settings, plan = step.job.average, step.plan
    num_batches = settings.statistics if isinstance(settings, SWA) else _BATCHES
    precision = autocasting(plan.precision, step.device, dtype=step.dtype, draws=step.dropout)
    with (
        generators_kept(step.device),
        step.with_kept_weights(),
        _plain_means(step.model, norms),
        torch.no_grad(),
        products_in(plan.precision, step.device),
        precision,
    ):
        seed_generators(key_of(RandomStream.EVALUATION, step.job.seed), step.device)
        for batch in _groups(step, source, num_batches):
            step.objective.run(step.model, batch.cut(0, batch.size))
        average.statistics = {name: buffer.clone() for name, buffer in statistics_of(step.model, norms).items()}


def _tracking(model: nn.Module) -> list[Any]:
    """Batch norms with running statistics; those of a frozen part stay as they are."""
    return [norm for norm in batch_norms(model) if norm.training and getattr(norm, "running_mean", None) is not None]


def _groups(step: Step, source: BatchSource, num_batches: int) -> Iterator[Batch]:
    """The first whole groups of coupled samples of epoch 0; an incomplete one if there is no other."""
    num_train = source.extent.num_train
    size = min(step.coupling.group or step.job.batch_size, num_train)
    for start in range(0, min(num_batches * size, num_train - num_train % size), size):
        indices = source.order.indices(0, start, start + size)
        yield Batch(source.samples.fetch(indices, 0), indices, 0, source.pipeline)


@contextlib.contextmanager
def _plain_means(model: nn.Module, norms: list[Any]) -> Iterator[None]:
    """Within the block, batch norms take plain means of each group's statistics; all else is in evaluation mode."""
    kept = [(norm.momentum, norm.__dict__.pop("forward", None)) for norm in norms]
    with in_evaluation(model), uncompiled():
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None
            norm.train()
        try:
            yield
        finally:
            for norm, (momentum, forward) in zip(norms, kept, strict=True):
                norm.momentum = momentum
                norm.eval()
                if forward is not None:  # it divides the batch norm over groups or processes
                    norm.forward = forward

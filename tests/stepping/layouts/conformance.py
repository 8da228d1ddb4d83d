"""What every layout must keep: the same jobs, trained in one process and over several."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch
from torch import nn

from stoker.jobs import SGD, AdamW, Job
from stoker.loading.batches import BatchSource
from stoker.loading.datasets import datasets_of
from stoker.records import Coupling, Plan, Position
from stoker.stepping.step import Step
from stoker.stepping.world import World
from stoker.zoo import GPT, Llama
from tests.stepping.driving import SEPARABLE, grouped
from tests.stepping.experts import mixture
from tests.stepping.layouts.odd import odd_job
from tests.stepping.layouts.passing import passing_job
from tests.stepping.models import cnn, images, make_job, texts

UPDATES = 12
"""Three epochs of 55 samples in batches of 16."""


@dataclass(frozen=True)
class Learned:
    """What a process saw: the loss of each update, the samples it took, all weights at the end, and their averages."""

    losses: list[float]
    indices: list[list[int]]
    weights: dict[str, torch.Tensor] = field(repr=False)
    averages: dict[str, torch.Tensor] = field(repr=False)


def gpt_job() -> Job:
    """A GPT of two blocks; the last batch of an epoch has 7 samples of 16, some targets are ignored."""
    return make_job(
        lambda: GPT(layers=2, width=32, heads=4, context=8, vocab=12),
        data=texts(55, masked=0.3),
        loss="token_cross_entropy",
        optimizer=AdamW(lr=1e-3),
        clip_norm=1.0,
        batch=16,
    )


def cnn_job() -> Job:
    """A network with batch norm, whose statistics are over the batch."""
    return make_job(lambda: cnn(nn.BatchNorm2d), data=images(55), optimizer=AdamW(lr=1e-3), batch=16)


def cnn_groups_job() -> Job:
    """As `cnn_job`, with statistics over groups of 6 samples, so that a batch has a last group of 4."""
    return make_job(lambda: cnn(nn.BatchNorm2d), data=images(55), optimizer=AdamW(lr=1e-3), batch=16, coupling_group=6)


def momentum_job() -> Job:
    """As `gpt_job`, with SGD, momentum and an average of the weights."""
    return make_job(
        lambda: GPT(layers=2, width=32, heads=4, context=8, vocab=12),
        data=texts(55),
        loss="token_cross_entropy",
        optimizer=SGD(lr=0.05, momentum=0.9),
        batch=16,
        average=0.9,
    )


def tied_job(layers: int = 2) -> Job:
    """As `gpt_job`, with the output layer tied to the embedding, which has a group of its own in the optimiser."""
    return make_job(
        lambda: GPT(layers=layers, width=32, heads=4, context=8, vocab=12, tied=True),
        data=texts(55, masked=0.3),
        loss="token_cross_entropy",
        optimizer=AdamW(lr=1e-3, groups={"tokens.*": {"lr": 3e-3, "weight_decay": 0.0}}),
        clip_norm=0.2,
        batch=16,
        average=0.9,
    )


def few_bits_job(width: int = 64, hidden: int | None = None) -> Job:
    """As `gpt_job`, wide enough that matrices have moments of fewer bits, which it allows; rows of 320 values."""
    return make_job(
        lambda: Llama(layers=2, width=width, heads=4, kv_heads=2, hidden=hidden or 5 * width, context=8, vocab=96),
        data=texts(55, masked=0.3),
        loss="token_cross_entropy",
        optimizer=AdamW(lr=1e-3),
        clip_norm=1.0,
        batch=16,
        numerics=["bf16-states", "8bit-states"],
    )


def experts_job(kind: str = "grouped") -> Job:
    """Four routed experts in each of two layers; the last batch of an epoch has 7 samples of 16."""
    return make_job(
        functools.partial(mixture, kind),
        data=texts(55, masked=0.3),
        loss="token_cross_entropy",
        optimizer=AdamW(lr=1e-3),
        clip_norm=1.0,
        batch=16,
        average=0.9,
    )


JOBS = {
    "deep": (functools.partial(tied_job, 4), SEPARABLE),
    "experts": (experts_job, SEPARABLE),
    "few bits": (few_bits_job, SEPARABLE),
    "gpt": (gpt_job, SEPARABLE),
    "momentum": (momentum_job, SEPARABLE),
    "cnn": (cnn_job, grouped(16)),
    "cnn in groups": (cnn_groups_job, grouped(6)),
    "odd": (odd_job, SEPARABLE),
    "passing": (passing_job, SEPARABLE),
    "tied": (tied_job, SEPARABLE),
}
"""Jobs by name, with their coupling."""


def learned(world: World, name: str, plan: Plan, dtype: torch.dtype | None, updates: int = UPDATES) -> Learned:
    """Train a job of JOBS in this process, a member of `world`; without `dtype` in the precision of the plan."""
    make, coupling = JOBS[name]
    return taught(world, make(), plan, coupling, dtype, updates)


def taught(
    world: World, job: Job, plan: Plan, coupling: Coupling, dtype: torch.dtype | None, updates: int = UPDATES
) -> Learned:
    """As `learned`, of any job."""
    return trained_with(Step(job, plan, coupling, dtype=dtype, world=world), updates)


def trained_with(step: Step, updates: int) -> Learned:
    """As `learned`, by a step that is there."""
    losses, indices = _trained(step.job, step, step.coupling, updates)
    with step.with_kept_weights():
        averages = {name: tensor.clone() for name, tensor in step.whole_weights().items()}
    return Learned(losses, indices, step.whole_weights(), averages)


def _trained(job: Job, step: Step, coupling: Coupling, updates: int) -> tuple[list[float], list[list[int]]]:
    data = datasets_of(job)
    source = BatchSource(
        data.train,
        step.pipeline(data.train, augmented=True),
        data.extent(job),
        job.seed,
        step.plan,
        split=step.world.split(coupling),
    )
    losses, indices = [], []
    for update, batch in enumerate(source.batches(Position(), updates)):
        losses.append(float(step.update(batch, update, update / updates)))
        indices.append([int(one) for one in batch.indices])
    return losses, indices


def largest_loss_difference(one: Learned, other: Learned) -> float:
    """The largest difference of an update's loss, relative to it."""
    return max(abs(a - b) / abs(b) for a, b in zip(one.losses, other.losses, strict=True))

"""Sites that train a small GPT, or a network with batch norm, as processes of a world."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from stoker.jobs import AdamW, Job
from stoker.jobs.sync import Sync
from stoker.loading.batches import Batch, BatchSource
from stoker.loading.datasets import datasets_of
from stoker.records import Coupling, Plan
from stoker.stepping.diloco import Exchanged
from stoker.stepping.step import Step
from stoker.stepping.world import World
from stoker.zoo import GPT
from tests.stepping.driving import SEPARABLE
from tests.stepping.models import make_job, texts

UPDATES = 14


@dataclass(frozen=True)
class Learned:
    """What a site saw: losses, samples, exchanges; its own weights before the end, and the shared ones after it."""

    losses: list[float] = field(default_factory=list)
    indices: list[list[int]] = field(default_factory=list)
    exchanges: list[Exchanged] = field(default_factory=list)
    own: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)
    shared: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)
    sent_bytes: int = 0


def gpt() -> nn.Module:
    """A GPT of one block."""
    return GPT(layers=1, width=16, heads=2, context=8, vocab=12)


def gpt_job(sync: Sync | None, **changed: object) -> Job:
    """Batches of 16, 16, 16 and 1 in each epoch of 49 samples; the loss counts some targets only."""
    settings = {"data": texts(49, masked=0.3), "loss": "token_cross_entropy", "optimizer": AdamW(lr=3e-3), "batch": 16}
    return make_job(gpt, **{**settings, "sync": sync, "clip_norm": 1.0, **changed})


def make_step(
    world: World, job: Job, dtype: torch.dtype = torch.float64, coupling: Coupling = SEPARABLE, micro_batch: int = 16
) -> Step:
    """A step of this site's."""
    plan = Plan(device="cpu", micro_batch=micro_batch, layout=world.layout)
    return Step(job, plan, coupling, dtype=dtype, world=world)


def batches(step: Step, begin: int, end: int) -> Iterator[Batch]:
    """This site's parts of the batches of updates begin..end."""
    job, data = step.job, datasets_of(step.job)
    source = BatchSource(
        data.train,
        step.pipeline(data.train, augmented=True),
        data.extent(job),
        job.seed,
        step.plan,
        split=step.split(),
    )
    return source.batches(data.extent(job).position(begin), end)


def train(step: Step, begin: int, end: int, of: int = UPDATES) -> Learned:
    """Make updates begin..end."""
    found = Learned()
    for update, batch in enumerate(batches(step, begin, end), begin):
        found.losses.append(float(step.update(batch, update, update / of)))
        found.indices.append([int(one) for one in batch.indices])
        assert step.outer is not None
        if step.outer.latest is not None and step.outer.latest not in found.exchanges:
            found.exchanges.append(step.outer.latest)
    return found


def ended(step: Step, found: Learned) -> Learned:
    """Bring the sites together for the last time."""
    assert step.outer is not None
    own = {name: tensor.detach().clone() for name, tensor in step.model.state_dict().items()}
    step.settle()
    live = step.model.state_dict()
    shared = step.whole_weights()
    assert all(torch.equal(live[name], shared[name]) for name in live)
    return replace(found, own=own, shared=shared, sent_bytes=step.outer.sent_bytes)


def learned(world: World, cases: list[tuple[Sync, torch.dtype]]) -> list[Learned]:
    """Train once in each of the cases."""
    found = []
    for sync, dtype in cases:
        step = make_step(world, gpt_job(sync), dtype)
        found.append(ended(step, train(step, 0, UPDATES)))
    return found

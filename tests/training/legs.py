"""What tests of checkpoints over several processes share: a part of a run, from the last checkpoint to the next."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from stoker.loading.batches import BatchSource
from stoker.loading.datasets import datasets_of
from stoker.records import Plan, Position
from stoker.stepping.step import Step
from stoker.stepping.world import World
from stoker.store import CheckpointStore
from stoker.training.checkpoints import Checkpointer, restore
from tests.stepping.layouts.conformance import JOBS

UPDATES = 30
"""Of a whole run, for the schedule."""


@dataclass(frozen=True)
class Leg:
    """What a process saw of a part of a run: the loss of each update, and all weights and their averages after it."""

    losses: list[float]
    weights: dict[str, torch.Tensor] = field(repr=False)
    averages: dict[str, torch.Tensor] = field(repr=False)


def leg(world: World, folder: Path, job: str, plan: Plan, dtype: torch.dtype, stop: int) -> Leg:
    """Train a job of JOBS from the last checkpoint in `folder`, if there is one, to update `stop`, and save there."""
    step, losses = resumed(world, folder, job, plan, dtype, stop)
    with step.with_kept_weights():
        averages = {name: tensor.clone() for name, tensor in step.whole_weights().items()}
    return Leg(losses, step.whole_weights(), averages)


def losses_of_leg(world: World, folder: Path, job: str, plan: Plan, dtype: torch.dtype, stop: int) -> list[float]:
    """As `leg`; only the losses."""
    return resumed(world, folder, job, plan, dtype, stop)[1]


def resumed(
    world: World, folder: Path, job: str, plan: Plan, dtype: torch.dtype, stop: int
) -> tuple[Step, list[float]]:
    """The step that a leg ends with, and the loss of each of its updates."""
    step = made(world, job, plan, dtype)
    found = CheckpointStore(folder).newest()
    position = Position()
    if found is not None:
        restore(step, *found)
        position = found[1].position
    losses, position = advanced(step, position, stop)
    save(step, folder, position)
    return step, losses


def made(world: World, job: str, plan: Plan, dtype: torch.dtype = torch.float64) -> Step:
    """A fresh step of a job of JOBS."""
    make, coupling = JOBS[job]
    return Step(make(), plan, coupling, dtype=dtype, world=world)


def advanced(step: Step, position: Position, stop: int) -> tuple[list[float], Position]:
    """The losses of the updates from `position` to update number `stop`, and where training is then."""
    job = step.job
    data = datasets_of(job)
    extent = data.extent(job)
    source = BatchSource(
        data.train,
        step.pipeline(data.train, augmented=True),
        extent,
        job.seed,
        step.plan,
        split=step.split(),
    )
    losses = []
    for update, batch in enumerate(source.batches(position, stop), start=position.updates):
        losses.append(float(step.update(batch, update, update / UPDATES)))
    return losses, extent.position(stop)


def save(step: Step, folder: Path, position: Position) -> None:
    """Write a checkpoint, and wait for it."""
    checkpointer = Checkpointer(CheckpointStore(folder), spec_digest="s", version="0")
    checkpointer.save(step, position, {"at": position.updates}, best=False)
    checkpointer.close()

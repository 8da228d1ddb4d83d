"""A worker of `bench.many.kill`: data parallel training that survives the loss of others.

Batches are of 12 samples, whoever takes part; an update is made whole or not at all; after a loss all go on from the
furthest of those that are left. So the weights are those of one process that made as many updates, up to rounding.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stoker.records import Layout
from stoker.stepping.world import join, leave
from stoker.training.elastic.rendezvous import Rendezvous, WorkerRetired
from stoker.training.elastic.worker import ElasticWorker

BATCH = 12
WIDTH = 256


class Learner:
    """A small network in float64, its optimiser, and how many updates were made."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(32, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)]
        self.model = nn.Sequential(*layers).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.done = 0
        for parameter in self.model.parameters():
            self.optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    def tensors(self) -> list[torch.Tensor]:
        """Weights and momenta."""
        momenta = [self.optimizer.state[one]["momentum_buffer"] for one in self.model.parameters()]
        return [*(one.detach() for one in self.model.parameters()), *momenta]

    def loss(self, model: nn.Module, rank: int, size: int) -> torch.Tensor:
        """This rank's part of the loss of the next batch."""
        generator = torch.Generator().manual_seed(self.done)
        batch = torch.randn(BATCH, 32, dtype=torch.float64, generator=generator)[rank::size]
        output: torch.Tensor = model(batch)
        return (output.squeeze(1) - batch.sum(1)).square().sum() / BATCH

    def step(self) -> None:
        """Make the update that was computed."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1


def alone(updates: int) -> list[torch.Tensor]:
    """What one process has after so many updates."""
    learner = Learner()
    while learner.done < updates:
        learner.loss(learner.model, 0, 1).backward()
        learner.step()
    return learner.tensors()


def share(learner: Learner, meeting: Rendezvous) -> None:
    """Give everybody the state of the furthest of those that have one."""
    mine = learner.done if meeting.rank < meeting.num_veterans or meeting.num_veterans == 0 else -1
    told = [torch.zeros(1, dtype=torch.int64) for _ in range(meeting.size)]
    dist.all_gather(told, torch.tensor([mine]))
    learner.done = max(int(one) for one in told)
    furthest = [int(one) for one in told].index(learner.done)
    for tensor in learner.tensors():
        dist.broadcast(tensor, furthest)


def train(learner: Learner, member: ElasticWorker, meeting: Rendezvous, folder: Path) -> str | None:
    """Train until told to end; why the generation is over, or None when all is done."""
    with member.joining():
        join(
            Layout(replicas=meeting.size),
            meeting.rank,
            member.store,
            device=torch.device("cpu"),
            name=meeting.name,
            patience_s=10.0,
        )
    share(learner, meeting)
    model = DistributedDataParallel(learner.model)
    while not member.is_called():
        learner.optimizer.zero_grad()
        (learner.loss(model, meeting.rank, meeting.size) * meeting.size).backward()
        is_enough = torch.tensor(float((folder / "enough").exists()))
        dist.all_reduce(is_enough)
        learner.step()
        if meeting.rank == 0:
            member.event(json.dumps({"update": learner.done, "generation": meeting.number, "size": meeting.size}))
        if is_enough > 0:
            return None
        time.sleep(0.01)
    return "called"


def main() -> int:
    """Take part until the run is done; the exit code."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    member = ElasticWorker.from_environment()
    assert member is not None
    (folder / f"pid-{member.worker}").write_text(str(os.getpid()))
    learner = Learner()
    try:
        meeting = member.meet()
        while True:
            try:
                why = train(learner, member, meeting, folder)
            except RuntimeError as problem:
                why = str(problem).splitlines()[0]
            if why is None:
                break
            leave()
            meeting = member.lost(why)
    except WorkerRetired as dismissed:
        return dismissed.exit_code
    if meeting.rank == 0:
        torch.save({"done": learner.done, "tensors": learner.tensors()}, folder / "final.pt")
    dist.barrier()
    leave()
    member.finished()
    return 0


if __name__ == "__main__":
    sys.exit(main())

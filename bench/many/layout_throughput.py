"""Throughput of our layouts against the same written by hand with PyTorch, two processes on this machine.

    python -m bench.many.layout_throughput [--sets 3] [--rounds 8] [--updates 6]

By hand: DistributedDataParallel, or `fully_shard` on each block and the whole, around the same model, which starts from
the same weights; the same batches gathered from tensors in memory, the same fused AdamW, the same clipping; and each
update's loss summed over the processes and read, without which a run cannot be watched. Both are in the same processes
and take turns, a slice of a few updates each; the order changes from round to round. For each set of rounds a set of
processes is started anew. Printed and written to bench/results/: our samples a second over theirs, the median over
rounds with an interval of 95 % (bench/train/intervals.py), and how busy the machine was. The bar: a lower bound of at
least 0.95. Beside it the same by the time that cores were at work for the processes, which other work on the machine
disturbs less.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import stoker
from bench.train.intervals import Interval, ratio_of
from bench.train.results import document, save
from stoker.loading.batches import BatchSource
from stoker.loading.datasets import datasets_of
from stoker.records import Coupling, Layout, Plan, Position
from stoker.records.codec import to_json
from stoker.stepping.model import build_model
from stoker.stepping.step import Step
from stoker.stepping.world import World
from stoker.testing.ranks import on_ranks
from stoker.zoo import GPT

BAR = 0.95
SAMPLES, BATCH, CLIP = 4096, 16, 1.0
CONTEXT, VOCAB = 64, 256
LAYOUTS = {"ddp": Layout(replicas=2), "fsdp2": Layout(shards=2)}
MORE_THAN_ANY = 10**6
"""Updates of a run that is never at its end."""


class Stage(nn.Module):
    """A convolution that halves the image, and one that keeps it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.down = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(8, outputs)
        self.keep = nn.Conv2d(outputs, outputs, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images [B, C, H, W] to [B, C', H/2, W/2]."""
        x = F.relu(self.norm(self.down(x)))
        return F.relu(x + self.keep(x))


def cnn() -> nn.Module:
    """Three stages over images of 32 x 32; without batch norm, which by hand would be over each process's own part."""
    stages = nn.Sequential(Stage(3, 32), Stage(32, 64), Stage(64, 128))
    return nn.Sequential(stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def cnn_job() -> stoker.Job:
    """Random images in ten classes."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(SAMPLES, 3, 32, 32, generator=generator), torch.randint(10, (SAMPLES,), generator=generator)
    return _job(cnn, data, "cross_entropy")


def gpt_job() -> stoker.Job:
    """Random texts for a GPT of four blocks, 0.8 million parameters."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB, (SAMPLES, CONTEXT + 1), generator=generator)
    return _job(
        lambda: GPT(layers=4, width=128, heads=4, context=CONTEXT, vocab=VOCAB),
        (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()),
        "token_cross_entropy",
    )


def _job(model: Callable[[], nn.Module], data: Any, loss: str) -> stoker.Job:
    return stoker.Job(
        model=model,
        data=data,
        loss=loss,
        optimizer=stoker.AdamW(lr=1e-3),
        batch=BATCH,
        clip_norm=CLIP,
        until=stoker.epochs(1000),
    )


JOBS = {"gpt": gpt_job, "cnn": cnn_job}


def ours(world: World, job: stoker.Job) -> Iterator[float]:
    """The loss of one update of Stoker's after the other."""
    plan = Plan(device="cpu", micro_batch=BATCH, layout=world.layout, optimizer_implementation="fused", threads=1)
    step = Step(job, plan, Coupling(kind="separable", group=None, causes=(), evidence="known"), world=world)
    data = datasets_of(job)
    source = BatchSource(
        data.train, step.pipeline(data.train, augmented=True), data.extent(job), job.seed, plan, split=step.split()
    )
    for update, batch in enumerate(source.batches(Position(), MORE_THAN_ANY)):
        yield float(step.update(batch, update, update / MORE_THAN_ANY))


def by_hand(world: World, job: stoker.Job) -> Iterator[float]:
    """As `ours`, of a loop that a careful engineer writes for this job."""
    model, part = build_model(job), BATCH // world.layout.world_size
    wrapped = _wrapped(model, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    inputs, targets = job.data
    while True:
        for rows in torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(0)).split(BATCH):
            own = rows[world.rank * part : (world.rank + 1) * part]
            output = wrapped(inputs[own])
            loss = F.cross_entropy(output.flatten(0, -2), targets[own].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            mean = loss.detach()
            dist.all_reduce(mean, op=dist.ReduceOp.AVG)
            yield mean.item()


def _wrapped(model: nn.Module, world: World) -> nn.Module:
    if world.layout.is_replicated:
        return DistributedDataParallel(model, process_group=world.data)
    assert world.mesh is not None
    blocks = model.blocks if isinstance(model, GPT) else model[0]  # type: ignore[index]
    for block in blocks:
        fully_shard(block, mesh=world.mesh["shards"])
    return fully_shard(model, mesh=world.mesh["shards"])


def taking_turns(world: World, name: str, rounds: int, updates: int) -> dict[str, dict[str, list[float]]]:
    """Samples a second of both, by rounds: as the slower process has it, and by the time that cores were at work."""
    sides = {"ours": ours(world, JOBS[name]()), "by hand": by_hand(world, JOBS[name]())}
    for side in sides.values():
        _slice(side, updates)
    rates: dict[str, dict[str, list[float]]] = {side: {"wall": [], "cores": []} for side in sides}
    for number in range(rounds):
        for side in sorted(sides, reverse=bool(number % 2)):
            dist.barrier()
            wall_s, cores_s = _slice(sides[side], updates)
            longest_s, total_s = torch.tensor(wall_s), torch.tensor(cores_s)
            dist.all_reduce(longest_s, op=dist.ReduceOp.MAX)
            dist.all_reduce(total_s)
            rates[side]["wall"].append(updates * BATCH / float(longest_s))
            rates[side]["cores"].append(updates * BATCH / float(total_s))
    return rates


def _slice(side: Iterator[float], updates: int) -> tuple[float, float]:
    """Seconds of a few updates: by the clock, and of all of this process's threads at work."""
    started_s, worked_s = time.perf_counter(), time.process_time()
    for _ in range(updates):
        next(side)
    return time.perf_counter() - started_s, time.process_time() - worked_s


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--updates", type=int, default=6)
    chosen = parser.parse_args()
    command = f"python -m bench.many.layout_throughput --sets {chosen.sets} --rounds {chosen.rounds}"
    results = document(
        "samples a second of our layouts over the same written by hand, two processes over gloo",
        f"{command} --updates {chosen.updates}",
        {"torch": torch.__version__},
    )
    results |= {"bar": BAR, "load_before": list(os.getloadavg()), "ratios": {}}
    path = Path("bench/results", f"layout_throughput_{datetime.now(UTC).date().isoformat()}.json")
    ratios: dict[str, Any] = {}
    for layout, shape in LAYOUTS.items():
        for name in JOBS:
            sets = [on_ranks(shape, taking_turns, name, chosen.rounds, chosen.updates)[0] for _ in range(chosen.sets)]
            found = {by: _ratio(sets, by) for by in ("wall", "cores")}
            ratios[f"{layout} {name}"] = {
                **{by: to_json(one) for by, one in found.items()},
                "is_kept": found["wall"].low >= BAR,
                "samples_per_s": sets,
            }
            said = "; ".join(f"by {by} {one.median:.3f} ({one.low:.3f} to {one.high:.3f})" for by, one in found.items())
            print(f"{layout:6} {name:4} {said}", flush=True)
            save(path, {**results, "ratios": ratios, "load_after": list(os.getloadavg())})


def _ratio(sets: list[dict[str, dict[str, list[float]]]], by: str) -> Interval:
    found = ratio_of([one["ours"][by] for one in sets], [one["by hand"][by] for one in sets])
    assert found is not None, "every round counts"
    return found


if __name__ == "__main__":
    main()

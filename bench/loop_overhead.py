"""Overhead of Stoker's loop: time of an update beyond plain PyTorch doing the same work.

    python -m bench.loop_overhead [--rounds 15] [--updates 400]

The model is tiny (an MLP 64-32-10 on one thread) so that the overhead shows. "The same work" in plain PyTorch:
shuffled batches gathered from tensors in memory, forward, loss, backward, the learning rate set from the same schedule,
a fused optimiser step, and the loss read. Both train from the same weights; slices of both alternate in one process,
and what is counted is the CPU time of the thread that trains, so that other people's work counts less. Printed and
written to bench/results/: the median over rounds of the difference in microseconds an update, with its spread.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import nn

import stoker
from stoker.jobs.run_length import Extent
from stoker.loading.batches import BatchSource
from stoker.loading.datasets import datasets_of
from stoker.records import Coupling, Plan
from stoker.stepping.model import build_model
from stoker.stepping.step import Step
from stoker.store import CheckpointStore
from stoker.training.checkpoints import Checkpointer, Written
from stoker.training.loop import Best, Loop
from stoker.training.recovery import Recovery
from stoker.training.signals import StopRequest
from stoker.training.telemetry import Telemetry

BATCH, FEATURES, CLASSES, SAMPLES = 64, 64, 10, 64_000
SCHEDULE = stoker.schedules.one_cycle()


def the_job() -> stoker.Job:
    """An MLP 64-32-10 on random data that lie in memory."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand((SAMPLES, FEATURES), generator=generator)
    targets = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
    return stoker.Job(
        model=lambda: nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, CLASSES)),
        data=(inputs, targets),
        loss="cross_entropy",
        optimizer=stoker.SGD(lr=0.01, momentum=0.9),
        schedule=SCHEDULE,
        batch=BATCH,
        until=stoker.epochs(1),
    )


def plain(job: stoker.Job, updates: int) -> float:
    """Seconds an update of a plain PyTorch loop."""
    model = build_model(job)
    inputs, targets = job.data
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    order = torch.randperm(SAMPLES)
    total = 0.0
    started = time.thread_time()
    for update in range(updates):
        rows = order[update * BATCH : (update + 1) * BATCH]
        x, y = inputs.index_select(0, rows), targets.index_select(0, rows)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * SCHEDULE(update / updates)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        total += loss.item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return (time.thread_time() - started) / updates


def stokers(job: stoker.Job, updates: int, folder: Path) -> float:
    """Seconds an update of Stoker's loop, as `stoker.train` runs it, its final checkpoint left out."""
    plan = Plan(device="cpu", micro_batch=BATCH, threads=1, optimizer_implementation="fused", checkpoint_every_s=1e9)
    step = Step(job, plan, Coupling(kind="separable", group=None, causes=(), evidence=""))
    data = datasets_of(job)
    extent = Extent(SAMPLES, BATCH)
    saver = _NoCheckpoints(CheckpointStore(folder), spec_digest="", version="")
    telemetry = Telemetry(
        lambda _event: None, total_samples=SAMPLES, total_updates=updates, evaluate_s=0.0, evaluations_left=0
    )
    source = BatchSource(data.train, step.pipeline(data.train, augmented=True), extent, job.seed, plan)
    loop = Loop(
        step=step,
        source=source,
        extent=extent,
        total_updates=updates,
        held_out={},
        evaluate_every=job.evaluation.every,
        best=Best("loss"),
        checkpointer=saver,
        telemetry=telemetry,
        stop=StopRequest(),
        recovery=Recovery(step, tell=telemetry.emit),
    )
    started = time.thread_time()
    loop.run(extent.position(0))
    return (time.thread_time() - started) / updates


class _NoCheckpoints(Checkpointer):
    """Saves nothing, so that the loop alone is timed."""

    def save(self, *_arguments: object, **_settings: object) -> list[Written]:
        return []


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--updates", type=int, default=400)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    job = the_job()
    with tempfile.TemporaryDirectory() as folder:
        sides: dict[str, Callable[[], float]] = {
            "plain": lambda: plain(job, arguments.updates),
            "stoker": lambda: stokers(job, arguments.updates, Path(folder)),
        }
        for side in sides.values():
            side()
        rounds = [{name: side() * 1e6 for name, side in sides.items()} for _ in range(arguments.rounds)]
    overheads = sorted(one["stoker"] - one["plain"] for one in rounds)
    result = {
        "what": "loop overhead, microseconds an update",
        "command": f"python -m bench.loop_overhead --rounds {arguments.rounds} --updates {arguments.updates}",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.processor() or platform.machine()}, torch {torch.__version__}, 1 thread",
        "plain_us": statistics.median(one["plain"] for one in rounds),
        "stoker_us": statistics.median(one["stoker"] for one in rounds),
        "overhead_us": {"median": statistics.median(overheads), "min": overheads[0], "max": overheads[-1]},
        "bar_us": 60,
    }
    text = json.dumps(result, indent=2)
    print(text)
    Path(__file__).with_name("results").joinpath(f"loop_overhead_{result['date']}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()

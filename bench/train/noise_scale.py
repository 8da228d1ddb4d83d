"""Is the batch that `batch="auto"` chooses the knee? And how far below the edge is a good learning rate?

    python -m bench.train.noise_scale [--seeds 3] [--only mlp]

On two jobs, a convolutional net (batch norm, SGD) and an MLP (AdamW), on Fashion-MNIST, or on the digits in the package
where that is not here:

1. The batch is chosen; then the job is trained at a quarter of it, at it, and at four times it, each at the learning
   rate of the same rule and in the coupling groups that were chosen, until the loss on held-out samples is at the
   target. Counted are samples, updates and CPU-seconds. The noise scale foretells samples in proportion to
   1 + batch / noise scale (McCandlish et al. 2018, equation 2.7).
2. The range test is made at the base batch; then the job is trained for a fixed number of samples at shares of the edge
   found. Counted is the held-out loss.

One thread, plain fp32, a constant rate after a rise over the first 5 % of the samples allowed, no augmentation.
Written to bench/results/.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
import time
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

import stoker
from stoker.devices.cpu import attached_cpu
from stoker.jobs import Job
from stoker.jobs.batch_size import rate_factor, scalable, with_rates_scaled
from stoker.loading.batches import BatchSource, in_order
from stoker.loading.datasets import Datasets, datasets_of
from stoker.planning.resolved_job import resolve_job
from stoker.records import Plan, Position
from stoker.stepping.coupling import find_coupling
from stoker.stepping.step import Step

BASE = 32
HELD_OUT = 2_000
"""Samples on which the loss is taken; they are not trained on."""

LARGEST = 240_000
"""Samples after which a run that has not reached its target is given up."""

TARGETS = {"cnn": 0.40, "mlp": 0.42}
"""Held-out losses that each job reaches within the first epochs."""

SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)
"""Of the edge, for the second part."""

RANGE_SAMPLES = 54_000


def block(inputs: int, outputs: int) -> nn.Module:
    """Channels [B, inputs, H, W] to [B, outputs, H/2, W/2]."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2))


def cnn() -> nn.Module:
    """The net of examples/train_me.py, 16 wide."""
    return nn.Sequential(block(1, 8), block(8, 16), nn.Flatten(), nn.Linear(49 * 16, 10))


def the_job(name: str, seed: int) -> Job:
    """The job at the base batch."""
    train, _ = stoker.data.fashion_mnist()
    sgd, adam = stoker.SGD(lr=0.004, momentum=0.9, nesterov=True), stoker.AdamW(lr=5e-4)
    return stoker.Job(
        model=cnn if name == "cnn" else lambda: stoker.zoo.MLP(784),
        data=train,
        valid=stoker.holdout(0.1),
        loss="cross_entropy",
        optimizer=sgd if name == "cnn" else adam,
        batch=BASE,
        until=stoker.epochs(5),
        seed=seed,
    )


def at_batch(job: Job, batch: int, noise_scale: float, group: int | None) -> Job:
    """The job at another batch, its rate by the rule of `batch="auto"`."""
    optimizer, exponent = scalable(job.optimizer)
    factor = rate_factor(int(job.batch), batch, noise_scale=noise_scale, exponent=exponent)
    grouped = None if group is None else min(group, batch)
    return dataclasses.replace(job, batch=batch, optimizer=with_rates_scaled(optimizer, factor), coupling_group=grouped)


def train(job: Job, *, target: float, most: int) -> dict[str, Any]:
    """Train until the held-out loss is at `target`, or for `most` samples; what it took, and the last loss."""
    data = datasets_of(job)
    extent = data.extent(job)
    rising = dataclasses.replace(job, schedule=lambda progress: min(1.0, 0.02 + progress / 0.05))
    coupling = find_coupling(job, data.train)
    plan = Plan(device="cpu", micro_batch=job.batch, optimizer_implementation="fused")
    step = Step(rising, plan, coupling)
    source = BatchSource(data.train, step.pipeline(data.train, augmented=False), extent, job.seed, plan)
    total, every = extent.updates_in(stoker.samples(most)), max(1, 2_048 // job.batch)
    started, evaluating_s = time.process_time(), 0.0
    before, samples, loss, reached = (0, float("inf")), 0, float("inf"), None
    with closing(source.batches(Position(), total)) as batches:
        for update, batch in enumerate(batches, 1):
            step.update(batch, update - 1, samples / most)
            samples += batch.size
            if update % every == 0 or update == total:
                mark = time.process_time()
                loss = held_out_loss(step, data)
                evaluating_s += time.process_time() - mark
                if loss <= target:
                    share = 1.0 if before[1] == float("inf") else (before[1] - target) / (before[1] - loss)
                    reached = before[0] + share * (samples - before[0])
                    break
                before = (samples, loss)
    return {
        "samples": reached,
        "updates": None if reached is None else reached / job.batch,
        "loss": loss,
        "cpu_s": time.process_time() - started - evaluating_s,
    }


def held_out_loss(step: Step, data: Datasets) -> float:
    """The mean loss of the first held-out samples."""
    assert data.valid is not None
    total, count, seen = 0.0, 0.0, 0
    with step.evaluation() as measure:
        for batch in in_order(data.valid, step.pipeline(data.valid, augmented=False), 500):
            loss = measure(batch.cut(0, batch.size), batch.size)["loss"]
            total, count, seen = total + float(loss.sum), count + float(loss.count), seen + batch.size
            if seen >= HELD_OUT:
                break
    return total / count


def knee(name: str, seeds: int) -> dict[str, Any]:
    """The first part, for one job."""
    rows: list[dict[str, Any]] = []
    choices = []
    for seed in range(seeds):
        job = the_job(name, seed)
        choice = resolve_job(dataclasses.replace(job, batch=stoker.auto(base=BASE))).batch_choice
        assert choice is not None
        print(f"{name}, seed {seed}: {choice.in_words()}", flush=True)
        choices.append(choice)
    batch = int(statistics.median_low([choice.batch for choice in choices]))
    scale = statistics.median([choice.noise_scale for choice in choices])
    for size in (batch // 4, batch, 4 * batch):
        runs = [
            train(
                at_batch(the_job(name, seed), size, scale, choices[0].coupling_group),
                target=TARGETS[name],
                most=LARGEST,
            )
            for seed in range(seeds)
        ]
        rows.append({"batch": size, "lr": lr_of(name, size, scale), "foretold": 1 + size / scale, "runs": runs})
        print(name, rows[-1], flush=True)
    return {
        "target": TARGETS[name],
        "noise_scales": [choice.noise_scale for choice in choices],
        "on_initial_weights": [choice.initial.scale.value for choice in choices],
        "chosen": [choice.batch for choice in choices],
        "batch": batch,
        "choosing_s": [c.took_s for c in choices],
        "rows": rows,
    }


def lr_of(name: str, batch: int, noise_scale: float) -> float:
    """The learning rate at that batch."""
    return scalable(at_batch(the_job(name, 0), batch, noise_scale, None).optimizer)[0].lr


def shares(name: str, seeds: int) -> dict[str, Any]:
    """The second part, for one job."""
    plan = Plan(device="cpu", micro_batch=BASE, optimizer_implementation="fused")
    found = stoker.lr_range(the_job(name, 0), plan=plan, seeds=max(2, seeds))
    print(f"{name}: lr {found.lr:.3g}, {found.why}, spread {found.spread}", flush=True)
    rows = []
    for share in SHARES if found.edge is not None else ():
        assert found.edge is not None
        rate = share * found.edge
        losses = []
        for seed in range(seeds):
            job = the_job(name, seed)
            optimizer = dataclasses.replace(scalable(job.optimizer)[0], lr=rate)
            run = train(dataclasses.replace(job, optimizer=optimizer), target=0.0, most=RANGE_SAMPLES)
            losses.append(run["loss"])
        rows.append({"share_of_edge": share, "lr": rate, "losses": losses})
        print(name, rows[-1], flush=True)
    return {
        "lr": found.lr,
        "is_clear": found.is_clear,
        "why": found.why,
        "edge": found.edge,
        "spread": found.spread,
        "samples": RANGE_SAMPLES,
        "rows": rows,
    }


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=("cnn", "mlp"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names = ["mlp", "cnn"] if arguments.only is None else [arguments.only]
    only = "" if arguments.only is None else f" --only {arguments.only}"
    with tempfile.TemporaryDirectory() as cache:
        os.environ["STOKER_CACHE"] = cache  # measured here, not remembered
        data = datasets_of(the_job("mlp", 0))
        result = {
            "what": "batch chosen by the noise scale, against a quarter and four times it; rates at shares of the edge",
            "command": f"python -m bench.train.noise_scale --seeds {arguments.seeds}{only}",
            "date": datetime.now(UTC).date().isoformat(),
            "machine": f"{attached_cpu().model}, torch {torch.__version__}, 1 thread",
            "data": {"name": data.train.name, "train": len(data.train), "note": data.note},
            "base": BASE,
            "jobs": {name: {"batch": knee(name, arguments.seeds), "lr_range": shares(name, 2)} for name in names},
        }
    suffix = "" if arguments.only is None else f"_{arguments.only}"
    path = arguments.out / f"noise_scale{suffix}_{result['date']}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(path)


if __name__ == "__main__":
    main()

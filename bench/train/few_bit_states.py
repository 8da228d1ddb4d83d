"""What a model learns with optimiser states in bf16 and in 8 bits, against full ones; and the time of an update.

    python -m bench.train.few_bit_states [--seeds 3] [--updates 400] [--out FILE]

A GPT on the text of Python's standard library, in fp32 on one thread, the three kinds of states in turns of an update
each on the same batches, so that nothing but the states differs. Written: for each seed the mean loss of the last tenth
of the updates, its ratio to full states', and what states take [bytes a weight]; and of one parameter of 4 million
values the time of an optimiser step [ns a weight], the median of 9.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from torch import nn

import stoker
from bench.forecast.registration import dated
from bench.train import results
from stoker.loading.batches import BatchSource
from stoker.loading.datasets import datasets_of
from stoker.records import Coupling, OptimizerStates, Plan, Position
from stoker.records.codec import JSON
from stoker.stepping.low_bit_states import LowBitAdam
from stoker.stepping.step import Step

STATES: tuple[OptimizerStates, ...] = ("full", "bf16", "8bit")
_SEPARABLE = Coupling(kind="separable", group=None, causes=(), evidence="known")


def the_job(seed: int, num_updates: int) -> stoker.Job:
    """A GPT of two blocks, 128 wide, on bytes."""
    return stoker.Job(
        model=lambda: stoker.zoo.GPT(layers=2, width=128, heads=4, context=64),
        data=stoker.data.python_source(64, 2**21)[0],
        loss="token_cross_entropy",
        optimizer=stoker.AdamW(lr=2e-3),
        schedule=stoker.schedules.warmup(stoker.updates(20)),
        clip_norm=1.0,
        batch=16,
        until=stoker.updates(num_updates),
        numerics=["bf16-states", "8bit-states"],
        seed=seed,
    )


def learned(seed: int, num_updates: int) -> dict[str, list[float]]:
    """The loss of each update, by kind of states."""
    job = the_job(seed, num_updates)
    steps = {one: Step(job, Plan(device="cpu", micro_batch=16, optimizer_states=one), _SEPARABLE) for one in STATES}
    data, losses = datasets_of(job), {one: list[float]() for one in STATES}
    for one, step in steps.items():
        source = BatchSource(
            data.train, step.pipeline(data.train, augmented=True), data.extent(job), job.seed, step.plan
        )
        for update, batch in enumerate(source.batches(Position(), num_updates)):
            losses[one].append(float(step.update(batch, update, update / num_updates)))
    return losses


def step_ns(states: OptimizerStates) -> tuple[float, float]:
    """The time of a step [ns a weight], and what its state takes [bytes a weight]."""
    weight = nn.Parameter(torch.randn(1024, 4096))
    weight.grad = torch.randn_like(weight)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW([weight], lr=1e-3, fused=True)
    if states != "full":
        optimizer = LowBitAdam(
            [{"params": [weight]}],
            states=states,
            names={"weight": weight},
            seed=0,
            is_decoupled=True,
            lr=1e-3,
            betas=(0.9, 0.999),
            eps=1e-8,
            weight_decay=0.01,
        )
    times_s = []
    for _ in range(10):
        began = time.perf_counter()
        optimizer.step()
        times_s.append(time.perf_counter() - began)
    kept = sum(one.nbytes for one in optimizer.state[weight].values() if one.dim())
    return 1e9 * statistics.median(times_s[1:]) / weight.numel(), kept / weight.numel()


def main() -> None:
    """Train, time, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=400)
    parser.add_argument("--out", type=Path, default=dated("few_bit_states"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, JSON] = {}
    for states in STATES:
        nanoseconds, num_bytes = step_ns(states)
        found[states] = {
            "step_ns_per_weight": round(nanoseconds, 1),
            "state_bytes_per_weight": num_bytes,
            "loss": [],
            "ratio": [],
        }
    for seed in range(options.seeds):
        tail = max(1, options.updates // 10)
        ends = {one: statistics.fmean(losses[-tail:]) for one, losses in learned(seed, options.updates).items()}
        for one in STATES:
            found[one]["loss"].append(round(ends[one], 4))
            found[one]["ratio"].append(round(ends[one] / ends["full"], 4))
        print(f"seed {seed}: " + ", ".join(f"{one} {loss:.4f}" for one, loss in ends.items()), flush=True)
    for one in STATES:
        print(one, found[one])
    command = f"python -m bench.train.few_bit_states --seeds {options.seeds} --updates {options.updates}"
    head = results.document(__doc__.splitlines()[0], command, {"torch": torch.__version__})
    results.save(options.out, {**head, "updates": options.updates, "states": found})


if __name__ == "__main__":
    main()

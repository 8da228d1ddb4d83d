"""What a captured pass saves of an update on a CPU: as ordinary passes, called from Python, in one interpreted call.

    python -m bench.train.captured [--rounds 150] [--out FILE]

Small models on one thread, where what happens between kernels shows. Three steps of each take turns in one process,
an update each, on the same batch; what counts is the CPU time of the thread, so that other people's work counts less.
Written: quartiles of an update in each form [µs], and what part of the ordinary one is saved, a median over rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from torch import nn

import stoker
from bench.forecast.registration import dated
from bench.train import results
from bench.train.models import ByteLSTM
from stoker.loading.batches import Batch, BatchSource
from stoker.loading.datasets import datasets_of
from stoker.records import Coupling, Plan, Position
from stoker.records.codec import JSON
from stoker.stepping import graph_interpreter
from stoker.stepping.step import Step
from stoker.zoo import GPT, MLP, ResNet9

FORMS = ("ordinary", "from Python", "interpreted")
WARM_UP = 20
"""Rounds that are not counted."""
_SEPARABLE = Coupling(kind="separable", group=None, causes=(), evidence="known")
_BATCH_NORM = Coupling(kind="batch_norm", group=16, causes=("BatchNorm2d",), evidence="known")


@dataclass(frozen=True)
class Small:
    """A model, its samples' shape, its batch; a context makes samples of bytes and their successors."""

    title: str
    model: Callable[[], nn.Module]
    batch: int
    coupling: Coupling = _SEPARABLE
    context: int | None = None


SMALL = (
    Small("MLP 784-256-128-10, batch 64", lambda: MLP(784), 64),
    Small("GPT 2 × 64, context 32, batch 8", lambda: GPT(layers=2, width=64, heads=2, context=32), 8, context=32),
    Small("LSTM 2 × 64, sequence 32, batch 8", lambda: ByteLSTM(width=64), 8, context=32),
    Small("ResNet-9 4 wide, batch 16", lambda: ResNet9(4), 16, _BATCH_NORM),
)


def the_job(small: Small) -> stoker.Job:
    """It on random samples, two batches of them."""
    generator = torch.Generator().manual_seed(0)
    if small.context is None:
        inputs = torch.rand((2 * small.batch, 1, 28, 28), generator=generator)
        targets = torch.randint(0, 10, (2 * small.batch,), generator=generator)
    else:
        text = torch.randint(0, 256, (2 * small.batch, small.context + 1), generator=generator)
        inputs, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    return stoker.Job(
        model=small.model,
        data=(inputs, targets),
        loss="cross_entropy" if small.context is None else "token_cross_entropy",
        optimizer=stoker.AdamW(lr=1e-3),
        batch=small.batch,
        until=stoker.epochs(1),
    )


def update_us(small: Small, precision: str, rounds: int) -> dict[str, list[float]]:
    """CPU time of an update in each form [µs], for every round."""
    job = the_job(small)
    plan = Plan(device="cpu", micro_batch=small.batch, precision=precision, optimizer_implementation="fused")  # type: ignore[arg-type]  # one of a plan's
    steps = {form: Step(job, dataclasses.replace(plan, captured=form != "ordinary"), small.coupling) for form in FORMS}
    batch = _a_batch(job, steps["ordinary"], plan)
    with mock.patch.object(graph_interpreter, "_IS_THERE", new=False):
        steps["from Python"].update(batch, 0, 0.0)  # which captures
    found: dict[str, list[float]] = {form: [] for form in FORMS}
    for update in range(1, WARM_UP + rounds + 1):
        for form, step in steps.items():
            began = time.thread_time()
            step.update(batch, update, 0.0)
            found[form].append(1e6 * (time.thread_time() - began))
    return {form: times[WARM_UP:] for form, times in found.items()}


def _a_batch(job: stoker.Job, step: Step, plan: Plan) -> Batch:
    data = datasets_of(job)
    pipeline = step.pipeline(data.train, augmented=True)
    return next(BatchSource(data.train, pipeline, data.extent(job), job.seed, plan).batches(Position(), 1))


def summary(times: dict[str, list[float]]) -> dict[str, JSON]:
    """Quartiles of each form [µs], and the part of an ordinary update that the others save."""
    ordinary = times["ordinary"]
    return {
        form: {
            "update_us": [round(quartile, 1) for quartile in statistics.quantiles(of_form, n=4)],
            "saves": round(statistics.median(1 - one / other for one, other in zip(of_form, ordinary, strict=True)), 3),
        }
        for form, of_form in times.items()
    }


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--out", type=Path, help="where results go (default: bench/results, dated)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    content = results.document(
        "captured passes on a CPU", f"python -m bench.train.captured --rounds {given.rounds}", {}
    )
    content |= {"rounds": given.rounds, "cases": {}}
    path = given.out or dated("captured")
    for small, precision in itertools.product(SMALL, ("fp32", "bf16")):
        name = f"{small.title}, {precision}"
        found = content["cases"][name] = summary(update_us(small, precision, given.rounds))
        results.save(path, content)
        words = [f"{form} {one['update_us'][1]:.0f} µs ({one['saves']:.0%} saved)" for form, one in found.items()]
        print(f"{name}: {' · '.join(words)}", flush=True)


if __name__ == "__main__":
    main()

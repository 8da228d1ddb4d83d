"""Layouts of four processes, and products of three axes over eight, against one process that trains the same job.

    python -m bench.many.parity [--layouts NAME …]

A GPT of four blocks with ignored targets, clipping and uneven last batches, in both precisions; where it goes along, a
Llama with shared keys and values, a CNN whose batch norm is over the whole batch, or, in stages, a GPT with tied
weights and an encoder and a decoder whose blocks give each other several tensors, in float64. Compared are the
losses of 30 updates (the largest relative difference) and, in float64, the weights at the end (relative to the larger
of each tensor's own size and a thousandth of the largest weight). Everything runs here, over gloo, one thread each.
Printed and written to bench/results/; with --layouts, what the day's file has of other layouts stays.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.train.results import document, read, save
from stoker.jobs import AdamW, Job
from stoker.records import Coupling, Layout, Plan
from stoker.stepping.world import ALONE, World
from stoker.testing.ranks import on_ranks
from stoker.zoo import GPT, Llama
from tests.stepping.driving import SEPARABLE, grouped, largest_difference
from tests.stepping.layouts.conformance import UPDATES, Learned, cnn_job, largest_loss_difference, taught
from tests.stepping.layouts.passing import passing_job
from tests.stepping.models import make_job, texts

LIMITS = {torch.float64: 1e-9, torch.float32: 1e-6}

LAYOUTS = {
    "replicas 4": Layout(replicas=4),
    "shards 4": Layout(shards=4),
    "replicas 2 x shards 2": Layout(replicas=2, shards=2),
    "tensor 4": Layout(tensor=4),
    "tensor 4, sequence": Layout(tensor=4, sequence=True),
    "replicas 2 x tensor 2": Layout(replicas=2, tensor=2),
    "shards 2 x tensor 2": Layout(shards=2, tensor=2),
    "shards 2 x tensor 2, sequence": Layout(shards=2, tensor=2, sequence=True),
    "stages 4": Layout(stages=4),
    "stages 4, gpipe": Layout(stages=4, schedule="gpipe"),
    "stages 4 of 2 chunks": Layout(stages=4, chunks=2),
    "stages 2 of 2 chunks x replicas 2": Layout(stages=2, chunks=2, replicas=2),
    "stages 2 of 2 chunks x tensor 2": Layout(stages=2, chunks=2, tensor=2),
    "stages 2 of 2 chunks x tensor 2, sequence": Layout(stages=2, chunks=2, tensor=2, sequence=True),
    "stages 2 x replicas 2": Layout(stages=2, replicas=2),
    "stages 2 x shards 2": Layout(stages=2, shards=2),
    "stages 2 x shards 2, kept gathered": Layout(stages=2, shards=2, reshard=False),
    "stages 2 x tensor 2": Layout(stages=2, tensor=2),
    "stages 2 x tensor 2, sequence": Layout(stages=2, tensor=2, sequence=True),
    "stages 2 x replicas 2 x tensor 2": Layout(stages=2, replicas=2, tensor=2),
    "stages 2 x shards 2 x tensor 2, sequence": Layout(stages=2, shards=2, tensor=2, sequence=True),
}
"""By name; each of four processes, or of eight."""


def gpt_job(*, layers: int = 4, tied: bool = False) -> Job:
    """A GPT of four blocks; an epoch's last batch has 7 samples of 16."""
    return make_job(
        lambda: GPT(layers=layers, width=32, heads=4, context=8, vocab=12, tied=tied),
        data=texts(55, masked=0.3),
        loss="token_cross_entropy",
        optimizer=AdamW(lr=1e-3),
        clip_norm=1.0,
        batch=16,
    )


def llama_job() -> Job:
    """As `gpt_job`, with rotary positions and query heads that share keys and values."""
    return make_job(
        lambda: Llama(layers=4, width=32, heads=8, kv_heads=4, hidden=48, vocab=12, context=8),
        clip_norm=1.0,
        batch=16,
        data=texts(55, masked=0.3),
        loss="token_cross_entropy",
        optimizer=AdamW(lr=1e-3),
    )


Case = tuple[str, torch.dtype]
"""A job of JOBS, and the numbers that it is computed in."""

JOBS: dict[str, tuple[Callable[[], Job], Coupling, int]] = {
    "gpt": (gpt_job, SEPARABLE, 4),
    "gpt of 8 blocks": (functools.partial(gpt_job, layers=8), SEPARABLE, 4),
    "tied gpt of 8 blocks": (functools.partial(gpt_job, layers=8, tied=True), SEPARABLE, 4),
    "passing of 8 blocks": (functools.partial(passing_job, 8), SEPARABLE, 4),
    "tied gpt": (functools.partial(gpt_job, tied=True), SEPARABLE, 4),
    "llama": (llama_job, SEPARABLE, 4),
    "cnn": (cnn_job, grouped(16), 16),
    "passing": (passing_job, SEPARABLE, 4),
}
"""By name: what makes the job, its coupling, and the samples that go through the model at once."""


def trained(world: World, cases: Sequence[Case], layout: Layout) -> list[Learned]:
    """What a member of `world` learns of each case."""
    found = []
    for name, dtype in cases:
        make, coupling, micro_batch = JOBS[name]
        plan = Plan(device="cpu", micro_batch=16 if world is ALONE else micro_batch, layout=layout)
        found.append(taught(world, make(), plan, coupling, dtype))
    return found


def cases_of(layout: Layout) -> tuple[Case, ...]:
    """What a layout is measured on: the CNN has no plan for a tensor group, and too few layers for four stages."""
    both: tuple[Case, ...] = (("gpt", torch.float64), ("gpt", torch.float32))
    if layout.tensor > 1:
        return (*both, ("llama", torch.float64))
    if layout.num_stages > 4:
        return tuple((f"{name} of 8 blocks", torch.float64) for name in ("gpt", "tied gpt", "passing"))
    if layout.stages > 1:
        both = *both, ("tied gpt", torch.float64), ("passing", torch.float64)
    return (*both, ("cnn", torch.float64)) if layout.stages < layout.world_size else both


def measured(layout: Layout) -> list[dict[str, Any]]:
    """The largest differences of any process of a layout from one process, for each case."""
    cases = cases_of(layout)
    started = time.perf_counter()
    found: list[list[Learned]] = on_ranks(layout, trained, cases, layout)
    took_s = time.perf_counter() - started
    return [_compared(case, list(each), took_s) for case, each in zip(cases, zip(*found, strict=True), strict=True)]


def _compared(case: Case, found: list[Learned], took_s: float) -> dict[str, Any]:
    name, dtype = case
    alone = _alone(case)
    losses = max(largest_loss_difference(one, alone) for one in found)
    weights = max(largest_difference(one.weights, alone.weights) for one in found)
    is_held = losses <= LIMITS[dtype] and (dtype != torch.float64 or weights <= LIMITS[dtype])
    return {
        "job": name,
        "dtype": str(dtype).removeprefix("torch."),
        "largest_loss_difference": losses,
        "largest_weight_difference": weights,
        "limit": LIMITS[dtype],
        "holds": is_held,
        "took_with_the_others_s": round(took_s, 1),
    }


@functools.cache
def _alone(case: Case) -> Learned:
    """What one process learns, with each batch in one piece."""
    return trained(ALONE, [case], Layout())[0]


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    chosen: list[str] = parser.parse_args().layouts
    torch.set_num_threads(1)
    content: dict[str, Any] = document(
        "four and eight processes against one, over gloo on the loopback, one thread each",
        "python -m bench.many.parity",
        {"torch": torch.__version__},
    )
    path = Path(__file__).parents[1] / "results" / f"parity_{content['date']}.json"
    results: dict[str, Any] = read(path).get("layouts", {})  # type: ignore[assignment]
    content |= {"updates": UPDATES, "layouts": results}
    print(f"{'layout':41} {'job':20} {'numbers':8} {'loss':>8} {'weights':>8} {'limit':>6}")
    for name in chosen:
        results[name] = measured(LAYOUTS[name])
        for one in results[name]:
            print(
                f"{name:41} {one['job']:20} {one['dtype']:8} {one['largest_loss_difference']:8.1e} "
                f"{one['largest_weight_difference']:8.1e} {one['limit']:6.0e}"
                f"{'' if one['holds'] else '  DOES NOT HOLD'}",
                flush=True,
            )
        content["holds"] = results.keys() == LAYOUTS.keys() and all(
            one["holds"] for each in results.values() for one in each
        )
        save(path, content)
    print(f"{'holds' if content['holds'] else 'DOES NOT HOLD, or not measured yet'}; written to {path}")


if __name__ == "__main__":
    main()

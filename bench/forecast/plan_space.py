"""Which plans of a job are tried here: named beforehand by a fixed rule, never by what they turned out to be."""

from __future__ import annotations

import itertools
import random
from dataclasses import asdict

from stoker.records import Coupling, Plan, digest

MOST = 48
SEED = 20261122
_MICRO_BATCHES = 3

RULE = (
    f"The whole batch and its first {_MICRO_BATCHES - 1} halvings that are legal, x fp32 and, where the CPU computes "
    "in it, bf16 x 1 thread and all cores x contiguous and, with convolutions, channels-last x default and fused "
    "optimiser x no block and all blocks "
    f"checkpointed x retained, default and mapped malloc. Of these at most {MOST}: first all with retained malloc that "
    "neither checkpoint nor go below half a batch, in the grid's order, up to two thirds of the places; the rest are "
    "drawn from what is left "
    f"by random.Random({SEED})."
)


def every_plan(
    *,
    coupling: Coupling,
    batch: int,
    cores: int,
    num_blocks: int,
    has_convolutions: bool,
    precisions: tuple[str, ...] = ("fp32", "bf16"),
) -> list[Plan]:
    """The whole grid, in a fixed order."""
    axes = {
        "micro_batch": coupling.legal_micro_batches(batch)[:_MICRO_BATCHES],
        "precision": precisions,
        "threads": tuple(dict.fromkeys((cores, 1))),
        "memory_format": ("contiguous", "channels_last") if has_convolutions else ("contiguous",),
        "optimizer_implementation": ("default", "fused"),
        "checkpointed_blocks": tuple(dict.fromkeys((0, num_blocks))),
        "malloc": ("retained", "default", "mapped"),
    }
    return [Plan(device="cpu", **dict(zip(axes, chosen, strict=True))) for chosen in itertools.product(*axes.values())]


def registered_plans(grid: list[Plan], most: int = MOST, seed: int = SEED) -> list[Plan]:
    """At most `most` plans of the grid, by RULE."""
    if len(grid) <= most:
        return grid
    largest = max(plan.micro_batch for plan in grid)
    likely = [
        plan
        for plan in grid
        if plan.checkpointed_blocks == 0 and plan.malloc == "retained" and 2 * plan.micro_batch >= largest
    ][: 2 * most // 3]
    rest = [plan for plan in grid if plan not in likely]
    return likely + random.Random(seed).sample(rest, most - len(likely))


def same_execution(one: Plan, other: Plan) -> bool:
    """Whether two plans do the same in an update; when they save, and how they fetch, is left out."""
    return digest(_what_counts(one)) == digest(_what_counts(other))


def _what_counts(plan: Plan) -> dict[str, object]:
    left_out = ("loader", "num_workers", "prefetch_batches", "checkpoint_every_s", "device_mtbf_h")
    return {name: value for name, value in asdict(plan).items() if name not in left_out}

"""Evaluating the weights worth keeping on all of a set, in order."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from stoker.errors import RunFailed
from stoker.loading import Samples, Split, in_order
from stoker.stepping import Step

LOWER_IS_BETTER = frozenset({"loss", "mse", "l1"})


def evaluate(step: Step, samples: Samples, size: int, beat: Callable[[], None] | None = None) -> dict[str, float]:
    """The loss and every metric over `samples`, evaluated in batches of `size`: sums divided once by their counts.

    Several processes take a part each, and all have the result.
    `beat` is called after each batch, for whoever watches whether something goes on.

    Raises:
        RunFailed: a metric counted nothing.
    """
    sums: dict[str, float] = {}
    counts: dict[str, float] = {}
    world = step.world
    part = Split(world.data_rank, world.layout.data_size)
    with step.evaluation() as measure:
        for batch in in_order(samples, step.pipeline(samples, augmented=False), size, part):
            counts_here = all(one.counts for one in batch.passes(size))
            for name, found in measure(batch.cut(0, batch.size), batch.size).items():
                sums[name] = sums.get(name, 0.0) + float(found.sum) * counts_here
                counts[name] = counts.get(name, 0.0) + float(found.count) * counts_here
            if beat is not None:
                beat()
        if part.parts > 1:
            both = torch.tensor([list(sums.values()), list(counts.values())], dtype=torch.float64, device=step.device)
            total_sums, total_counts = world.total(both).tolist()
            sums, counts = dict(zip(sums, total_sums, strict=True)), dict(zip(sums, total_counts, strict=True))
    if empty := [name for name, count in counts.items() if count == 0]:
        raise RunFailed(f"{empty[0]} counted nothing in {len(samples)} samples of {samples.name}")
    return {name: sums[name] / counts[name] for name in sums}


def evaluation_batch(step: Step) -> int:
    """Samples evaluated at once: the plan's micro-batch, which is one group where the loss needs whole groups."""
    return step.plan.micro_batch


def is_better(name: str, value: float, than: float | None, *, lower: bool = False) -> bool:
    """Whether `value` of the measure `name` is better; any number is better than none, or than NaN.

    Lower is better of the loss, of errors by name, and where `lower` says so.
    """
    if than is None or math.isnan(than):
        return than is None or not math.isnan(value)
    return value < than if lower or name in LOWER_IS_BETTER else value > than

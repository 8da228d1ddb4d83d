"""Evaluating the weights worth keeping on all of a set, in order."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch

from stoker.errors import RunFailed
from stoker.jobs.stopping import LOWER_IS_BETTER
from stoker.loading import Batch, Content, Samples, Split, in_order
from stoker.stepping import Step, ran_out_of_memory
from stoker.stepping.losses import Compared
from stoker.training.metrics import stateful_metrics


class Watcher(Protocol):
    """Looks on while a set is evaluated."""

    def see(self, output: Any, target: Any, content: Content, batch: Batch) -> None:
        """Take in a batch of samples that count here, which `content` is, ready for the model."""
        ...

    def miss(self, problem: Exception) -> None:
        """Hear why there is no output to see of a batch; its loss may be there all the same."""
        ...


def evaluate(
    step: Step, samples: Samples, size: int, beat: Callable[[], None] | None = None, watcher: Watcher | None = None
) -> dict[str, float]:
    """The loss and every metric over `samples`, evaluated in batches of `size`: sums divided once by their counts.

    Metrics that keep a state are copied, see every sample once, and compute what they compute at the end.
    Several processes take a part each, and all have the result.
    `beat` is called after each batch, for whoever watches whether something goes on; `watcher` sees the samples that
    are evaluated here.

    Raises:
        RunFailed: a metric counted nothing.
        BadJob: a metric with a state gives something else than numbers, or cannot be had from several processes.
    """
    sums: dict[str, float] = {}
    counts: dict[str, float] = {}
    world = step.world
    part = Split(world.data_rank, world.layout.data_size)
    stateful = stateful_metrics(step)
    shown: list[tuple[Batch, bool]] = []

    def observe(compared: Compared, content: Content) -> None:
        batch, counts_here = shown[-1]
        try:
            output, target = compared()  # also where nothing counts: processes that share a model meet in it
        except Exception as problem:
            if watcher is None or stateful is not None or ran_out_of_memory(problem):
                raise
            watcher.miss(problem)
            return
        if counts_here and stateful is not None:
            with torch.autocast(step.device.type, enabled=False):
                stateful.update(output, target)
        if counts_here and watcher is not None:
            watcher.see(output, target, content, batch)

    is_observed = stateful is not None or watcher is not None
    with step.evaluation() as measure, step.objective.observed_by(observe if is_observed else None):
        for batch in in_order(samples, step.pipeline(samples, augmented=False), size, part):
            counts_here = all(one.counts for one in batch.passes(size))
            shown[:] = [(batch, counts_here)]
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
    whole = {name: sums[name] / counts[name] for name in sums}
    return whole if stateful is None else whole | stateful.computed(world)


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

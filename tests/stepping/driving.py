"""Training a job for a few updates under a plan, and comparing what comes out."""

from __future__ import annotations

import math

import torch

from stoker.jobs import Job
from stoker.loading.batches import BatchSource
from stoker.loading.datasets import datasets_of
from stoker.records import Coupling, Plan, Position
from stoker.stepping.step import Step

SEPARABLE = Coupling(kind="separable", group=None, causes=(), evidence="known")


def grouped(group: int) -> Coupling:
    """Coupled by batch norm in groups of so many samples."""
    return Coupling(kind="batch_norm", group=group, causes=("BatchNorm",), evidence="known")


def plan_of(micro_batch: int, **changed: object) -> Plan:
    """A plan for the CPU."""
    return Plan(device="cpu", micro_batch=micro_batch, **changed)  # type: ignore[arg-type]


def source_of(job: Job, step: Step) -> BatchSource:
    """The training batches of a step."""
    data = datasets_of(job)
    pipeline = step.pipeline(data.train, augmented=True)
    return BatchSource(data.train, pipeline, data.extent(job), job.seed, step.plan)


def train(job: Job, step: Step, updates: int, *, begin: int = 0, of: int = 30) -> list[float]:
    """Make `updates` updates from number `begin` on, of a run of `of`; the loss of each."""
    position = datasets_of(job).extent(job).position(begin)
    batches = source_of(job, step).batches(position, begin + updates)
    return [float(step.update(batch, update, update / of)) for update, batch in enumerate(batches, begin)]


def trained(
    job: Job,
    micro_batch: int,
    coupling: Coupling = SEPARABLE,
    *,
    updates: int = 12,
    dropout: bool = True,
    **plan: object,
) -> Step:
    """A step in float64 after so many updates."""
    step = Step(job, plan_of(micro_batch, **plan), coupling, dtype=torch.float64, dropout=dropout)
    train(job, step, updates)
    return step


def tensors_of(step: Step) -> dict[str, torch.Tensor]:
    """Weights, buffers and averages by name."""
    average = {} if step.average is None else {f"average {name}": w for name, w in step.average.weights.items()}
    return {name: tensor.detach() for name, tensor in {**step.model.state_dict(), **average}.items()}


def largest_difference(one: Step | dict[str, torch.Tensor], other: Step | dict[str, torch.Tensor]) -> float:
    """The largest difference of any two tensors, relative to the larger of their size and 1e-3 of the largest weight.

    Infinite where whole numbers, such as counts of batches, differ.
    """
    mine, theirs = (tensors_of(s) if isinstance(s, Step) else s for s in (one, other))
    assert mine.keys() == theirs.keys()
    floats = [name for name, tensor in theirs.items() if tensor.is_floating_point() or tensor.is_complex()]
    if not all(torch.equal(mine[name], theirs[name]) for name in mine if name not in floats):
        return math.inf
    sizes = {name: float(theirs[name].detach().abs().max()) for name in floats}
    floor = 1e-3 * max(sizes.values())
    return max(float((mine[name] - theirs[name]).abs().max()) / max(sizes[name], floor) for name in floats)


def are_equal(one: Step, other: Step) -> bool:
    """Whether two steps hold the same bits."""
    mine, theirs = tensors_of(one), tensors_of(other)
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def whole_stream(job: Job, step: Step, updates: int) -> list[tuple[torch.Tensor, ...]]:
    """The optimiser batches themselves, for loops written by hand."""
    batches = source_of(job, step).batches(Position(), updates)
    return [batch.cut(0, batch.size) for batch in batches]

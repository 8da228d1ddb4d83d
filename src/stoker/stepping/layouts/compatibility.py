"""Plans that would change what is learned, or do not go with a job, refused. Needs no process: planning asks too."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer as TorchOptimizer

from stoker.errors import BadJob
from stoker.jobs import Job, Muon, Optimizer
from stoker.jobs.metrics import is_stateful
from stoker.records import ONE_PROCESS, Coupling, Layout, Plan
from stoker.stepping.losses import measure_name, takes_model
from stoker.stepping.torch_optimizers import needs_closure

_ALONE = "Use a plan for one process"


def micro_batch_problem(coupling: Coupling, micro_batch: int, batch: int, layout: Layout) -> str | None:
    """Why passes of `micro_batch` samples in each process would change what is learned; None where they do not.

    Processes that share a batch take a part of each group of coupled samples, all in one pass.
    """
    if (problem := layout.problem_with(coupling, batch)) is not None:
        return problem
    parts = layout.data_size
    if parts == 1 or coupling.group is None:
        return coupling.problem_with(micro_batch, batch)
    part = math.ceil(min(coupling.group, batch) / parts)
    if micro_batch < part:
        causes = ", ".join(coupling.causes)
        return (
            f"samples are coupled in groups of {coupling.group} by {causes}, of which each of {parts} processes takes "
            f"{part} samples: a micro-batch has at least {part} samples, not {micro_batch}"
        )
    return coupling.problem_with(batch, batch) if micro_batch > batch else None


def require_legal(job: Job, plan: Plan, coupling: Coupling) -> None:
    """Refuse a plan that would change what is learned, or divides what must stay whole.

    Raises:
        BadJob: the plan and the job do not go together.
    """
    layout = plan.layout if job.sync is None else ONE_PROCESS  # independent sites are each like one process
    optimizer, where = job.optimizer, f"{layout.world_size} processes ({layout.in_words()})"
    if layout.world_size > 1 and job.step is not None:
        raise BadJob(
            f"the job's own step makes a whole update by itself, and cannot be divided over {where}",
            remedy=f"{_ALONE}, or give Job(loss=…) in place of step=…",
        )
    if layout.world_size > 1 and plan.compile:
        raise BadJob(
            f"compiled plans are one process's so far, and this one is for {where}",
            remedy="Use the plan without compile.",
        )
    if isinstance(optimizer, Optimizer) and not optimizer.is_elementwise and layout.shards * layout.tensor > 1:
        does = "orthogonalises" if isinstance(optimizer, Muon) else "scales"
        raise BadJob(
            f"{type(optimizer).__name__} {does} whole matrices, and {layout.in_words()} hold parts of them",
            remedy="Use replicas, which hold them whole, or another optimiser.",
        )
    if problem := micro_batch_problem(coupling, plan.micro_batch, job.batch, layout):
        raise BadJob(f"this plan would change what is learned: {problem}")


def require_no_closure(optimizer: TorchOptimizer, layout: Layout) -> None:
    """Raise BadJob for several processes with an optimiser that recomputes the loss within its step."""
    if layout.world_size > 1 and needs_closure(optimizer):
        raise BadJob(
            f"{type(optimizer).__name__} computes the loss anew within its step, as often as it likes, which "
            f"{layout.world_size} processes ({layout.in_words()}) cannot do together",
            remedy=f"{_ALONE}, or an optimiser without a closure.",
        )


def add_penalty(penalty: Callable[[nn.Module], torch.Tensor], model: nn.Module) -> torch.Tensor:
    """Add the gradient of a penalty on the model's weights, which may be DTensors; returns the penalty.

    Raises:
        BadJob: it mixes such weights with other tensors.
    """
    try:
        value = penalty(model)
        value.backward()
    except RuntimeError as problem:
        if "mixed torch.Tensor and DTensor" not in str(problem):
            raise
        raise BadJob(
            "Job(penalty=…) mixes weights, which lie in parts on several processes, with tensors that do not: "
            f"{str(problem).splitlines()[0]}",
            remedy="Compute it from the weights alone (sums, norms, products of them), or use a layout of replicas.",
        ) from problem
    return value.detach()


def layout_problem(job: Job, layout: Layout) -> str | None:
    """Why the job does not go with a layout of a tensor group or stages; None where it does."""
    if layout.tensor > 1 and layout.stages > 1:
        return f"a layout has a tensor group or stages, not both, as {layout.in_words()}"
    optimizer, conflicts = job.optimizer, list[str]()
    if layout.tensor > 1:
        if job.penalty is not None:
            conflicts.append("Job(penalty=…), which would see parts of matrices")
        if isinstance(optimizer, Optimizer) and not optimizer.is_elementwise:
            conflicts.append(f"{type(optimizer).__name__}, which needs whole matrices")
    elif layout.stages > 1:
        given = [measure for measure in (job.loss, *job.metrics) if callable(measure)]
        of_model = [m for m in given if takes_model(m.forward if isinstance(m, nn.Module) else m)]
        if of_model:
            names = ", ".join(map(measure_name, of_model))
            conflicts.append(f"{names}, which takes the model: no stage has all of it")
        if job.penalty is not None:
            conflicts.append("Job(penalty=…): no stage has all weights")
        if stateful := [measure_name(metric) for metric in job.metrics if is_stateful(metric)]:
            conflicts.append(f"{', '.join(stateful)}, which sees outputs: only the last stage has them")
        if isinstance(optimizer, Muon):
            conflicts.append("Muon, which tells hidden matrices from the others by the whole model")
    return f"a layout of {layout.in_words()} does not go with {conflicts[0]}" if conflicts else None

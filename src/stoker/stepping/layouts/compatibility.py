"""What may be spread over processes without a change of what is learned, and what may not.

What jobs ask for that tensor groups and stages do not go with. Nothing here needs a process: planning asks too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

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
    """Refuse a plan that would change what is learned, or spreads what is done in one piece.

    Raises:
        BadJob: the plan and the job do not go together.
    """
    layout = plan.layout if job.sync is None else ONE_PROCESS  # sites that train apart are each like one process
    if layout.world_size > 1:
        _require_spreadable(job, plan)
    if problem := micro_batch_problem(coupling, plan.micro_batch, job.batch, layout):
        raise BadJob(f"this plan would change what is learned: {problem}")


def require_no_closure(optimizer: TorchOptimizer, layout: Layout) -> None:
    """Refuse to spread an optimiser that computes the loss anew within its step.

    Raises:
        BadJob: it does, and there are several processes.
    """
    if layout.world_size > 1 and needs_closure(optimizer):
        raise BadJob(
            f"{type(optimizer).__name__} computes the loss anew within its step, as often as it likes, which "
            f"{layout.world_size} processes ({layout.in_words()}) cannot do together",
            remedy=f"{_ALONE}, or an optimiser without a closure.",
        )


def add_penalty(penalty: Callable[[nn.Module], torch.Tensor], model: nn.Module) -> torch.Tensor:
    """Add the gradient of a penalty on the model's weights, of which there may be parts here; returns the penalty.

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


def _require_spreadable(job: Job, plan: Plan) -> None:
    layout = plan.layout
    where = f"{layout.world_size} processes ({layout.in_words()})"
    if job.step is not None:
        raise BadJob(
            f"the job's own step makes a whole update by itself, and cannot be divided over {where}",
            remedy=f"{_ALONE}, or give Job(loss=…) in place of step=…",
        )
    if plan.compile:
        raise BadJob(f"compiled plans are one process's so far, and this one is for {where}",
                     remedy="Use the plan without compile.")  # fmt: skip
    optimizer = job.optimizer
    if isinstance(optimizer, Optimizer) and not optimizer.is_elementwise and layout.shards * layout.tensor > 1:
        does = "orthogonalises" if isinstance(optimizer, Muon) else "scales"
        raise BadJob(
            f"{type(optimizer).__name__} {does} whole matrices, and {layout.in_words()} hold parts of them",
            remedy="Use replicas, which hold them whole, or another optimiser.",
        )


_Term = tuple[bool, str]
"""Whether it is asked for, and what it is."""


def layout_problem(job: Job, layout: Layout) -> str | None:
    """Why the job's matrices stay whole, or its model in one piece; None where the layout goes with it."""
    if layout.tensor > 1 and layout.stages > 1:
        return f"a layout has a tensor group or stages, not both, as {layout.in_words()}"
    terms = _tensor_terms(job) if layout.tensor > 1 else _stage_terms(job) if layout.stages > 1 else ()
    found = next((what for is_asked, what in terms if is_asked), None)
    return None if found is None else f"a layout of {layout.in_words()} does not go with {found}"


def _tensor_terms(job: Job) -> Iterable[_Term]:
    yield job.penalty is not None, "Job(penalty=…), which would see parts of matrices"
    optimizer = job.optimizer
    needs_all = isinstance(optimizer, Optimizer) and not optimizer.is_elementwise
    yield needs_all, f"{type(optimizer).__name__}, which needs whole matrices"


def _stage_terms(job: Job) -> Iterable[_Term]:
    of_model = [one for one in (job.loss, *job.metrics) if callable(one) and takes_model(_function(one))]
    names = ", ".join(map(measure_name, of_model))
    yield bool(of_model), f"{names}, which takes the model: no stage has all of it"
    yield job.penalty is not None, "Job(penalty=…): no stage has all weights"
    stateful = [measure_name(one) for one in job.metrics if is_stateful(one)]
    yield bool(stateful), f"{', '.join(stateful)}, which sees outputs: only the last stage has them"
    yield isinstance(job.optimizer, Muon), "Muon, which tells hidden matrices from the others by the whole model"


def _function(given: Any) -> Callable[..., Any]:
    return given.forward if isinstance(given, nn.Module) else given

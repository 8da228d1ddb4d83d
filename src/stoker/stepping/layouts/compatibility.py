"""Refuses plans that would change what is learned, or do not go with a job. Needs no process: planning asks too."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer as TorchOptimizer

from stoker.errors import BadJob
from stoker.jobs import Job, Muon, Optimizer
from stoker.jobs.averages import SWA
from stoker.jobs.metrics import is_stateful, metric_name
from stoker.jobs.optimizers import ScheduleFree
from stoker.layouts.rules import JobTraits, compile_problem, layout_problem
from stoker.records import ONE_PROCESS, Coupling, Layout, Plan
from stoker.records.plan import precision_problem, states_problem
from stoker.stepping.batch_norm import batch_norms
from stoker.stepping.losses import takes_model
from stoker.stepping.torch_optimizers import needs_closure


def micro_batch_problem(coupling: Coupling, micro_batch: int, batch: int, layout: Layout) -> str | None:
    """Why passes of `micro_batch` samples in each process would change what is learned; None where they do not.

    Processes that share a batch take a part of each group of coupled samples, all in one pass.
    """
    if (problem := layout.problem_with(coupling, batch)) is not None:
        return problem
    parts = layout.sample_parts
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


def traits_of(job: Job, model: nn.Module | None = None, **facts: Any) -> JobTraits:
    """What the job has that some layouts do not allow.

    Args:
        job: of a user.
        model: its model, which may be on the meta device; None where averages are judged elsewhere.
        facts: further fields of JobTraits.
    """
    optimizer, measures = (
        job.optimizer,
        [measure for measure in (job.objective.loss, *job.metrics) if callable(measure)],
    )
    needs_matrices = isinstance(optimizer, Optimizer) and not optimizer.is_elementwise
    averages = isinstance(job.average, SWA) or isinstance(optimizer, ScheduleFree)
    return JobTraits(
        has_own_step=job.step is not None,
        matrix_optimizer=type(optimizer).__name__ if needs_matrices else None,
        model_optimizer="Muon" if isinstance(optimizer, Muon) else None,
        is_synced=job.sync is not None,
        has_penalty=job.objective.penalty is not None,
        model_measures=tuple(
            metric_name(m) for m in measures if takes_model(m.forward if isinstance(m, nn.Module) else m)
        ),
        own_measures=tuple(map(metric_name, measures)),
        stateful_metrics=tuple(metric_name(metric) for metric in job.metrics if is_stateful(metric)),
        selects_samples=job.objective.selective_backprop is not None,
        has_own_loss=job.objective.loss == "own",
        skips_blocks=job.objective.stochastic_depth > 0,
        averages_statistics=averages and model is not None and bool(batch_norms(model)),
        **facts,
    )


def require_legal(job: Job, plan: Plan, coupling: Coupling) -> None:
    """Refuse a plan that would change what is learned, or divides what must stay whole.

    Raises:
        BadJob: the plan and the job do not go together.
    """
    _require_allowed(plan.layout, traits_of(job, tensor_devices=None))
    layout = plan.layout if job.sync is None else ONE_PROCESS  # independent sites are each like one process
    if plan.compile and (problem := compile_problem(plan, layout)):
        raise BadJob(problem, remedy="Use the plan without compile.")
    if problem := precision_problem(plan.precision, job.numerics):
        raise BadJob(problem, remedy="Allow it, or use a plan of precision bf16 or fp32.")
    if problem := states_problem(plan, job.numerics):
        raise BadJob(problem, remedy="Allow it, or use a plan of full optimizer_states.")
    if problem := micro_batch_problem(coupling, plan.micro_batch, job.batch_size, layout):
        raise BadJob(f"this plan would change what is learned: {problem}")


def require_no_closure(optimizer: TorchOptimizer, layout: Layout) -> None:
    """Raise BadJob for several processes with an optimiser that recomputes the loss within its step."""
    if needs_closure(optimizer):
        _require_allowed(layout, JobTraits(closure_optimizer=type(optimizer).__name__))


def _require_allowed(layout: Layout, traits: JobTraits) -> None:
    if problem := layout_problem(layout, traits):
        raise BadJob(
            f"{layout.in_words()}: {problem}",
            remedy="Use another layout (replicas hold whole models, a plan for one process divides nothing), or "
            "leave it out.",
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
            "Objective(penalty=…) mixes weights, of which several processes hold parts, with tensors that are whole: "
            f"{str(problem).splitlines()[0]}",
            remedy="Compute it from the weights alone (sums, norms, products of them), or use a layout of replicas.",
        ) from problem
    return value.detach()

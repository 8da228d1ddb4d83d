"""Layouts over several processes: each axis of `stoker.layouts` is executed by `EXECUTION` of the file of its name."""

import importlib

from torch import nn

from stoker.errors import BadJob
from stoker.jobs import Job
from stoker.layouts import axes_of
from stoker.loading.fields import Content
from stoker.records import Layout, Plan
from stoker.records.profile import ModelParts
from stoker.stepping.layouts.base import LayoutExecution, PassOf, SingleProcess, Strategy
from stoker.stepping.layouts.replicas import IndependentReplicas
from stoker.stepping.world import World


def execution(name: str) -> LayoutExecution:
    """The execution of layouts along the axis of that name."""
    found: LayoutExecution = importlib.import_module(f"{__name__}.{name}").EXECUTION
    return found


def data_execution(layout: Layout) -> LayoutExecution:
    """The execution of a layout's data parallelism; of replicas if no axis shares the batch."""
    sharing = {axis.name for axis in layout.divided if axis.shares_batch}
    return execution(next((axis.name for axis in axes_of(layout) if axis.name in sharing), "replicas"))


def stage_execution(layout: Layout) -> LayoutExecution:
    """The execution of what a layout divides within each stage; of replicas if it divides nothing."""
    within = [axis.name for axis in axes_of(layout) if axis.name != "stages"]
    return execution(within[0] if within else "replicas")


def parallelize(plan: Plan, model: nn.Module, world: World, job: Job, *, is_local_sgd: bool = False) -> Strategy:
    """The job's model, which is on its device, parallelized as the plan's layout says; `require_legal` allows it.

    With `is_local_sgd` replicas make their own updates.

    Raises:
        BadJob: the layout does not go with the job.
    """
    layout = plan.layout
    if layout != world.layout:
        planned, here = (each.in_words() or "one process" for each in (layout, world.layout))
        raise BadJob(f"the plan is for {planned}, but {here} are here")
    if is_local_sgd:
        return IndependentReplicas(model)
    if layout.world_size == 1:
        return SingleProcess(model)
    outermost = axes_of(layout)[0]
    return execution(outermost.name).parallelize(plan, model, world, job)


def model_problem(model: nn.Module, layout: Layout) -> str | None:
    """Why a model, which may be on the meta device, cannot be divided as a layout says; None if it can."""
    problems = (execution(axis.name).model_problem(model, layout) for axis in axes_of(layout))
    return next((problem for problem in problems if problem is not None), None)


def data_problem(job: Job, model: nn.Module, content: Content, layout: Layout) -> str | None:
    """Why a job's model, on the meta device, cannot be given such a batch under a layout; None if it can."""
    problems = (execution(axis.name).data_problem(job, model, content, layout) for axis in axes_of(layout))
    return next((problem for problem in problems if problem is not None), None)


def divided_parts(parts: ModelParts, model: nn.Module, layout: Layout, call: PassOf | None = None) -> ModelParts:
    """The parts of `model`, with what a layout divides of them; assumes that `model_problem` is None.

    `call` passes a batch of one sample through a model: what stages pass on depends on it.
    """
    for axis in axes_of(layout):
        parts = execution(axis.name).divided_parts(parts, model, layout, call)
    return parts

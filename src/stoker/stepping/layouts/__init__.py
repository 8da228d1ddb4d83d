"""Layouts over several processes: one file and method card each."""

from torch import nn

from stoker.errors import BadJob
from stoker.jobs import Job
from stoker.records import Plan
from stoker.stepping.layouts.base import SingleProcess, Strategy
from stoker.stepping.layouts.replicated import IndependentReplicas, Replicated
from stoker.stepping.world import World


def parallelize(plan: Plan, model: nn.Module, world: World, job: Job, *, is_apart: bool = False) -> Strategy:
    """The job's model, which is on its device, parallelized as the plan's layout says.

    With `is_apart` replicas update on their own.

    Raises:
        BadJob: the layout does not go with the job.
    """
    layout = plan.layout
    if layout != world.layout:
        planned, here = (each.in_words() or "one process" for each in (layout, world.layout))
        raise BadJob(f"the plan is for {planned}, but {here} are here")
    if is_apart and not layout.is_replicated:
        raise BadJob(
            f"sites that come together after an interval are replicas, not {layout.in_words()}",
            remedy="Use replicas alone, or a Job without sync.",
        )
    if is_apart:
        return IndependentReplicas(model)
    if layout.world_size == 1:
        return SingleProcess(model)
    if layout.is_replicated:
        return Replicated(model, world)
    if layout.stages == layout.tensor == 1:
        from stoker.stepping.layouts.sharded import Sharded  # noqa: PLC0415 - FSDP2 takes long to import

        return Sharded(model, world)
    if layout.stages == 1:
        from stoker.stepping.layouts.tensor_parallel import tensor_parallel  # noqa: PLC0415 - DTensor takes long as well

        return tensor_parallel(plan, model, world, job)
    from stoker.stepping.layouts.pipeline import pipeline  # noqa: PLC0415 - and so do its parts

    return pipeline(plan, model, world, job)

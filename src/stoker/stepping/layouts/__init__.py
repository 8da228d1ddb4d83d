"""Layouts over several processes: one file and method card each."""

from torch import nn

from stoker.errors import BadJob
from stoker.records import Plan
from stoker.stepping.layouts.base import Alone, Spread
from stoker.stepping.layouts.replicated import Replicated
from stoker.stepping.world import World

__all__ = ["Alone", "Spread", "spread"]


def spread(plan: Plan, model: nn.Module, world: World) -> Spread:
    """The model, which is on its device, spread as the plan's layout says.

    Raises:
        BadJob: the layout does not go with the job.
    """
    layout = plan.layout
    if layout != world.layout:
        raise BadJob(f"the plan is for {layout.in_words() or 'one process'}, but "
                     f"{world.layout.in_words() or 'one process'} are here")  # fmt: skip
    if layout.world_size == 1:
        return Alone(model)
    if layout.is_replicated:
        return Replicated(model, world)
    raise BadJob(f"there is no such layout yet: {layout.in_words()}")

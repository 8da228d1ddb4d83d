"""Sites that make updates of their own, in a checkpoint: each keeps a state of its own, and all share weights.

The first site's parts have the usual names, those of site 1 begin with `site1-`, and `shared` holds the weights that
all of them share, which are the ones worth keeping. As many sites as there were go on each from its own state; another
number of them, or processes that train in lockstep, from the shared weights.
"""

from __future__ import annotations

from typing import Any

from stoker.errors import BadRun
from stoker.records.codec import JSON
from stoker.stepping import Step
from stoker.training.state import rebuilt
from stoker.training.stored import OnDisk, whole_from

SHARED, OUTER = "shared", "outer"


def prefix_of(step: Step) -> str:
    """What the names of this process's parts begin with."""
    return f"site{step.world.rank}-" if step.outer is not None and step.world.rank else ""


def parts_of(step: Step) -> dict[str, Any]:
    """What sites keep beside the usual parts, as trees by part."""
    if step.outer is None:
        return {}
    shared = {SHARED: step.outer.weights()} if step.world.is_first else {}
    return {f"{prefix_of(step)}{OUTER}": step.outer.state(), **shared}


def prefix_in(step: Step, skeletons: dict[str, JSON]) -> str:
    """What the names of the parts begin with that this process goes on from."""
    return prefix_of(step) if _num_sites(skeletons) == step.world.layout.replicas else ""


def weights_part(step: Step, skeletons: dict[str, JSON]) -> str:
    """The part that this process's weights come from."""
    if step.outer is None and SHARED in skeletons:
        return SHARED
    return f"{prefix_in(step, skeletons)}model"


def restore_outer(step: Step, skeletons: dict[str, JSON], source: OnDisk) -> None:
    """Put back what sites keep, after model and optimiser; each of them calls this.

    Raises:
        BadRun: the checkpoint is of processes in lockstep, or of other fragments.
    """
    if step.outer is None:
        return
    if OUTER not in skeletons:
        raise BadRun("this checkpoint is of processes that trained in lockstep; sites cannot go on from it",
                     remedy="Leave out Job(sync=…), or start anew with --new.")  # fmt: skip
    state = rebuilt(skeletons[f"{prefix_in(step, skeletons)}{OUTER}"], whole_from(source))
    if _num_sites(skeletons) != step.world.layout.replicas:
        del state["site"]
    try:
        step.outer.load(state)
    except ValueError as error:
        raise BadRun(f"this checkpoint does not fit the job's sync: {error}",
                     remedy="Was sync changed? --new starts anew.") from error  # fmt: skip


def _num_sites(skeletons: dict[str, JSON]) -> int:
    """How many sites wrote it; 0 if it is not of sites."""
    return sum(part == OUTER or part.endswith(f"-{OUTER}") for part in skeletons)

"""Which layouts a job allows: rules for all layouts, then those of each axis. What the model allows, executions say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stoker.devices.cluster import NODE_DEVICES
from stoker.layouts import axes_of
from stoker.records import Coupling, Layout, Plan


@dataclass(frozen=True, kw_only=True)
class JobTraits:
    """Traits of a job that some layouts do not allow; `stoker.stepping.layouts.compatibility` finds it.

    `batch` are samples of an update, and `coupling` is theirs; None where both are judged with the micro-batch.
    `closure_optimizer` is the name of an optimiser that computes the loss within its step, `matrix_optimizer` of one
    that needs whole matrices, and `model_optimizer` of one that needs the whole model. `is_synced`: sites make updates
    of their own (`Job(sync=…)`). `own_measures` are names of losses and metrics that are a user's functions,
    `model_measures` of those of the form (model, batch), `stateful_metrics` of metrics that see all outputs.
    `averages_statistics`: averaged weights need running statistics of their own. `selects_samples`: an update takes the
    samples with the highest losses. `has_own_loss`: the model computes its loss. `skips_blocks`: blocks are left out
    for some samples. `tensor_devices` are the most of a tensor group, which passes messages within each layer: those of
    a machine, or that share its links (None: no limit, as where a run has its devices).
    """

    batch: int | None = None
    coupling: Coupling | None = None
    has_own_step: bool = False
    closure_optimizer: str | None = None
    matrix_optimizer: str | None = None
    model_optimizer: str | None = None
    is_synced: bool = False
    has_penalty: bool = False
    model_measures: tuple[str, ...] = ()
    own_measures: tuple[str, ...] = ()
    stateful_metrics: tuple[str, ...] = ()
    averages_statistics: bool = False
    selects_samples: bool = False
    has_own_loss: bool = False
    skips_blocks: bool = False
    tensor_devices: int | None = NODE_DEVICES


def compiles(layout: Layout) -> bool:
    """Whether some plans of a layout may be compiled."""
    return all(axis.compiles for axis in axes_of(layout))


def compile_problem(plan: Plan, layout: Layout) -> str | None:
    """What of a plan under a layout does not go with compiling it; None if it may be compiled."""
    if not compiles(layout):
        return (
            "compiled plans are for one process, replicas, shards and experts so far, and this one is for "
            f"{layout.in_words()}"
        )
    is_selective = plan.checkpointed_blocks > 0 and plan.checkpointing == "selective"
    if is_selective and any(axis.exchanges_in_blocks for axis in axes_of(layout)):
        return (
            f"under {layout.in_words()} blocks are compiled in parts, around what they exchange, and selective "
            "checkpointing of a compiled block has to be within its code; checkpointing in full goes with it"
        )
    return None


def layout_problem(layout: Layout, job: JobTraits) -> str | None:
    """Why a job does not allow a layout, with the numbers and what it would allow; None if it does."""
    return next(_problems(layout, job), None) if layout.world_size > 1 else None


def _problems(layout: Layout, job: JobTraits) -> Iterator[str]:
    if job.has_own_step:
        yield "the job's own step makes a whole update by itself"
    if job.closure_optimizer is not None:
        yield f"{job.closure_optimizer} computes the loss again within its step"
    if job.selects_samples:
        yield "selective backprop compares the losses of a whole batch, of which each process has a part"
    if job.is_synced and not layout.is_replicated:
        yield "sites that come together after an interval (sync=…) hold whole models"
    if job.coupling is not None and job.batch is not None:
        problem = layout.problem_with(job.coupling, job.batch)
        if problem is not None:
            yield problem
    if job.averages_statistics and not layout.is_replicated:
        yield "the averaged weights need running statistics of their own, which takes whole models"
    for axis in sorted(axes_of(layout), key=lambda axis: axis.complexity):
        if (problem := axis.problem_with(layout, job)) is not None:
            yield problem

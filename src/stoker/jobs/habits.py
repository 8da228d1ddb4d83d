"""Checks of a Job's settings beside the step itself: ends before time, averages, plateaus, schedule-free optimisers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from stoker.jobs.averages import SWA
from stoker.jobs.metrics import direction_of, metric_name
from stoker.jobs.more_optimizers import ScheduleFree
from stoker.jobs.schedule_shapes import Plateau, Warmup
from stoker.jobs.schedules import Constant
from stoker.jobs.stopping import EarlyStopping, Target, bare_name

if TYPE_CHECKING:
    from stoker.jobs.job import Job

Check = tuple[str, bool, str]
"""A field, whether its setting can be meant, and what is wrong if not."""


def habit_checks(job: Job) -> Iterator[Check]:
    """What can be told of these settings before anything is made of them."""
    yield from _stops(job)
    yield from _swa(job)
    yield from _schedule_free(job)
    if (plateau := plateau_of(job)) is not None:
        yield from _measured("schedule", job, plateau.metric, lower_is_better=plateau.lower_is_better)


def choice_checks(job: Job) -> Iterator[Check]:
    """What the choice of the weights that a run keeps can be."""
    given: object = job.select
    if given in ("best", "last"):
        return
    known = _measures(job)
    is_known = isinstance(given, str) and measure_of(job, given).partition("[")[0] in known
    yield "select", is_known, f'wanted "best" or "last", or a measure ({", ".join(known)}), got {given!r}'
    if isinstance(given, str):
        yield from _measured("select", job, given, lower_is_better=None)


def measure_of(job: Job, metric: str) -> str:
    """The measure that a setting names, without split and set: `accuracy` of `valid/unseen/accuracy`."""
    name = bare_name(metric)
    first, _, rest = name.partition("/")
    return rest if rest and f"valid/{first}" in job.validation else name


def plateau_of(job: Job) -> Plateau | None:
    """The plateau that the job's schedule is, or warms up to."""
    schedule: object = job.schedule
    while isinstance(schedule, Warmup):
        schedule = schedule.then
    return schedule if isinstance(schedule, Plateau) else None


def _stops(job: Job) -> Iterator[Check]:
    given: object = job.stop
    if not isinstance(given, list | tuple):
        yield "stop", False, f"wanted a list of stoker.EarlyStopping(…) and stoker.Target(…), got {given!r}"
        return
    for one in given:
        is_stop = isinstance(one, EarlyStopping | Target)
        yield "stop", is_stop, f"wanted stoker.EarlyStopping(…) or stoker.Target(…), got a {type(one).__name__}"
        if isinstance(one, Target):
            is_share = bare_name(one.metric).endswith("accuracy")
            yield "stop", not is_share or one.value <= 1, f"{one.metric} is a share: Target({one.metric!r}, 0.95), say"
        if is_stop:
            yield from _measured("stop", job, one.metric, lower_is_better=one.lower_is_better)


def _measures(job: Job) -> list[str]:
    """Names of what an evaluation of one set measures."""
    metrics = job.metrics if isinstance(job.metrics, list | tuple) else ()
    return [*(["loss"] if job.loss is not None else []), *map(metric_name, metrics)]


def _measured(field: str, job: Job, metric: str, *, lower_is_better: bool | None) -> Iterator[Check]:
    """What asks for the measure `metric` on `valid`."""
    name = measure_of(job, metric)
    metrics = list(job.metrics) if isinstance(job.metrics, list | tuple) else []
    known = _measures(job)
    yield field, job.valid is not None, f"{metric!r} is measured on valid data, which the job does not have"
    is_known = name in known or name.partition("[")[0] in known
    sets = [split.removeprefix("valid/") for split in job.validation if split != "valid"]
    of_sets = f", each also with its set before it: {'/…, '.join(sets)}/…" if sets else ""
    yield field, is_known, f"{metric!r} is none of this job's measures: {', '.join(known)}{of_sets}"
    is_told = direction_of(name, metrics, lower_is_better) is not None
    say = "give the metric an attribute lower_is_better" if field == "select" else "lower_is_better=True or False"
    yield field, is_told or not is_known, f"say of {metric!r} which way is better: {say}"


def _swa(job: Job) -> Iterator[Check]:
    if job.swa is None:
        return
    yield "swa", isinstance(job.swa, SWA), f"wanted stoker.SWA(…), got {job.swa!r}"
    yield "swa", job.ema is None, "ema is another average of the weights, and a run keeps one"
    yield "swa", job.sync is None, "an average would be of one site's weights; sync has shared weights of its own"


def _schedule_free(job: Job) -> Iterator[Check]:
    if not isinstance(job.optimizer, ScheduleFree):
        return
    name = type(job.optimizer).__name__
    schedule: object = job.schedule.then if isinstance(job.schedule, Warmup) else job.schedule
    has_none = isinstance(schedule, Constant)
    yield "schedule", has_none, f"{name} goes without one: leave it out, or give schedules.warmup(…) alone"
    for other in ("ema", "swa", "sync", "step"):
        yield other, getattr(job, other) is None, f"does not go with {name}, whose own average is what is kept"

"""Whether a job can be trained by a population: which of its settings may change in the middle of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from stoker.errors import BadJob
from stoker.jobs import Optimizer
from stoker.jobs.describe import describe_settings
from stoker.jobs.habits import plateau_of
from stoker.records.codec import JSON
from stoker.records.study import Parameter
from stoker.tuning.space import Space, examples, points_of

if TYPE_CHECKING:
    from stoker.flow.preparation import Prepared

CHANGEABLE = frozenset(
    {"optimizer", "schedule", "augment", "mix", "label_smoothing", "clip_norm", "penalty", "on_non_finite"}
)
"""Settings of a job that act on one update at a time; of an optimiser its numbers, of a model those without weights."""

_REMEDY = "Search such settings with --sampler tpe; a population changes them in the middle of a run."

Make = Callable[[dict[str, JSON]], Prepared]


def require_changeable(make: Make, space: Space, seed: int) -> None:
    """Refuse a job or a space that a population cannot train; each setting is looked at from end to end.

    Args:
        make: a job made ready, from its settings.
        space: what is searched.
        seed: the study's.

    Raises:
        BadJob: what stands in the way, and what to do about it.
    """
    (base,) = examples(space, 1, seed)
    first = make(base)
    require_forkable(first)
    for parameter in space:
        for value in _others(parameter, base[parameter.name]):
            if (change := changed_by(first, make(base | {parameter.name: value}))) is not None:
                raise BadJob(
                    f"{parameter.name} changes {change}, which cannot change in the middle of a run",
                    remedy=f"Take it out of --space and give it by --set {parameter.name}=VALUE. {_REMEDY}",
                )


def require_forkable(prepared: Prepared) -> None:
    """Refuse a job in which something goes over a whole run that no member of a population makes by itself.

    Raises:
        BadJob: what that is.
    """
    job = prepared.job
    kept = {
        "Job(until=seconds(…)): an interval is counted in samples": job.until.unit == "seconds",
        "Job(stop=…): its patience would count evaluations of several members": bool(job.stop),
        "a plateau schedule: it would count evaluations of several members": plateau_of(job) is not None,
        "Job(swa=…): its average would be of several members": job.swa is not None,
        "Job(sync=…)": job.sync is not None,
        "an optimiser of its own: only Stoker's take new settings in the middle of a run": not isinstance(
            job.optimizer, Optimizer
        ),
        "data that is read as a stream: where its reader is cannot be computed": prepared.data.train.data_class
        != "indexed",
    }
    for what, is_there in kept.items():
        if is_there:
            raise BadJob(f"--sampler pbt does not train a job with {what}", remedy="Use --sampler tpe.")


def changed_by(one: Prepared, other: Prepared) -> str | None:
    """What differs between two jobs that no run can change on its way; None if there is nothing."""
    if _shapes(one) != _shapes(other):
        return "the model's weights"
    if one.data.fingerprint() != other.data.fingerprint():
        return "the data"
    mine, theirs = describe_settings(one.job), describe_settings(other.job)
    for name in dict.fromkeys((*mine, *theirs)):
        if name not in CHANGEABLE and mine.get(name) != theirs.get(name):
            return f"Job({name}=…)"
    return "the kind of optimiser" if type(one.job.optimizer) is not type(other.job.optimizer) else None


def _others(parameter: Parameter, value: JSON) -> Iterator[JSON]:
    """Values far from this one: all other choices, or the ends and the middle of a range."""
    points = points_of(parameter)
    shown = points if parameter.kind == "choice" else (points[0], points[len(points) // 2], points[-1])
    return (one for one in dict.fromkeys(shown) if one != value)


def _shapes(prepared: Prepared) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in prepared.model.state_dict().items()}

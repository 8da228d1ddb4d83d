"""Population based training: who goes on from whose weights, and under which settings.

What:  members are trained side by side. At the end of each interval the worst quarter goes on from the weights and the
       settings of one of the best quarter (exploit), the settings a little changed (explore).
Use when: settings should change while a model trains, such as the learning rate; several trainings can be paid for.
Costs: a whole training for each member, and a start for each of its intervals.
Does not combine with: a pruner, settings that cannot change in the middle of a run, a storage that machines share.
Source: M. Jaderberg et al., "Population Based Training of Neural Networks", 2017, sections 3 and 4.1.1: truncation
       selection, factors of 0.8 and 1.2. Differs: members wait for each other, so that what comes of it does not depend
       on who is faster; a quarter for its fifth; steps and choices go to a neighbour.

A trial is one interval of one member. Trial `n` is interval `n // members` of member `n % members`. It hands on what it
has one update after the evaluation that it is compared by, as runs stop.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stoker.errors import BadJob, RunFailed
from stoker.jobs import Optimizer
from stoker.jobs.averages import SWA
from stoker.jobs.job import plateau_of
from stoker.jobs.job_description import describe_settings
from stoker.records.codec import JSON
from stoker.records.study import Parameter, StudySettings, StudyTrial
from stoker.tuning.space import Space, drawn, examples, points_of, seed_of

if TYPE_CHECKING:
    from stoker.planning.resolved_job import ResolvedJob


LEAST_MEMBERS = 4
"""Members from which on a quarter is at least one."""

_QUARTER = 4
_FACTORS = (0.8, 1.2)
_REDRAWN_SHARE = 0.25
"""How often a setting is drawn from the space again, instead of being changed a little."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The origin of a trial: the trial it continues (None: none), where that ended, and its settings.

    `parameters` are None where they are drawn at random.
    """

    member: int
    interval: int
    parent: int | None = None
    from_samples: int = 0
    parameters: dict[str, JSON] | None = None


@dataclass(frozen=True)
class Population:
    """Who is in which trial, where a trial ends, and what it begins with; decided by the trials before it."""

    settings: StudySettings

    @property
    def num_trials(self) -> int:
        """Number of trials of the whole study [trials]."""
        return self.settings.members * self.settings.intervals

    def is_ready(self, number: int, trials: Sequence[StudyTrial]) -> bool:
        """Whether trial `number` can begin: all of the interval before it have ended."""
        before = self._interval(number) - 1
        return all(trial.state != "running" for trial in trials if self._interval(trial.number) == before)

    def ends_at(self, number: int, samples: int) -> bool:
        """Whether a trial hands on at an evaluation after so many samples; in the last interval the run's end ends it.

        An interval ends at the evaluation that is nearest to its share of the run.
        """
        settings, interval = self.settings, self._interval(number)
        if interval == settings.intervals - 1:
            return False
        evaluations = settings.total_samples / settings.first_samples
        nearest = round(evaluations * (interval + 1) / settings.intervals)
        return samples >= (nearest - 0.5) * settings.first_samples

    def origin(self, number: int, trials: Sequence[StudyTrial]) -> Origin:
        """The origin of trial `number`.

        Raises:
            RunFailed: no member came to the end of the interval before.
        """
        interval, member = divmod(number, self.settings.members)
        if interval == 0:
            return Origin(member=member, interval=0)
        before = [trial for trial in trials if self._interval(trial.number) == interval - 1]
        own = next(trial for trial in before if trial.number % self.settings.members == member)
        draws = random.Random(seed_of(self.settings.seed, number))
        parent = self._successor(own, before, draws)
        chosen = dict(parent.parameters) if parent is own else explored(parent.parameters, self.settings.space, draws)
        return Origin(
            member=member,
            interval=interval,
            parent=parent.number,
            from_samples=_reached(parent, trials),
            parameters=chosen,
        )

    def _successor(self, own: StudyTrial, before: Sequence[StudyTrial], draws: random.Random) -> StudyTrial:
        """The trial that a member goes on from: its own, or one of the best quarter if it is of the worst or gone."""
        sign = -1.0 if self.settings.higher_is_better else 1.0
        ended = [
            trial
            for trial in before
            if trial.state == "handed on" and trial.curve and not math.isnan(trial.curve[-1][1])
        ]
        ranked = sorted(ended, key=lambda trial: (sign * trial.curve[-1][1], trial.number))  # the best first
        if not ranked:
            reasons = "; ".join(dict.fromkeys(trial.reason for trial in before if trial.reason))
            raise RunFailed(
                f"no member came to the end of interval {self._interval(own.number) + 1}: {reasons}",
                remedy="Narrow the space to settings that can be trained, and begin another study with --study NAME.",
            )
        quarter = max(1, len(before) // _QUARTER)
        # A quarter of all is replaced, less those that did not come to the end.
        num_replaced = max(0, len(before) // _QUARTER - (len(before) - len(ranked)))
        best, worst = ranked[:quarter], ranked[max(quarter, len(ranked) - num_replaced) :]
        return draws.choice(best) if own in worst or own not in ranked else own

    def _interval(self, number: int) -> int:
        return number // self.settings.members


def _reached(trial: StudyTrial, trials: Sequence[StudyTrial]) -> int:
    """Samples that a trial's state was trained on, by all it goes back to."""
    by_number = {trial.number: trial for trial in trials}
    samples = trial.samples
    while trial.parent is not None:
        trial = by_number[trial.parent]
        samples += trial.samples
    return samples


def explored(parameters: dict[str, JSON], space: Sequence[Parameter], draws: random.Random) -> dict[str, JSON]:
    """Settings near `parameters`: each one is changed a little, or now and then drawn again."""
    return {
        parameter.name: drawn(parameter, draws)
        if draws.random() < _REDRAWN_SHARE
        else _changed(parameter, parameters[parameter.name], draws)
        for parameter in space
    }


def _changed(parameter: Parameter, value: JSON, draws: random.Random) -> JSON:
    """A number times 0.8 or 1.2, within the range; a step or a number to choose goes to a neighbour."""
    if parameter.kind == "choice" or parameter.step is not None:
        return _neighbour(parameter, value, draws)
    changed = min(parameter.high, max(parameter.low, float(value) * draws.choice(_FACTORS)))
    if not parameter.is_whole:
        return changed
    away = round(changed) - int(value) or (1 if changed > value else -1)
    return int(min(parameter.high, max(parameter.low, int(value) + away)))


def _neighbour(parameter: Parameter, value: JSON, draws: random.Random) -> JSON:
    """The value before or after this one; of choices that are no numbers, any."""
    points = list(points_of(parameter))
    if not all(isinstance(point, int | float) and not isinstance(point, bool) for point in points):
        return draws.choice(points)
    points.sort()
    place = min(range(len(points)), key=lambda index: abs(points[index] - value)) + draws.choice((-1, 1))
    return points[min(len(points) - 1, max(0, place))]


CHANGEABLE = frozenset(
    {"optimizer", "schedule", "augment", "mix", "loss.label_smoothing", "loss.penalty", "clip_norm", "on_non_finite"}
)
"""Settings of a job that act on one update at a time; of an optimiser its numbers, of a model those without weights."""

_REMEDY = "Search such settings with --sampler tpe; a population changes them in the middle of a run."

Make = Callable[[dict[str, JSON]], "ResolvedJob"]


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
        points = points_of(parameter)
        if parameter.kind != "choice":  # the ends and the middle of a range
            points = (points[0], points[len(points) // 2], points[-1])
        for value in dict.fromkeys(points):
            if value == base[parameter.name]:
                continue
            if (change := changed_by(first, make(base | {parameter.name: value}))) is not None:
                raise BadJob(
                    f"{parameter.name} changes {change}, which cannot change in the middle of a run",
                    remedy=f"Take it out of --space and give it by --set {parameter.name}=VALUE. {_REMEDY}",
                )


def require_forkable(prepared: ResolvedJob) -> None:
    """Refuse a job in which something goes over a whole run that no member of a population makes by itself.

    Raises:
        BadJob: what that is.
    """
    job = prepared.job
    kept = {
        "Job(until=seconds(…)): an interval is counted in samples": job.until.unit == "seconds",
        "Job(stop=…): its patience would count evaluations of several members": bool(job.stop),
        "a plateau schedule: it would count evaluations of several members": plateau_of(job) is not None,
        "Job(average=stoker.SWA(…)): its average would be of several members": isinstance(job.average, SWA),
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


def changed_by(one: ResolvedJob, other: ResolvedJob) -> str | None:
    """The first difference between two jobs that no run can change on its way; None if there is none."""
    if _shapes(one) != _shapes(other):
        return "the model's weights"
    if one.data.fingerprint() != other.data.fingerprint():
        return "the data"
    mine, theirs = _settings(one), _settings(other)
    for name in mine:
        if name not in CHANGEABLE and mine[name] != theirs[name]:
            field, _, part = name.partition(".")
            return f"Job({field}=stoker.Objective({part}=…))" if part else f"Job({field}=…)"
    return "the kind of optimiser" if type(one.job.optimizer) is not type(other.job.optimizer) else None


def _settings(prepared: ResolvedJob) -> dict[str, JSON]:
    """A job's settings by name; those of its objective one by one, as `loss.penalty`."""
    settings = describe_settings(prepared.job)
    objective: Any = settings.pop("loss")
    return settings | {f"loss.{name}": value for name, value in objective.items()}


def _shapes(prepared: ResolvedJob) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in prepared.model.state_dict().items()}

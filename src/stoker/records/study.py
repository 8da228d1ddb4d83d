"""A hyperparameter study of a job: its space, trials, forecast and results."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from stoker.records.codec import JSON
from stoker.records.plan import Estimate

ParameterKind = Literal["float", "log", "int", "logint", "choice"]
TrialState = Literal["running", "finished", "handed on", "pruned", "failed"]
SamplerName = Literal["grid", "random", "tpe", "gp", "pbt"]
PrunerName = Literal["none", "asha", "hyperband", "median"]
StudyEventKind = Literal["looking", "forecast", "packed", "began", "resumed", "ended", "warned", "done"]


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A setting of the job and the values it may take.

    `float` and `int` are searched evenly from `low` to `high`, both included, in steps of `step` if it is given; `log`
    and `logint` evenly in the logarithm; `choice` has `choices`.
    """

    schema: ClassVar[int] = 1
    name: str
    kind: ParameterKind
    low: float = 0.0
    high: float = 0.0
    step: float | None = None
    choices: tuple[JSON, ...] = ()

    def __post_init__(self) -> None:
        if self.kind == "choice":
            if len(self.choices) < 2:
                raise ValueError(f"{self.name}: a choice needs at least two values, got {len(self.choices)}")
            for value in self.choices:
                if not (value is None or isinstance(value, bool | int | float | str)):
                    raise ValueError(
                        f"{self.name}: a value to choose is a number, a text, true, false or none: {value!r}"
                    )
                if self.choices.count(value) > 1:
                    raise ValueError(f"{self.name}: {value!r} is there twice")
            return
        if not (math.isfinite(self.low) and math.isfinite(self.high)):
            raise ValueError(f"{self.name}: the ends of a range are numbers, got {self.low:g} and {self.high:g}")
        if not self.low < self.high:
            raise ValueError(f"{self.name}: the range from {self.low:g} to {self.high:g} is empty")
        if self.kind in ("log", "logint") and self.low <= 0:
            raise ValueError(f"{self.name}: a logarithmic range must be above 0, got {self.low:g} to {self.high:g}")
        if self.kind in ("int", "logint") and not all(float(end).is_integer() for end in (self.low, self.high)):
            raise ValueError(f"{self.name}: wanted whole numbers, got {self.low:g} to {self.high:g}")
        self._require_step()

    @property
    def is_whole(self) -> bool:
        """True if its values are whole numbers."""
        return self.kind in ("int", "logint")

    @property
    def is_logarithmic(self) -> bool:
        """True if it is searched evenly in the logarithm."""
        return self.kind in ("log", "logint")

    def _require_step(self) -> None:
        if self.step is None:
            return
        if self.is_logarithmic:
            raise ValueError(f"{self.name}: a logarithmic range has no step")
        if not self.step > 0 or (self.is_whole and not float(self.step).is_integer()):
            raise ValueError(f"{self.name}: a step is a positive {'whole ' * self.is_whole}number, got {self.step:g}")
        steps = (self.high - self.low) / self.step
        if abs(steps - round(steps)) > 1e-9 * max(1.0, steps):
            raise ValueError(f"{self.name}: steps of {self.step:g} from {self.low:g} do not reach {self.high:g}")


@dataclass(frozen=True, kw_only=True)
class StudySettings:
    """The settings of a study: what is tried, and by which rule; kept as `study.json` and the same whenever it goes on.

    `fixed` are settings that every trial has. `first_samples` is where the first evaluation of a trial is, and
    `total_samples` where it ends [samples]. `storage` is a database's URL; empty where it is the study's own file.
    Of a population (`pbt`), `members` are trained side by side, each in `intervals` trials; 0 for other samplers.
    `data_fingerprint` says whether the data are still those it began with.
    """

    schema: ClassVar[int] = 1
    name: str
    job: str
    job_digest: str
    fixed: dict[str, str]
    space: tuple[Parameter, ...]
    objective: str
    higher_is_better: bool
    sampler: SamplerName
    pruner: PrunerName
    seed: int
    on: str
    first_samples: int
    total_samples: int
    storage: str = ""
    made_at: str = ""
    members: int = 0
    intervals: int = 0
    data_fingerprint: str = ""


@dataclass(frozen=True, kw_only=True)
class StudyTrial:
    """One configuration and what came of it.

    `value` is the objective's: of a finished trial that of the weights it kept, of a pruned one its last. `curve` has
    (samples, value) of each evaluation. `samples` and `wall_s` are what was spent on it. `reason` says why a trial was
    pruned or failed. `run` is its directory below the study's; `began_at` and `ended_at` are seconds since 1970.

    In a population a trial is one interval of one member, both counted from 0. `parent` is the trial whose weights and
    optimiser it went on from, and `handed on` is the state of one that was trained to the end of its interval.
    """

    schema: ClassVar[int] = 1
    number: int
    state: TrialState
    parameters: dict[str, JSON]
    value: float | None = None
    curve: tuple[tuple[int, float], ...] = ()
    samples: int = 0
    wall_s: float = 0.0
    peak_bytes: int = 0
    reason: str = ""
    run: str = ""
    worker: str = ""
    began_at: float = 0.0
    ended_at: float | None = None
    member: int | None = None
    interval: int | None = None
    parent: int | None = None


@dataclass(frozen=True, kw_only=True)
class PlannedTrial:
    """The forecast of a configuration; `problem` says why it could not be planned."""

    parameters: dict[str, JSON]
    total_s: Estimate | None = None
    peak_bytes: Estimate | None = None
    energy_kwh: Estimate | None = None
    cost_usd: Estimate | None = None
    total_samples: int = 0
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class StudyForecast:
    """The forecast of a study before its first trial.

    `total_s`, `energy_kwh` and `cost_usd` have every trial trained to its end; `pruned_s` is what is left of the time
    if trials are pruned as `assumptions` say. `cost_usd` is what the device's model costs where it is rented out.
    """

    schema: ClassVar[int] = 1
    trials: int
    parallel: int
    planned: tuple[PlannedTrial, ...]
    total_s: Estimate | None
    pruned_s: Estimate | None
    energy_kwh: Estimate | None
    cost_usd: Estimate | None
    assumptions: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class StudyResult:
    """A study as it stands. `importance` has each parameter's share in being among the best, empty where unknown."""

    schema: ClassVar[int] = 1
    settings: StudySettings
    trials: tuple[StudyTrial, ...]
    importance: dict[str, float] = field(default_factory=dict)
    forecast: StudyForecast | None = None

    @property
    def ranked(self) -> tuple[StudyTrial, ...]:
        """The trials, best first: finished ones, then pruned ones by how far they came, then the rest in order."""
        sign = -1.0 if self.settings.higher_is_better else 1.0
        groups = {"finished": 0, "handed on": 1, "pruned": 1, "running": 2, "failed": 3}

        def key(trial: StudyTrial) -> tuple[float, ...]:
            value = math.inf if trial.value is None or math.isnan(trial.value) else sign * trial.value
            reached = -trial.curve[-1][0] if groups[trial.state] == 1 and trial.curve else 0
            return groups[trial.state], reached, value, trial.number

        return tuple(sorted(self.trials, key=key))

    @property
    def best(self) -> StudyTrial | None:
        """The finished trial with the best value; None before the first is finished."""
        first = next(iter(self.ranked), None)
        return first if first is not None and first.state == "finished" and first.value is not None else None

    @property
    def samples(self) -> int:
        """Number of samples trained on in all trials together."""
        return sum(trial.samples for trial in self.trials)

    def lineage(self, number: int) -> tuple[StudyTrial, ...]:
        """The trials that a trial's weights descend from, oldest first, itself last."""
        by_number = {trial.number: trial for trial in self.trials}
        trials = [by_number[number]]
        while (parent := trials[-1].parent) is not None:
            trials.append(by_number[parent])
        return tuple(reversed(trials))


@dataclass(frozen=True, kw_only=True)
class StudyEvent:
    """Something that happened in a study; `at` is seconds since 1970 (UTC).

    Fields by kind:

    - looking: job
    - forecast: the fields of StudyForecast
    - packed: slots, why
    - began, resumed: trial, parameters, run; of a population also member, interval, parent, from_samples
    - ended: the fields of StudyTrial, objective, best (trial, value; None before one is finished)
    - warned: message
    - done: study, path, best (trial, value; None if none is finished), trials, samples, page
    """

    kind: StudyEventKind
    at: float
    fields: dict[str, JSON] = field(default_factory=dict)

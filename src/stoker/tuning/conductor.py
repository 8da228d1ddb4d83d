"""A study while it goes on: which trial is next, which one stops, what came of each; it runs none of them itself.

Everything that decides is in the storage, so that a study whose process is killed goes on where it was: a trial that
was under way keeps its number and its settings, and is run again from its own checkpoints. Several processes may work
on one study in one database; a trial belongs to the one that began it, and only that one takes it up again.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from stoker import records
from stoker.errors import BadJob, RunFailed, StokerError, nearest
from stoker.records.codec import JSON
from stoker.records.study import StudyEvent, StudyEventKind, StudySettings, StudyTrial
from stoker.store.run_directory import RunDirectory
from stoker.store.run_files import TRIAL
from stoker.tuning.population import Origin, Population
from stoker.tuning.processes import TrialReading, TrialRequest, TrialResult
from stoker.tuning.search_algorithms import GridSampler, distributions, lacks_equals, sampler_for, suggest
from stoker.tuning.space import Space, grid
from stoker.tuning.study_database import HANDED_ON, STATES, best_of, trial_of

TRIALS = "trials"
"""The folder of a study's runs, in its directory."""

_MOST_EQUAL = 3
"""Trials in a row that fail with the same error; then it is not the settings that are wrong."""

Tell = Callable[[StudyEvent], None]


@dataclass(frozen=True, kw_only=True)
class StudyWorker:
    """One process's part in a study: where, under which name, how many trials, how long.

    `seconds` is the longest it works [s]; `parallel` is how many trials it runs at once.
    """

    directory: Path
    worker: str
    trials: int
    parallel: int = 1
    seconds: float | None = None


class Conductor:
    """Gives out trials, judges their evaluations, and takes their endings in; not for several threads."""

    def __init__(
        self,
        storage: BaseStorage,
        study: optuna.Study,
        settings: StudySettings,
        work: StudyWorker,
        tell: Tell,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._storage, self._study, self._settings, self._work, self._clock = storage, study, settings, work, clock
        self._tell_sink = tell
        self._began = clock()
        self._failures: list[str] = []
        self._has_warned = False
        self.problem: StokerError | None = None
        self._space: Space = settings.space
        self._population = Population(settings) if settings.sampler == "pbt" else None
        self._most = work.trials
        if self._population is not None:
            self._most = self._population.num_trials
        elif settings.sampler == "grid":
            self._most = min(work.trials, len(grid(self._space, settings.seed)))
        # In the study's own file all trials are this worker's: the holder of the study's lock is the only one, though
        # the host may have another name since, as containers do, or the study's directory may have been moved.
        self._left_behind = [
            trial
            for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
            if not settings.storage or trial_of(trial).worker == work.worker
        ]
        """Trials to take up again: their process is gone, or was stopped."""
        for trial in map(trial_of, study.get_trials(deepcopy=False)):  # a kill may have come before it was written
            if trial.state not in ("running", "waiting") and not (work.directory / trial.run / TRIAL.name).exists():
                self._keep_in_its_run(trial)

    @property
    def seconds_left(self) -> float | None:
        """Until the work's time is up [s], at least 0; None where there is no limit."""
        if self._work.seconds is None:
            return None
        return max(0.0, self._began + self._work.seconds - self._clock())

    @property
    def is_over(self) -> bool:
        """Whether no further trial begins, and those under way stop: time is up, or something is wrong."""
        return self.problem is not None or self.seconds_left == 0.0

    def next_request(self) -> TrialRequest | None:
        """The next trial to run: one that was left behind first, then a new one; None if there is none."""
        while not self.is_over and self._left_behind:
            trial = self._left_behind.pop(0)
            if self._is_given_up(trial.number):
                spent = trial_of(trial)
                self._ended(trial.number, TrialResult(kind="stopped", samples=spent.samples, wall_s=spent.wall_s))
                continue
            if not trial_of(trial).worker:
                return self._begun(self._asked(trial.number, trial))
            self._tell("resumed", trial=trial.number, parameters=dict(trial.params), run=trial_of(trial).run)
            return self._request(trial.number, trial.params, on=trial.user_attrs.get("on"))
        number = len(self._study.get_trials(deepcopy=False))
        if self.is_over or number >= self._most:
            return None
        if self._population is not None and not self._population.is_ready(number, self._trials()):
            return None
        try:
            return self._begun(self._asked(number))
        except RunFailed as problem:
            self.problem = problem
            return None

    def on_place(self, number: int, on: str) -> None:
        """Note where a trial runs, so that it goes on there."""
        self._note(number, on=on)

    def judge(self, number: int, reading: TrialReading) -> bool:
        """Take an evaluation in; whether the trial shall stop there.

        A trial at its end is not stopped any more: it has cost all it costs.
        """
        try:
            value = objective_of(self._settings.objective, reading.metrics)
        except BadJob as problem:
            self.problem = self.problem or problem
            return True
        trial_id = self._id(number)
        self._storage.set_trial_intermediate_value(trial_id, reading.samples, value)
        if reading.samples >= reading.total_samples:
            return False
        if self._population is not None and self._population.ends_at(number, reading.samples):
            return True
        if self._settings.pruner == "median" and not self._has_warned:
            finished = self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
            if (warning := lacks_equals(finished, reading.samples)) is not None:
                self._tell("warned", message=warning)
                self._has_warned = True
        if self._study.pruner.prune(self._study, self._storage.get_trial(trial_id)):
            self._note(number, given_up=True)
            return True
        return self.is_over

    def ended(self, number: int, ending: TrialResult) -> None:
        """Take the end of a trial in; one that stopped because the study does is left to be taken up again."""
        if ending.kind == "stopped" and not (self._is_given_up(number) or self._hands_on(number, ending)):
            self._note(number, spent={"samples": ending.samples, "wall_s": ending.wall_s})
            self._left_behind.append(self._storage.get_trial(self._id(number)))
            return
        self._ended(number, ending)

    def _ended(self, number: int, ending: TrialResult) -> None:
        state, value, reason = self._verdict(number, ending)
        spent = {"samples": ending.samples, "wall_s": ending.wall_s, "peak_bytes": ending.peak_bytes}
        self._note(number, spent=spent | {"reason": reason})
        if self._hands_on(number, ending):
            self._note(number, **{HANDED_ON: True})
        self._study.tell(number, value, state=state)
        trial = self._trial(number)
        best = best_of(self._trials(), higher_is_better=self._settings.higher_is_better)
        fields = {name: value for name, value in records.to_json(trial).items() if name not in ("record", "schema")}
        self._keep_in_its_run(trial)
        self._tell("ended", **fields, objective=self._settings.objective, best=best)
        # After three equal failures in a row the study stops: it is not the settings that are wrong.
        if ending.kind != "failed":
            self._failures.clear()
            return
        first = ending.words.strip().partition("\n")[0]
        self._failures.append(re.sub(r"[-+]?\d[\d.,eE+-]*", "#", first))  # numbers may differ between equal mistakes
        last = self._failures[-_MOST_EQUAL:]
        if len(last) == _MOST_EQUAL and len(set(last)) == 1:
            self.problem = RunFailed(
                f"{_MOST_EQUAL} trials in a row failed with the same error: {ending.words}",
                remedy="Mend it and give the same command again; what is done is kept.",
            )

    def _keep_in_its_run(self, trial: StudyTrial) -> None:
        """Write a trial's outcome into its run, whose own record says of a pruned one that it is unfinished."""
        run = self._work.directory / trial.run
        if run.is_dir():
            try:
                RunDirectory(run).write(TRIAL, trial)
            except RunFailed as problem:  # the study has it in its storage
                self._tell("warned", message=problem.message)

    def _verdict(self, number: int, ending: TrialResult) -> tuple[TrialState, float | None, str]:
        """The verdict on a trial: its state, its value if it is finished, and why if it is not."""
        diverged = f"diverged: {self._settings.objective} is not a number"
        if ending.kind == "finished":
            value = objective_of(self._settings.objective, ending.metrics)
            return (TrialState.PRUNED, None, diverged) if math.isnan(value) else (TrialState.COMPLETE, value, "")
        if ending.kind == "failed":
            return TrialState.FAIL, None, ending.words
        if self._hands_on(number, ending):
            return TrialState.PRUNED, None, ""
        if ending.kind == "stopped":
            values = self._storage.get_trial(self._id(number)).intermediate_values
            last = max(values, default=0)
            is_nan = math.isnan(values.get(last, 0.0))  # which every rule stops
            return TrialState.PRUNED, None, diverged if is_nan else f"{self._settings.pruner} at {last:,} samples"
        return TrialState.PRUNED, None, f"{ending.kind}: {ending.words}"

    def _origin(self, number: int) -> Origin | None:
        """The origin of a trial of a population."""
        return None if self._population is None else self._population.origin(number, self._trials())

    def _asked(self, number: int, made: FrozenTrial | None = None) -> optuna.Trial:
        """Trial `number` with its settings; `made` if it is in the storage, without all of them."""
        self._study.sampler = self._sampler(number)
        trial = self._study.ask() if made is None else optuna.Trial(self._study, self._id(number))
        if trial.number != number:  # a worker elsewhere was faster, and has the proposal for that number
            self._study.sampler = self._sampler(trial.number)
        for name, distribution in distributions(self._space).items():
            suggest(trial, name, distribution)
        return trial

    def _sampler(self, number: int) -> BaseSampler:
        """The sampler of trial `number`: a population's trials after the first have settings already."""
        settings, origin = self._settings, self._origin(number)
        if origin is not None and origin.parameters is not None:
            return GridSampler((origin.parameters,))
        return sampler_for(settings.sampler, self._space, settings.seed, number, parallel=self._work.parallel)

    def _begun(self, trial: optuna.Trial) -> TrialRequest:
        """A trial that no process has begun."""
        run, origin = _run_of(trial.number), self._origin(trial.number)
        lineage: dict[str, JSON] = (
            {}
            if origin is None
            else {
                "member": origin.member,
                "interval": origin.interval,
                "parent": origin.parent,
                "from_samples": origin.from_samples,
            }
        )
        self._note(trial.number, began={"worker": self._work.worker, "run": run, **lineage})
        self._tell("began", trial=trial.number, parameters=dict(trial.params), run=run, **lineage)
        return self._request(trial.number, trial.params)

    def _request(self, number: int, parameters: dict[str, Any], on: str | None = None) -> TrialRequest:
        trial, parent = self._storage.get_trial(self._id(number)), self._trial(number).parent
        return TrialRequest(
            number=number,
            parameters=dict(parameters),
            directory=self._work.directory / _run_of(number),
            on=on,
            parent=None if parent is None else self._work.directory / _run_of(parent),
            reported_samples=trial.last_step or 0,
        )

    def _is_given_up(self, number: int) -> bool:
        """Whether the pruner gave a trial up; it is asked once for an evaluation, and remembers what it compared."""
        return bool(self._storage.get_trial(self._id(number)).user_attrs.get("given_up", False))

    def _hands_on(self, number: int, ending: TrialResult) -> bool:
        """Whether a trial of a population has saved its state after the evaluation that its interval ends with.

        One that was stopped shortly before that is nearer to it than to any other, and has not been judged by it yet.
        """
        if self._population is None or ending.kind != "stopped":
            return False
        reported = self._storage.get_trial(self._id(number)).last_step or 0
        return self._population.ends_at(number, min(reported, ending.samples))

    def _trials(self) -> list[StudyTrial]:
        return [trial_of(trial) for trial in self._study.get_trials(deepcopy=False) if trial.state in STATES]

    def _trial(self, number: int) -> StudyTrial:
        return trial_of(self._storage.get_trial(self._id(number)))

    def _id(self, number: int) -> int:
        study_id = self._storage.get_study_id_from_name(self._study.study_name)
        return self._storage.get_trial_id_from_study_id_trial_number(study_id, number)

    def _note(self, number: int, **attributes: JSON) -> None:
        for name, value in attributes.items():
            self._storage.set_trial_user_attr(self._id(number), name, value)

    def _tell(self, kind: StudyEventKind, **fields: JSON) -> None:
        self._tell_sink(StudyEvent(kind=kind, at=time.time(), fields=fields))


def objective_of(name: str, metrics: dict[str, float]) -> float:
    """The objective's value among metrics [the metric's unit].

    Raises:
        BadJob: there is no such metric; the nearest one is named.
    """
    bare = name.removeprefix("valid/")
    if bare in metrics:
        return float(metrics[bare])
    known = [f"valid/{metric}" for metric in metrics]
    raise BadJob(f"--objective {name}: the job measures no such thing. {nearest(name, known)}")


def _run_of(number: int) -> str:
    """A trial's run, below the study's directory."""
    return f"{TRIALS}/{number:04}"

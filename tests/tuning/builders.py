"""Trials that train nothing: learning curves of known functions, run as a study runs real ones."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from optuna.storages import InMemoryStorage

from stoker.records.study import StudyEvent, StudySettings
from stoker.tuning.conductor import Conductor, StudyWorker
from stoker.tuning.processes import Judge, TrialReading, TrialRequest, TrialResult, TrialSlot, run_here
from stoker.tuning.search_algorithms import pruner_for
from stoker.tuning.space import parse_space
from stoker.tuning.study_database import open_storage, open_study
from stoker.tuning.study_forecast import rungs_of

BRANIN = "x=float(-5,10) y=float(0,15)"
TOTAL, STEP = 2700, 300
"""Samples of a trial, and between two evaluations."""


def branin(x: float, y: float) -> float:
    """The Branin function, whose least value is 0.397887 at three places."""
    a, b, c = 1.0, 5.1 / (4 * math.pi**2), 5 / math.pi
    return a * (y - b * x**2 + c * x - 6) ** 2 + 10 * (1 - 1 / (8 * math.pi)) * math.cos(x) + 10


def learning_branin(request: TrialRequest, slot: TrialSlot, judge: Judge) -> TrialResult:
    """A trial whose loss falls towards Branin's value at its settings, evaluated every `STEP` samples."""
    end = branin(float(request.parameters["x"]), float(request.parameters["y"]))
    for samples in range(STEP, TOTAL + STEP, STEP):
        loss = end + 30 * math.exp(-samples / 500)
        if judge(TrialReading(samples=samples, total_samples=TOTAL, metrics={"loss": loss})):
            return TrialResult(kind="stopped", samples=samples, wall_s=samples / 1000)
    return TrialResult(kind="finished", metrics={"loss": loss}, samples=TOTAL, wall_s=TOTAL / 1000)


def settings(space: str = BRANIN, **changes: Any) -> StudySettings:
    """A study of the Branin function: random search that prunes nothing."""
    known: dict[str, Any] = {
        "name": "branin",
        "job": "branin",
        "job_digest": "0" * 64,
        "fixed": {},
        "space": parse_space(space),
        "objective": "valid/loss",
        "higher_is_better": False,
        "sampler": "random",
        "pruner": "none",
        "seed": 0,
        "on": "cpu",
        "first_samples": STEP,
        "total_samples": TOTAL,
    }
    return StudySettings(**(known | changes))


class Told(list[StudyEvent]):
    """A sink that keeps what it hears."""

    def __call__(self, event: StudyEvent) -> None:
        """Keep the event."""
        self.append(event)

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The fields of every event of that kind."""
        return [event.fields for event in self if event.kind == kind]


def conductor(
    directory: Path | None,
    study: StudySettings,
    *,
    trials: int = 10,
    worker: str = "me",
    tell: Told | None = None,
    clock: Callable[[], float] = time.monotonic,
    **work: Any,
) -> Conductor:
    """A conductor of a study in `directory`, opened again as by another process; or in memory."""
    storage = InMemoryStorage() if directory is None else open_storage(study.storage, directory)
    opened = open_study(storage, study.name, higher_is_better=study.higher_is_better)
    opened.pruner = pruner_for(study.pruner, rungs_of(study.first_samples, study.total_samples))
    wanted = StudyWorker(directory=directory or Path("nowhere"), worker=worker, trials=trials, **work)
    return Conductor(storage, opened, study, wanted, Told() if tell is None else tell, clock=clock)


def conducted(
    directory: Path | None, study: StudySettings, run_trial: Callable[..., TrialResult] = learning_branin, **work: Any
) -> Conductor:
    """A study run to its end in this process."""
    found = conductor(directory, study, **work)
    run_here(found, run_trial, TrialSlot(on="cpu"))
    return found

"""A study in Optuna's storage, a SQLite file of its own or a database that machines share; and its records."""

from __future__ import annotations

import dataclasses
import math
import sqlite3
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage, RDBStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from stoker import records
from stoker.errors import BadJob, BadRun, first_line
from stoker.records.codec import JSON
from stoker.records.study import StudyResult, StudySettings, StudyTrial
from stoker.records.study import TrialState as State
from stoker.store.locations import is_on_network
from stoker.tuning.search_algorithms import pruner_for, without_experimental_warnings
from stoker.tuning.study_directory import StudyDirectory
from stoker.tuning.study_forecast import rungs_of

FILE = "study.db"

_PATIENCE_S = 60
"""How long a writer waits for another one's transaction to end [s]."""

_MARK = "stoker"
"""The attribute of a study in its storage that holds its settings."""


def opened(directory: StudyDirectory, settings: StudySettings) -> tuple[RDBStorage, optuna.Study]:
    """The study in its storage, with its pruner; made if it is not there.

    Raises:
        BadRun: the storage cannot be used, or has another study of that name.
    """
    storage = open_storage(settings.storage, directory.path)
    study = open_study(storage, settings.name, higher_is_better=settings.higher_is_better)
    study.pruner = pruner_for(settings.pruner, rungs_of(settings.first_samples, settings.total_samples))
    # What names files and their times differs on another machine; the rest must be equal to work on one study.
    shared = dataclasses.replace(settings, made_at="", storage="", job="", data_fingerprint="")
    ours: dict[str, JSON] = records.to_json(shared)
    theirs = study.user_attrs.get(_MARK)
    if theirs is None:
        study.set_user_attr(_MARK, ours)
    elif different := [name for name in ours if ours[name] != theirs.get(name, ours[name])]:
        raise BadRun(
            f"{settings.storage or directory.path} has another study called {settings.name}: "
            f"its {', '.join(different)} differs.",
            remedy="Give the same options to work on that one, or choose another --study NAME.",
        )
    return storage, study


def read_result(directory: StudyDirectory) -> StudyResult:
    """The study as it stands.

    Raises:
        BadRun: it cannot be read.
    """
    settings = directory.read_settings()
    _, study = opened(directory, settings)
    shares = {} if settings.members else importance(study)  # a member's last settings are not what made it good
    return StudyResult(
        settings=settings, trials=read_trials(study), importance=shares, forecast=directory.read_forecast()
    )


def open_storage(url: str, directory: Path) -> RDBStorage:
    """The storage at `url`, or the file in the study's directory if that is empty; it is made if it is not there.

    Raises:
        BadJob: the URL cannot be read, or the driver of such a database is not installed.
        BadRun: the database is damaged, of another version, or does not answer.
    """
    place = url or f"sqlite:///{(directory / FILE).absolute()}"
    engine: dict[str, object] = {"pool_pre_ping": True}
    if not url:
        engine = {"creator": lambda: _connected(directory / FILE)}
    elif url.startswith("sqlite"):
        engine = {"connect_args": {"timeout": _PATIENCE_S}}
    try:
        return RDBStorage(place, engine_kwargs=engine)
    except (ImportError, optuna.exceptions.DuplicatedStudyError) as problem:
        raise BadJob(
            f"--storage {place}: {first_line(problem)}", remedy="Install the database's driver next to SQLAlchemy."
        ) from problem
    except RuntimeError as problem:  # Optuna's word for a database of another version
        raise BadRun(f"{place} cannot be used: {first_line(problem)}", remedy=_remedy(place)) from problem
    except Exception as problem:
        if type(problem).__module__.startswith("sqlalchemy"):
            kind = BadJob if type(problem).__name__ in ("ArgumentError", "NoSuchModuleError") else BadRun
            raise kind(f"{place} cannot be used: {first_line(problem)}", remedy=_remedy(place)) from problem
        raise


def open_study(storage: BaseStorage, name: str, *, higher_is_better: bool) -> optuna.Study:
    """The study of that name, made if it is not there."""
    direction = StudyDirection.MAXIMIZE if higher_is_better else StudyDirection.MINIMIZE
    return optuna.create_study(storage=storage, study_name=name, direction=direction, load_if_exists=True)


def _connected(path: Path) -> sqlite3.Connection:
    """A connection to the study's own file, which does not wait for the disk at each of many small changes.

    A change outlives the process at once, but not a power cut: then a trial's last report may be missing. Its run has
    it; it is taken up again, found finished, and reported once more. On a network file system, and wherever SQLite will
    not have a write-ahead log, there is a rollback journal instead, which waits for the disk.

    Source: SQLite documentation, "Write-Ahead Logging" ("WAL does not work over a network filesystem", section 1) and
    "PRAGMA synchronous": consistent after a power cut.
    """
    connection = sqlite3.connect(path, timeout=_PATIENCE_S, check_same_thread=False)
    mode = "DELETE" if is_on_network(path.parent) else "WAL"
    with suppress(sqlite3.OperationalError):  # another process has it open as it is
        connection.execute(f"PRAGMA journal_mode={mode}")
    if connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal":
        connection.execute("PRAGMA synchronous=NORMAL")
    return connection


def _remedy(place: str) -> str:
    if place.startswith("sqlite"):
        return "Restore the file from a copy, or begin another study with --study NAME."
    return "Write it as postgresql://user:password@host/database, and see that the server answers."


STATES: dict[TrialState, State] = {
    TrialState.RUNNING: "running",
    TrialState.COMPLETE: "finished",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}
"""Optuna's states in our words; a trial that waits has none: none is made here."""

HANDED_ON = "handed_on"
"""The attribute of a trial that came to the end of its interval."""

LEAST_FOR_IMPORTANCE = 6
"""Finished trials from which on importance says something: two of them are the best, the others what they are not."""


def read_trials(study: optuna.Study) -> tuple[StudyTrial, ...]:
    """All trials of a study, in order."""
    return tuple(trial_of(trial) for trial in study.get_trials(deepcopy=False) if trial.state in STATES)


def trial_of(frozen: FrozenTrial) -> StudyTrial:
    """A trial as it is in the storage."""
    known: dict[str, Any] = {**frozen.user_attrs.get("began", {}), **frozen.user_attrs.get("spent", {})}
    began, ended = frozen.datetime_start, frozen.datetime_complete
    is_handed_on = frozen.state == TrialState.PRUNED and frozen.user_attrs.get(HANDED_ON, False)
    reached = max(int(known.get("samples", 0)), frozen.last_step or 0)
    return StudyTrial(
        number=frozen.number,
        # What Optuna counts as pruned may have been handed on to the next interval of a population.
        state="handed on" if is_handed_on else STATES[frozen.state],
        parameters=dict(frozen.params),
        value=frozen.value if frozen.values else None,
        curve=tuple(sorted((int(step), float(value)) for step, value in frozen.intermediate_values.items())),
        samples=max(0, reached - int(known.get("from_samples", 0))),
        wall_s=float(known.get("wall_s", 0.0)),
        peak_bytes=int(known.get("peak_bytes", 0)),
        reason=str(known.get("reason", "")),
        run=str(known.get("run", "")),
        worker=str(known.get("worker", "")),
        began_at=began.timestamp() if began is not None else 0.0,
        ended_at=ended.timestamp() if ended is not None else None,
        member=known.get("member"),
        interval=known.get("interval"),
        parent=known.get("parent"),
    )


def best_of(trials: Sequence[StudyTrial], *, higher_is_better: bool) -> dict[str, JSON] | None:
    """The best finished trial's number and value; None before there is one."""
    finished = [trial for trial in trials if trial.state == "finished" and trial.value is not None]
    if not finished:
        return None
    sign = -1.0 if higher_is_better else 1.0
    best = min(finished, key=lambda trial: (sign * (trial.value or 0.0), trial.number))
    return {"trial": best.number, "value": best.value}


def importance(study: optuna.Study) -> dict[str, float]:
    """Each parameter's share in being among the best tenth of finished trials; empty where there are too few.

    Source: S. Watanabe, A. Bansal, F. Hutter, "PED-ANOVA", IJCAI 2023, as Optuna has it.
    """
    finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if len(finished) < LEAST_FOR_IMPORTANCE or len({trial.value for trial in finished}) < 2:
        return {}
    from optuna.importance import (  # noqa: PLC0415 - brings scikit-learn, a second or two of every start
        PedAnovaImportanceEvaluator,
        get_param_importances,
    )

    with without_experimental_warnings():
        importances = get_param_importances(study, evaluator=PedAnovaImportanceEvaluator())
    return {name: float(share) for name, share in importances.items() if math.isfinite(share)}

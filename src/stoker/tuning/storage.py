"""Where a study is kept: a SQLite file of its own, or a database that several machines share."""

from __future__ import annotations

import sqlite3
from contextlib import suppress
from pathlib import Path

import optuna
from optuna.storages import BaseStorage, RDBStorage
from optuna.study import StudyDirection

from stoker.errors import BadJob, BadRun, first_line
from stoker.store.places import is_on_network

FILE = "study.db"

_PATIENCE_S = 60
"""How long a writer waits for another one's transaction to end [s]."""


def open_storage(url: str, directory: Path) -> RDBStorage:
    """The storage at `url`, or the file in the study's directory if that is empty; it is made if it is not there.

    Raises:
        BadJob: the URL cannot be read, or what speaks to such a database is not installed.
        BadRun: the database is damaged, of another version, or does not answer.
    """
    place = url or f"sqlite:///{(directory / FILE).absolute()}"
    try:
        return RDBStorage(place, engine_kwargs=_engine_settings(url, directory))
    except (ImportError, optuna.exceptions.DuplicatedStudyError) as problem:
        raise BadJob(
            f"--storage {place}: {first_line(problem)}", remedy="Install the database's driver beside SQLAlchemy."
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


def _engine_settings(url: str, directory: Path) -> dict[str, object]:
    if not url:
        return {"creator": lambda: _connected(directory / FILE)}
    return {"connect_args": {"timeout": _PATIENCE_S}} if url.startswith("sqlite") else {"pool_pre_ping": True}


def _connected(path: Path) -> sqlite3.Connection:
    """A connection to the study's own file, which does not wait for the disk at each of many small changes.

    A change outlives the process at once, but not a power cut: then a trial's last words may be missing. Its run has
    them; it is taken up again, found finished, and told once more. On a network file system, and wherever SQLite will
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

"""What a tracker is told, and what it has to do.

Where a tracker that writes files keeps those of a run.

Trackers by name, as people write them: `tensorboard`, `mlflow=http://host:5000`, `wandb=my-project`, `csv`.
"""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from stoker.errors import BadJob, nearest
from stoker.records.run import RunStatus


@dataclass(frozen=True, kw_only=True)
class RunDescription:
    """What does not change while a run goes on.

    `parameters` are the settings of its job and its plan, flat, by names such as `optimizer.lr`; `folder` is where a
    tracker may keep files of its own; `created_at` is in seconds since 1970 (UTC).
    """

    run: str
    job: str
    folder: Path
    created_at: float
    parameters: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class MetricPoint:
    """Values at a place in training: after `samples` samples, at `at` seconds since 1970 (UTC)."""

    samples: int
    at: float
    values: Mapping[str, float]


class Tracker(Protocol):
    """A run at a tracker, new or continued. Any method may raise whatever the tracker's library raises."""

    id: str
    """What the tracker calls this run: kept, and handed back when it is continued."""
    where: str
    """Where people find it: a URL, or a path."""

    def log(self, points: list[MetricPoint]) -> None:
        """Take over these values, in this order."""

    def end(self, status: RunStatus, files: list[Path]) -> None:
        """Note how the run stands, and take over files worth keeping, such as the report."""

    def close(self) -> None:
        """Let go of files and connections; what was logged is where it belongs."""


def output_path(about: RunDescription, where: str | None, known_id: str | None, *, name: str, ending: str = "") -> Path:
    """The file or folder of a run: the one it has, else a new one, so that no two runs write into one.

    Args:
        about: the run.
        where: a folder for many runs, in which this one's is called like the run; None for the run's own folder, which
            may have been moved or copied since it was written to last: only its name then counts, not its place.
        known_id: where this run's was until now, by `str`; None if it has none.
        name: what it is called in the run's own folder.
        ending: of a file's name, with its dot.
    """
    if where is None:
        return about.folder / Path(known_id).name if known_id is not None else _free(about.folder, name, ending)
    return Path(known_id) if known_id is not None else _free(Path(where), about.run, ending)


def _free(folder: Path, name: str, ending: str) -> Path:
    """`NAME` in the folder, or the first of `NAME-2`, `NAME-3`, … that nothing is called."""
    numbers = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    return next(path for number in numbers if not (path := folder / f"{name}{number}{ending}").exists())


TRACKERS = ("csv", "mlflow", "tensorboard", "trackio", "wandb")

_IN_FOLDERS = ("csv", "tensorboard")
"""Trackers whose place is a folder."""

_EXTRAS = {"mlflow": "mlflow", "tensorboard": "tensorboardX", "trackio": "trackio", "wandb": "wandb"}
"""The package behind a tracker; the extra that installs it is called like the tracker."""


@dataclass(frozen=True)
class TrackerTarget:
    """A tracker and where it is: a folder, a server, a project; None for what is usual there."""

    name: str
    where: str | None = None

    @property
    def word(self) -> str:
        """As people write it."""
        return self.name if self.where is None else f"{self.name}={self.where}"

    def open(self, about: RunDescription, known_id: str | None) -> Tracker:
        """The run there: the one of this id, or a new one."""
        module = importlib.import_module(f"stoker.tracking.{self.name}_tracker")
        tracker: Tracker = module.open_run(about, self.where, known_id)
        return tracker

    def require_writable(self) -> None:
        """Refuse a folder that cannot be written to, or made: better before a run than in it.

        Raises:
            BadJob: it cannot, as far as can be told without writing.
        """
        if self.where is not None and self.name in _IN_FOLDERS and "://" not in self.where:
            _require_writable(self.word, Path(self.where))


def parse_tracker(word: str) -> TrackerTarget:
    """What a user means by `NAME` or `NAME=WHERE`.

    >>> target_of("csv=/data/metrics")
    Target(name='csv', where='/data/metrics')

    Raises:
        BadJob: there is no such tracker, or its package is not installed.
    """
    name, has_place, where = word.partition("=")
    if name not in TRACKERS:
        raise BadJob(f"there is no tracker {name!r}", remedy=nearest(name, TRACKERS))
    if has_place and not where:
        raise BadJob(f"{word!r} names no place", remedy=f"Write {name}, or {name}=WHERE.")
    if name == "csv" and "://" in where:
        raise BadJob(f"{word!r} names a URL, and a table is a file", remedy="Name a folder: csv=/data/metrics.")
    _require_package(name)
    if where and "://" not in where and name in _IN_FOLDERS:
        # Away from here, a relative folder would be another one when the run is continued; shells leave `csv=~` as is.
        where = os.path.abspath(os.path.expanduser(where))  # noqa: PTH100, PTH111 - Path raises at `~nobody`
    return TrackerTarget(name, where or None)


def _require_writable(word: str, folder: Path) -> None:
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if not there.is_dir():
        raise BadJob(f"{word!r} names the folder {folder}, and {there} is a file", remedy="Name a folder.")
    if not os.access(there, os.W_OK | os.X_OK):
        does = "written to" if there == folder else f"made: {there} cannot be written to"
        raise BadJob(f"{word!r} names the folder {folder}, which cannot be {does}",
                     remedy="Name another folder, or make it writable for this user.")  # fmt: skip


def _require_package(name: str) -> None:
    package = _EXTRAS.get(name)
    if package is None:
        return
    try:
        importlib.import_module(package)
    except ImportError as problem:
        raise BadJob(
            f"{name} needs the package {package}, which cannot be imported: {problem}",
            remedy=f"pip install 'stoker[{name}]'",
        ) from problem

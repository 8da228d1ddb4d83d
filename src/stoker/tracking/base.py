"""Trackers by name, as users write them (`tensorboard`, `mlflow=http://host:5000`, `csv`), and their interface."""

from __future__ import annotations

import importlib
import itertools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from stoker.errors import BadJob, nearest
from stoker.records.run import RunStatus


@dataclass(frozen=True, kw_only=True)
class RunDescription:
    """The constant description of a run.

    `parameters` are the settings of its job and its plan, flat, by names such as `optimizer.lr`; `folder` is for files
    of the tracker; `created_at` is in seconds since 1970 (UTC).
    """

    run: str
    job: str
    folder: Path
    created_at: float
    parameters: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class MetricPoint:
    """Values after `samples` samples of training, at `at` seconds since 1970 (UTC)."""

    samples: int
    at: float
    values: Mapping[str, float]


class Tracker(Protocol):
    """A run at a tracker, new or continued. Any method may raise whatever the tracker's library raises."""

    id: str
    """The tracker's name of this run, which is kept and passed to `open` when the run is continued."""
    where: str
    """Where users find it: a URL, or a path."""

    def log(self, points: list[MetricPoint]) -> None:
        """Store these values, in this order."""

    def go_back(self, samples: int) -> None:
        """Forget values after `samples` samples: the run continues from there, and makes them again.

        A tracker that takes nothing back has them twice.
        """

    def end(self, status: RunStatus, files: list[Path]) -> None:
        """Store the run's status, and files worth keeping, such as the report."""

    def close(self) -> None:
        """Close files and connections; all values are stored then."""


def output_path(about: RunDescription, where: str | None, known_id: str | None, *, name: str, ending: str = "") -> Path:
    """The tracker's file or folder of a run: the one it has, else a new one (`NAME`, `NAME-2`, …) of its own.

    Args:
        about: the run.
        where: a folder for many runs, with the run's name for this one; None for the run's own folder, which may have
            been moved or copied since: then the name of the known path counts, not its folder.
        known_id: the path so far, by `str`; None for a new one.
        name: name in the run's own folder.
        ending: of a file's name, with its dot.
    """
    if known_id is not None:
        return Path(known_id) if where is not None else about.folder / Path(known_id).name
    folder, stem = (about.folder, name) if where is None else (Path(where), about.run)
    numbers = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    return next(path for number in numbers if not (path := folder / f"{stem}{number}{ending}").exists())


TRACKERS = ("csv", "mlflow", "prometheus", "tensorboard", "trackio", "wandb")

_IN_FOLDERS = ("csv", "prometheus", "tensorboard")
"""Trackers whose place is a folder, or a URL."""

_EXTRAS = {"mlflow": "mlflow", "tensorboard": "tensorboardX", "trackio": "trackio", "wandb": "wandb"}
"""The package of a tracker; the extra that installs it has the tracker's name."""


@dataclass(frozen=True)
class TrackerTarget:
    """A tracker and its place: a folder, a server, a project; None for the tracker's default."""

    name: str
    where: str | None = None

    @property
    def word(self) -> str:
        """The target as users write it."""
        return self.name if self.where is None else f"{self.name}={self.where}"

    def open(self, about: RunDescription, known_id: str | None) -> Tracker:
        """The run at the tracker: the one with this id, or a new one."""
        module = importlib.import_module(f"stoker.tracking.{self.name}_tracker")
        tracker: Tracker = module.open_run(about, self.where, known_id)
        return tracker

    def require_writable(self) -> None:
        """Refuse a folder that cannot be written to, or created, before a run starts.

        Raises:
            BadJob: it cannot, as far as permissions show.
        """
        if self.where is None or self.name not in _IN_FOLDERS or "://" in self.where:
            return
        folder = Path(self.where)
        there = next(place for place in (folder, *folder.parents) if place.exists())
        if not there.is_dir():
            raise BadJob(f"{self.word!r} names the folder {folder}, and {there} is a file", remedy="Name a folder.")
        if not os.access(there, os.W_OK | os.X_OK):
            does = "written to" if there == folder else f"made: {there} cannot be written to"
            raise BadJob(
                f"{self.word!r} names the folder {folder}, which cannot be {does}",
                remedy="Name another folder, or make it writable for this user.",
            )


_USER, _QUERY = re.compile(r"(?<=://)[^/\s]*@"), re.compile(r"(://[^?\s]*\?)\S+")


def without_secrets(text: str) -> str:
    """`text` without users, passwords and queries in its URLs, for what is stored or shown.

    >>> without_secrets("mlflow=postgresql://me:secret@db/mlflow?key=1 is down")
    'mlflow=postgresql://…@db/mlflow?… is down'
    """
    return _QUERY.sub(r"\1…", _USER.sub("…@", text))


def require_tracker(word: str) -> tuple[str, str]:
    """The name and the place of a tracker in `NAME` or `NAME=WHERE`, installed here or not.

    Raises:
        BadJob: there is no such tracker, or it has no such place.
    """
    name, has_place, where = word.partition("=")
    if name not in TRACKERS:
        raise BadJob(f"there is no tracker {name!r}", remedy=nearest(name, TRACKERS))
    if has_place and not where:
        raise BadJob(f"{word!r} names no place", remedy=f"Write {name}, or {name}=WHERE.")
    if name == "csv" and "://" in where:
        raise BadJob(f"{word!r} names a URL, and a table is a file", remedy="Name a folder: csv=/data/metrics.")
    if name == "prometheus" and "://" in where and not where.startswith(("http://", "https://")):
        raise BadJob(f"{word!r} is no address of a Pushgateway", remedy="Write prometheus=http://HOST:9091.")
    return name, where


def parse_tracker(word: str) -> TrackerTarget:
    """The target that a user writes as `NAME` or `NAME=WHERE`.

    >>> parse_tracker("csv=/data/metrics")
    TrackerTarget(name='csv', where='/data/metrics')

    Raises:
        BadJob: there is no such tracker, or its package is not installed.
    """
    name, where = require_tracker(word)
    if (package := _EXTRAS.get(name)) is not None:
        try:
            importlib.import_module(package)
        except ImportError as problem:
            raise BadJob(
                f"{name} needs the package {package}, which cannot be imported: {problem}",
                remedy=f"pip install 'stoker[{name}]'",
            ) from problem
    if where and "://" not in where and name in _IN_FOLDERS:
        # A run may be continued from another folder; shells leave `csv=~` as it is.
        where = os.path.abspath(os.path.expanduser(where))  # noqa: PTH100, PTH111 - Path raises at `~nobody`
    return TrackerTarget(name, where or None)

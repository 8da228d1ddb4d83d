"""Trackers by name, as people write them: `tensorboard`, `mlflow=http://host:5000`, `wandb=my-project`, `csv`."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from pathlib import Path

from stoker.errors import BadJob, nearest
from stoker.tracking.base import About, Tracker

TRACKERS = ("csv", "mlflow", "tensorboard", "trackio", "wandb")

_IN_FOLDERS = ("csv", "tensorboard")
"""Trackers whose place is a folder."""

_EXTRAS = {"mlflow": "mlflow", "tensorboard": "tensorboardX", "trackio": "trackio", "wandb": "wandb"}
"""The package behind a tracker; the extra that installs it is called like the tracker."""


@dataclass(frozen=True)
class Target:
    """A tracker and where it is: a folder, a server, a project; None for what is usual there."""

    name: str
    where: str | None = None

    @property
    def word(self) -> str:
        """As people write it."""
        return self.name if self.where is None else f"{self.name}={self.where}"

    def open(self, about: About, known_id: str | None) -> Tracker:
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


def target_of(word: str) -> Target:
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
    return Target(name, where or None)


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

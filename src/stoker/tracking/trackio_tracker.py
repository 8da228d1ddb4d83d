"""Trackio: the job is a project unless `trackio=PROJECT` names another; values are over samples, in a local database.

`TRACKIO_DIR` and the other variables of its own hold; `trackio show --project JOB` shows the run.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import trackio

from stoker.records.run import RunStatus
from stoker.tracking.base import MetricPoint, RunDescription

_TALKATIVE = ("trackio", "trackio.run", "trackio.utils")


class TrackioRun:
    """A run in Trackio's project. It knows runs by their names, and has no place for a status or files."""

    def __init__(self, run: Any, project: str) -> None:
        self._run = run
        self.id = str(run.name)
        self.where = f"trackio show --project {project}"

    def log(self, points: list[MetricPoint]) -> None:
        """Each point at its samples, which are Trackio's steps."""
        for point in points:
            self._run.log(dict(point.values), step=point.samples)

    def end(self, status: RunStatus, files: list[Path]) -> None:
        """Nothing: Trackio keeps values and settings."""

    def close(self) -> None:
        """Wait until its database has everything."""
        self._run.finish()


def open_run(about: RunDescription, where: str | None, known_id: str | None) -> TrackioRun:
    """The run of this name, or a new one with the job's and the plan's settings."""
    _silence()
    project = where or about.job
    run = trackio.init(
        project=project, name=known_id or about.run, config=dict(about.parameters), resume="allow", embed=False,
        auto_log_gpu=False, auto_log_cpu=False,
    )  # fmt: skip
    return TrackioRun(run, project)


def _silence() -> None:
    """Trackio says what it does on standard output, where `--json` writes events; redirected, those were gone."""
    for name in _TALKATIVE:
        setattr(importlib.import_module(name), "print", lambda *_, **__: None)  # noqa: B010 - no attribute of theirs

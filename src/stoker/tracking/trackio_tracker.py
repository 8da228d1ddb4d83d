"""Trackio: the job is a project unless `trackio=PROJECT` names another; values are over samples, in a local database.

Trackio's own variables, such as `TRACKIO_DIR`, apply; `trackio show --project JOB` shows the run.
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
    """A run in a Trackio project, which identifies runs by name, and stores neither status nor files."""

    def __init__(self, run: Any, project: str) -> None:
        self._run = run
        self.id = str(run.name)
        self.where = f"trackio show --project {project}"

    def log(self, points: list[MetricPoint]) -> None:
        """Each point at its samples, which are Trackio's steps."""
        for point in points:
            self._run.log(dict(point.values), step=point.samples)

    def go_back(self, samples: int) -> None:
        """Trackio takes no value back."""

    def end(self, status: RunStatus, files: list[Path]) -> None:
        """Trackio stores values and settings alone."""

    def close(self) -> None:
        """Wait until its database has all values."""
        self._run.finish()


def open_run(about: RunDescription, where: str | None, known_id: str | None) -> TrackioRun:
    """The run of this name, or a new one with the settings of job and plan."""
    for module in _TALKATIVE:  # they print to standard output, where `--json` writes events
        setattr(importlib.import_module(module), "print", lambda *_, **__: None)  # noqa: B010 - not theirs
    project = where or about.job
    run = trackio.init(
        project=project,
        name=known_id or about.run,
        config=dict(about.parameters),
        resume="allow",
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    return TrackioRun(run, project)

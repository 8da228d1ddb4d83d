"""Weights & Biases: the job is a project unless `wandb=PROJECT` names another; charts are over samples.

W&B's own variables, such as `WANDB_MODE=offline`, apply.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import wandb

from stoker.records.run import RunStatus
from stoker.tracking.base import MetricPoint, RunDescription


class WandbRun:
    """A run at Weights & Biases, online or offline."""

    def __init__(self, run: Any) -> None:
        self._run = run
        self.id = str(run.id)
        self.where = str(run.url or run.dir)
        run.define_metric("samples")
        run.define_metric("*", step_metric="samples")

    def log(self, points: list[MetricPoint]) -> None:
        """Each point with its samples; W&B's own step counts calls, since it must never decrease."""
        for point in points:
            self._run.log({**point.values, "samples": point.samples, "_timestamp": point.at})

    def go_back(self, samples: int) -> None:
        """W&B takes no value back."""

    def end(self, status: RunStatus, files: list[Path]) -> None:
        """The run's status, and its files."""
        self._run.summary["status"] = status
        for file in files:
            self._run.save(str(file), base_path=str(file.parent), policy="now")

    def close(self) -> None:
        """Wait until all values are sent."""
        self._run.finish()


def open_run(about: RunDescription, where: str | None, known_id: str | None) -> WandbRun:
    """The run with this id, or a new one with the settings of job and plan."""
    return WandbRun(
        wandb.init(
            project=where or about.job,
            name=about.run,
            id=known_id,
            resume="allow",
            config=dict(about.parameters),
            dir=str(about.folder),
            settings=wandb.Settings(silent=True, console="off"),
        )
    )

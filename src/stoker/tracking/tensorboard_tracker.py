"""TensorBoard's event files, by tensorboardX, which needs neither TensorBoard nor TensorFlow.

The axis called *step* there counts samples.
"""

from __future__ import annotations

import time
from pathlib import Path

from tensorboardX import SummaryWriter

from stoker.records.run import RunStatus
from stoker.tracking.base import MetricPoint, RunDescription, output_path


class TensorBoardRun:
    """A folder of event files; each process of a run adds one."""

    def __init__(self, folder: str, about: RunDescription, *, is_new: bool) -> None:
        self.id = self.where = folder
        self._writer = _writer(folder)
        if is_new:
            lines = [f"| {name} | {value.replace('|', '¦')} |" for name, value in about.parameters.items()]
            self._writer.add_text("settings", "\n".join(["| setting | value |", "|---|---|", *lines]))

    def log(self, points: list[MetricPoint]) -> None:
        """A scalar for each value, over samples."""
        for point in points:
            for name, value in point.values.items():
                self._writer.add_scalar(name, value, point.samples, walltime=point.at)
        self._writer.flush()

    def go_back(self, samples: int) -> None:
        """Begin an event file whose first entry hides all values after `samples` samples in earlier files."""
        self._writer.close()
        self._writer = _writer(self.id, purge_step=samples + 1)

    def end(self, status: RunStatus, files: list[Path]) -> None:
        """Write the run's status; event files cannot hold other files."""
        self._writer.add_text("status", status)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


def _writer(folder: str, *, purge_step: int | None = None) -> SummaryWriter:
    # A unique name for each file: tensorboardX's has a resolution of a second, and would overwrite the one before.
    # Flushed by hand, so that what counts as sent is on disk.
    return SummaryWriter(folder, flush_secs=3600, filename_suffix=f".{time.time_ns()}", purge_step=purge_step)


def open_run(about: RunDescription, where: str | None, known_id: str | None) -> TensorBoardRun:
    """Event files in the run's folder `tracking/tensorboard`; or below the folder `where`, under the run's name.

    `where` may be a URL that tensorboardX supports, such as `s3://bucket/runs`; existing files there are not read.
    """
    if where is not None and "://" in where:
        folder = known_id or f"{where.rstrip('/')}/{about.run}"  # a Path would turn two slashes into one
    else:
        folder = str(output_path(about, where, known_id, name="tensorboard"))
    return TensorBoardRun(folder, about, is_new=known_id is None)

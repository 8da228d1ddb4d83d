"""MLflow: the job is an experiment, the run a run, and *step* counts samples.

The server is `mlflow=URI`, else that of `MLFLOW_TRACKING_URI` or MLflow's default.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import mlflow
from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from stoker.records.run import RunStatus
from stoker.tracking.base import MetricPoint, RunDescription

_STATUS = {"finished": "FINISHED", "failed": "FAILED", "unfinished": "KILLED"}
_MOST_METRICS, _MOST_PARAMETERS = 1000, 100
"""Limits of one request."""
_NOT_ALLOWED = re.compile(r"[^\w\-. /]")


class MlflowRun:
    """A run at an MLflow server or in a local store.

    Its settings are sent before its first values, not at its creation: there each failure would create another run.
    """

    def __init__(self, client: MlflowClient, run_id: str, parameters: Mapping[str, str]) -> None:
        self._client, self.id, self.where = client, run_id, client.tracking_uri
        self._unsent = [Param(name, value) for name, value in {_allowed(n): v for n, v in parameters.items()}.items()]

    def log(self, points: list[MetricPoint]) -> None:
        """Metrics over samples."""
        while self._unsent:
            self._client.log_batch(self.id, params=self._unsent[:_MOST_PARAMETERS])
            del self._unsent[:_MOST_PARAMETERS]
        metrics = [
            Metric(_allowed(name), value, round(1000 * point.at), point.samples)
            for point in points
            for name, value in point.values.items()
        ]
        for first in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self.id, metrics=metrics[first : first + _MOST_METRICS])

    def go_back(self, samples: int) -> None:
        """MLflow's client takes no value back."""

    def end(self, status: RunStatus, files: list[Path]) -> None:
        """The run's status, and files as artifacts."""
        self._client.set_terminated(self.id, _STATUS[status])  # first: files need more rights, and may be refused
        for file in files:
            self._client.log_artifact(self.id, str(file))

    def close(self) -> None:
        """No connection is held."""


def open_run(about: RunDescription, where: str | None, known_id: str | None) -> MlflowRun:
    """The run with this id, running again; or a new one, with the settings of job and plan."""
    client = MlflowClient(tracking_uri=where or mlflow.get_tracking_uri())
    if known_id is not None:
        client.update_run(known_id, status="RUNNING")
        return MlflowRun(client, known_id, {})
    experiment = client.get_experiment_by_name(about.job)
    number = client.create_experiment(about.job) if experiment is None else experiment.experiment_id
    created = client.create_run(number, run_name=about.run, start_time=round(1000 * about.created_at))
    return MlflowRun(client, created.info.run_id, about.parameters)


def _allowed(name: str) -> str:
    """A name with the characters that MLflow does not allow replaced."""
    return _NOT_ALLOWED.sub("_", name)

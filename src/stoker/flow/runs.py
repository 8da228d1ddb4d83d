"""Runs as people use them: metrics, model, report."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from stoker import records, reporting, training
from stoker.errors import BadRun, StokerError
from stoker.flow.examples import read_examples
from stoker.flow.job_again import job_again, where_started
from stoker.jobs import Job
from stoker.records.pruning import Cut, Pruning
from stoker.stepping import build_model
from stoker.store import RunDirectory, find_run, runs_root, write_atomic
from stoker.units import Duration

WEIGHTS = "model.safetensors"
"""The weights a finished run keeps, in its directory."""

PRUNING = "pruning.json"
"""What was taken out of its model before a run trained it, in its directory; runs of whole models have none."""


@dataclass(frozen=True)
class Kept:
    """Weights that a run kept for good: their file, and where training was."""

    path: Path
    samples: int
    updates: int
    epochs: float
    since_samples: int
    since_epochs: float

    @classmethod
    def of(cls, path: Path) -> Kept:
        """The weights in a file, by what it says of them.

        Raises:
            BadRun: it cannot be read, or does not say.
        """
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                said = json.loads((file.metadata() or {})[training.KEPT_AT])
            return cls(
                path, int(said["samples"]), int(said["updates"]), float(said["epochs"]), int(said["since_samples"]),
                float(said["since_epochs"]),
            )  # fmt: skip
        except (OSError, safetensors.SafetensorError, KeyError, ValueError, TypeError) as error:
            raise BadRun(f"{path} cannot be read as weights that a run kept: {error}") from error

    def is_at(self, at: Duration) -> bool:
        """Whether training reached `at` in the update that led to these weights."""
        if at.unit == "updates":
            return self.updates == at.value
        since, until = (self.since_epochs, self.epochs) if at.unit == "epochs" else (self.since_samples, self.samples)
        return since < at.value - _ROUNDING and at.value <= until + _ROUNDING


_ROUNDING = 1e-6
"""Epochs are whole to within this."""


class Run:
    """A run on disk: its record, its metrics, its model."""

    def __init__(self, directory: RunDirectory, job: Job | None = None) -> None:
        self.directory = directory
        self.record = directory.read_run()
        self._job = job

    @property
    def path(self) -> Path:
        """The run's directory."""
        return self.directory.path

    @property
    def name(self) -> str:
        """The run's name."""
        return self.record.name

    @property
    def status(self) -> records.RunStatus:
        """`finished`, `unfinished` or `failed`."""
        return self.record.status

    @property
    def metrics(self) -> dict[str, float]:
        """Final metrics, such as `test/accuracy`; empty until the run is finished."""
        return self.record.metrics

    @property
    def report_path(self) -> Path:
        """The run's report, an HTML file."""
        return self.directory.report_path

    def kept(self) -> tuple[Kept, ...]:
        """The weights that `Job(keep_every=…)` kept so far, oldest first.

        Raises:
            BadRun: a file of them cannot be read.
        """
        paths = sorted(self.directory.kept_weights.glob("*.safetensors"))
        return tuple(sorted((Kept.of(path) for path in paths), key=lambda kept: kept.updates))

    def weights(self, at: Duration | None = None) -> dict[str, torch.Tensor]:
        """The weights the run kept, by name; no code of the job runs.

        Args:
            at: those of a moment for which `Job(keep_every=…)` kept them, such as `stoker.epochs(5)`, also of a run
                that is not finished (default: the final ones).

        Raises:
            BadRun: the run is not finished, kept none at that moment, or its weights cannot be read.
        """
        path = self.path / WEIGHTS if at is None else self._kept(at).path
        if not path.is_file():
            raise BadRun(f"{self.name} has no final weights: it is {self.status}",
                         remedy="Run the same `stoker train` command again to finish it.")  # fmt: skip
        try:
            return safetensors.torch.load_file(path)
        except safetensors.SafetensorError as error:
            raise BadRun(f"{path} cannot be read: {error}") from error

    def model(self, job: Job | None = None, *, at: Duration | None = None) -> torch.nn.Module:
        """The trained model, in evaluation mode; with the weights of a moment `at` which they were kept, if given.

        The architecture comes from `job`, from the job this run was trained with, or from the run's own copy of its
        job file, which then runs as code: load only runs you trust. What pruning took out of it is taken out again.
        Data are read only if `job()` itself reads them.

        Raises:
            BadJob: the model was pruned, and the job makes another one than that; or the job cannot be made again.
            BadRun: the run has no weights yet, or they do not fit the model.
        """
        model = build_model(job or self.job())
        if cuts := self.cuts:
            from stoker.compressing.pruning.rebuilding import rebuilt  # noqa: PLC0415 - few runs need compression

            for cut in cuts:
                model = rebuilt(model, cut)
        training.load_weights(model, self.weights(at), self.path / WEIGHTS)
        return model.eval()

    def job(self) -> Job:
        """The job this run was trained with, or that of the run's own copy of its job file, which then runs as code.

        It runs in the folder of the run's first start, so that paths to data are those of then. For a run that trained
        what pruning left of another's model it is that one's job: with the whole model.

        Raises:
            BadJob: the job cannot be made again, as where it reads data that are gone.
            BadRun: it was made in Python, without a job file; or the run whose model was pruned is gone.
        """
        return self._job or (self._job_from_copy() if self.pruning is None else self._job_before(self.pruning))

    def where_it_started(self) -> AbstractContextManager[None]:
        """Within it the working directory is that of the run's first start, if its job comes from a job file."""
        return nullcontext() if self._job is not None else where_started(self.directory)

    @property
    def pruning(self) -> Pruning | None:
        """What was taken out of the model before this run trained it; None of a whole one.

        Raises:
            BadRun: the record of it cannot be read.
        """
        path = self.path / PRUNING
        if not path.is_file():
            return None
        try:
            return records.loads(path.read_text(encoding="utf-8"), Pruning)
        except (OSError, ValueError) as error:
            raise BadRun(f"{path} cannot be read: {error}") from error

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """What makes this run's model of the one that its job has, cut by cut; nothing of a whole one."""
        pruning = self.pruning
        return () if pruning is None else (*pruning.before, pruning.cut)

    def plot(self) -> Any:
        """A plotly figure of the run's losses and metrics over samples: `run.plot().show()`; a notebook shows it.

        Raises:
            BadRun: its log cannot be read.
        """
        return reporting.plot(self.directory.read_report())

    def _repr_html_(self) -> str:
        """What a notebook shows of it."""
        return reporting.run_html(self.directory.read_report())

    def __repr__(self) -> str:
        """Name, status and metrics."""
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in self.metrics.items())
        return f"<Run {self.name}: {self.status}{', ' if metrics else ''}{metrics}>"

    def _kept(self, at: Duration) -> Kept:
        kept = self.kept()
        match = next((one for one in kept if one.is_at(at)), None)
        if match is None:
            known = ", ".join(f"{one.epochs:g}" for one in kept)
            raise BadRun(
                f"{self.name} kept no weights at {at}; "
                + (f"it kept those of epochs {known}" if kept else "it kept none"),
                remedy="Job(keep_every=…) says how often weights are kept; run.kept() lists them.",
            )
        return match

    def _job_before(self, pruning: Pruning) -> Job:
        try:
            return load(pruning.source.name).job()
        except StokerError as error:
            raise BadRun(
                f"{self.name} trained what pruning left of {pruning.source.name}, whose job cannot be had: "
                f"{error.message}",
                remedy="Give the job that the pruned run was made with: load(RUN, job=…).",
            ) from error

    def _job_from_copy(self) -> Job:
        spec = self.directory.read_spec()
        if spec.entry is None:
            raise BadRun(f"{self.name} was made in Python, without a job file", remedy="Give it: run.model(job=…).")
        return job_again(self.directory, spec.entry, spec.parameters)


def load(where: str | Path, job: Job | None = None) -> Run:
    """The run in a directory, or of that name.

    Raises:
        BadRun: there is none, or it is damaged.
    """
    return Run(find_run(runs_root(), str(where)), job)


def report(where: str | Path) -> Path:
    """Write a run's report anew; returns the HTML file.

    Raises:
        BadRun: there is no such run, or it is damaged.
    """
    directory = find_run(runs_root(), str(where))
    page = reporting.render_html(directory.read_report(), read_examples(directory))
    write_atomic(directory.report_path, page, what="the report")
    return directory.report_path

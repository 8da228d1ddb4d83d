"""A run on disk, as users handle it: record, metrics, weights, model, job and report.

A run's job is made again where the run was first started, since paths in a job are relative to the working directory
or to the job file (`Path(__file__).parent`). The job file itself runs, as long as it and its local imports equal the
run's copies of them; else the copy runs.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from stoker import records, reporting
from stoker.errors import BadJob, BadRun, StokerError
from stoker.jobs import Entry, Job, load_job
from stoker.records.codec import JSON
from stoker.records.compression import Cut, Pruning
from stoker.records.run import Started
from stoker.reporting.display import run_html
from stoker.stepping.model import build_model
from stoker.stepping.python_state import put_plain
from stoker.store import RunDirectory, disk_errors, find_run, runs_root, write_atomic
from stoker.store.files import make_directories
from stoker.store.run_files import PRUNING, STARTED, WEIGHTS
from stoker.training.checkpoints import KEPT_AT, PYTHON
from stoker.training.elastic.supervisor import INTERRUPTED
from stoker.training.pruned_network import rebuild_pruned
from stoker.training.slices import SLICE_OVER, SLICE_OVER_EXIT
from stoker.training.snapshots import load_weights
from stoker.units import Duration


@dataclass(frozen=True)
class KeptWeights:
    """A file of weights that a run kept for good, and their position."""

    path: Path
    samples: int
    updates: int
    epochs: float
    since_samples: int
    since_epochs: float

    @classmethod
    def of(cls, path: Path) -> KeptWeights:
        """The weights in a file, with the position from its metadata.

        Raises:
            BadRun: the file cannot be read, or has no position.
        """
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                kept = json.loads((file.metadata() or {})[KEPT_AT])
            return cls(
                path,
                int(kept["samples"]),
                int(kept["updates"]),
                float(kept["epochs"]),
                int(kept["since_samples"]),
                float(kept["since_epochs"]),
            )
        except (OSError, safetensors.SafetensorError, KeyError, ValueError, TypeError) as error:
            raise BadRun(f"{path} cannot be read as weights that a run kept: {error}") from error

    def is_at(self, at: Duration) -> bool:
        """Whether training reached `at` in the update that led to these weights."""
        if at.unit == "updates":
            return self.updates == at.value
        since, until = (self.since_epochs, self.epochs) if at.unit == "epochs" else (self.since_samples, self.samples)
        return since < at.value - _ROUNDING and at.value <= until + _ROUNDING


_ROUNDING = 1e-6
"""Tolerance of positions in epochs and samples."""


class Run:
    """A run on disk: its record, its metrics, its model."""

    def __init__(self, directory: RunDirectory, job: Job | None = None, *, stopped_by: str | None = None) -> None:
        self.directory = directory
        self.stopped_by = stopped_by
        """Why `train` has left it unfinished: a signal's name, or `slice over`; None otherwise."""
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
    def exit_code(self) -> int:
        """Exit code of `stoker train`: 0 finished, 75 its slice is over, and the command continues it; 130 stopped."""
        if self.status == "finished":
            return 0
        return SLICE_OVER_EXIT if self.stopped_by == SLICE_OVER else INTERRUPTED

    @property
    def metrics(self) -> dict[str, float]:
        """Final metrics, such as `test/accuracy`; empty until the run is finished."""
        return self.record.metrics

    @property
    def report_path(self) -> Path:
        """The run's report, an HTML file."""
        return self.directory.report_path

    def kept(self) -> tuple[KeptWeights, ...]:
        """The weights that `Evaluation(keep_every=…)` kept so far, oldest first.

        Raises:
            BadRun: a file of them cannot be read.
        """
        paths = sorted(self.directory.kept_weights.glob("*.safetensors"))
        return tuple(sorted((KeptWeights.of(path) for path in paths), key=lambda kept: kept.updates))

    def weights(self, at: Duration | None = None) -> dict[str, torch.Tensor]:
        """The weights the run kept, by name; no code of the job runs.

        Args:
            at: a moment for which `Evaluation(keep_every=…)` kept weights, such as `stoker.epochs(5)`, also of an
                unfinished run (default: the final weights).

        Raises:
            BadRun: the run is not finished, kept none at that moment, or its weights cannot be read.
        """
        return self._read_weights(at)[0]

    def model(self, job: Job | None = None, *, at: Duration | None = None) -> torch.nn.Module:
        """The trained model, in evaluation mode; with `at`, the weights kept at that moment.

        The architecture comes from `job`, from the job this run was trained with, or from the run's own copy of its
        job file, which then runs as code: load only runs you trust. A pruned model is pruned again. Plain values in
        attributes that training changed, such as a counter, are those of the weights. Data are read only if `job()`
        itself reads them.

        Args:
            job: the job to take the architecture from; None: see above.
            at: a moment for which weights were kept, as for `weights`; None: the final ones.

        Raises:
            BadJob: the job makes another model than the one that was pruned, or cannot be made again.
            BadRun: the run has no weights yet, or they do not fit the model.
        """
        model = build_model(job or self.job())
        for cut in self.cuts:
            model = rebuild_pruned(model, cut)
        weights, python = self._read_weights(at)
        load_weights(model, weights, self.path / WEIGHTS)
        put_plain(model, None, python)
        return model.eval()

    def job(self) -> Job:
        """The job this run was trained with; without it, from its job file or the run's copy, which then runs as code.

        The code runs in the folder of the run's first start, so that paths to data hold. A run that trained a pruned
        model of another run has that run's job, with the whole model.

        Raises:
            BadJob: the job cannot be made again, as when it reads data that are gone.
            BadRun: it was made in Python, without a job file; or the run whose model was pruned is gone.
        """
        if self._job is not None:
            return self._job
        if (pruning := self.pruning) is not None:
            try:
                return load(pruning.source.name).job()
            except StokerError as error:
                raise BadRun(
                    f"{self.name} trained what pruning left of {pruning.source.name}, whose job cannot be had: "
                    f"{error.message}",
                    remedy="Give the job that the pruned run was made with: load(RUN, job=…).",
                ) from error
        spec = self.directory.read_spec()
        if spec.entry is None:
            raise BadRun(f"{self.name} was made in Python, without a job file", remedy="Give it: run.model(job=…).")
        return reload_job(self.directory, spec.entry, spec.parameters)

    def where_it_started(self) -> AbstractContextManager[None]:
        """A block in the folder of the run's first start, if its job comes from a job file."""
        return nullcontext() if self._job is not None else in_start_directory(self.directory)

    @property
    def pruning(self) -> Pruning | None:
        """The channels pruned from the model before this run trained it; None for a whole model.

        Raises:
            BadRun: the record cannot be read.
        """
        return self.directory.read(PRUNING)

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """The cuts that turn the job's model into this run's, in order; empty for a whole model."""
        pruning = self.pruning
        return () if pruning is None else (*pruning.before, pruning.cut)

    def plot(self) -> Any:
        """A plotly figure of the run's losses and metrics over samples: `run.plot().show()`; a notebook shows it.

        Raises:
            BadRun: its log cannot be read.
        """
        return reporting.figures.plot_report(self.directory.read_report())

    def _repr_html_(self) -> str:
        """The run's card in a notebook."""
        return run_html(self.directory.read_report())

    def __repr__(self) -> str:
        """Name, status and metrics."""
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in self.metrics.items())
        return f"<Run {self.name}: {self.status}{', ' if metrics else ''}{metrics}>"

    def _read_weights(self, at: Duration | None) -> tuple[dict[str, torch.Tensor], dict[str, JSON]]:
        """The weights that `weights` returns, and the plain Python values of their model."""
        path = self.path / WEIGHTS if at is None else self._kept_at(at).path
        if not path.is_file():
            raise BadRun(
                f"{self.name} has no final weights: it is {self.status}",
                remedy="Run the same `stoker train` command again to finish it.",
            )
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                python: dict[str, JSON] = json.loads((file.metadata() or {}).get(KEPT_AT, "{}")).get(PYTHON, {})
            return safetensors.torch.load_file(path), python
        except (safetensors.SafetensorError, ValueError) as error:
            raise BadRun(f"{path} cannot be read: {error}") from error

    def _kept_at(self, at: Duration) -> KeptWeights:
        kept = self.kept()
        match = next((weights for weights in kept if weights.is_at(at)), None)
        if match is None:
            known = ", ".join(f"{weights.epochs:g}" for weights in kept)
            raise BadRun(
                f"{self.name} kept no weights at {at}; "
                + (f"it kept those of epochs {known}" if kept else "it kept none"),
                remedy="Evaluation(keep_every=…) says how often weights are kept; run.kept() lists them.",
            )
        return match


def load(where: str | Path, job: Job | None = None) -> Run:
    """The run in a directory, or of that name.

    Args:
        where: a run's directory, its name below `STOKER_RUNS` (default: ./runs), the start of one, or `latest`.
        job: the job to take the architecture from; None: the run's own copy of its job file, see `Run.model`.

    Raises:
        BadRun: there is no such run, or it is damaged.
    """
    return Run(find_run(runs_root(), str(where)), job)


def report(where: str | Path) -> Path:
    """Write a run's report again; returns the HTML file.

    Args:
        where: the run, as for `load`.

    Raises:
        BadRun: there is no such run, or it is damaged.
    """
    directory = find_run(runs_root(), str(where))
    write_report(directory, directory.read_report())
    return directory.report_path


def write_report(directory: RunDirectory, report: records.Report) -> None:
    """Write `report` as the page of the run in `directory`."""
    write_atomic(
        directory.report_path, reporting.run_page.render_html(report, directory.read_examples()), what="the report"
    )


JOB_COPY = "job"
"""The run's copy of its job file and local imports, in its directory."""


def keep_sources(directory: RunDirectory, entry: Entry | None) -> None:
    """Copy the job file and its local imports into the run, and where it was started; existing copies stay."""
    if entry is None:
        return
    for name, text in entry.sources.items():
        copy = directory.path / JOB_COPY / name
        if not copy.exists():
            with disk_errors(copy, "the copy of the job file"):
                make_directories(copy.parent)
                write_atomic(copy, text)
    if not (directory.path / STARTED.name).exists():
        directory.write(STARTED, Started(folder=str(Path.cwd()), job_file=str(entry.path)))


def reload_job(directory: RunDirectory, entry: str, parameters: Mapping[str, JSON]) -> Job:
    """The job that a run was trained with; its code runs.

    Args:
        directory: the run's directory.
        entry: the job file's name.
        parameters: arguments of its function `job`.

    Raises:
        BadJob: the job cannot be made, as when it reads data that are gone.
    """
    path = _job_file(directory, entry)
    settings = {name: value if isinstance(value, str) else json.dumps(value) for name, value in parameters.items()}
    settings |= {name: "none" for name, value in parameters.items() if value is None}
    with in_start_directory(directory):
        try:
            return load_job(path, settings)[0]
        except BadJob as error:
            name = directory.name
            raise BadJob(
                f"the job of {name} cannot be made again: {error.message}",
                remedy="If it reads data, put them back where it looks for them; or give the job: "
                f"stoker.load({name!r}, job=…). The weights need neither: stoker.load({name!r}).weights().",
            ) from error


@contextlib.contextmanager
def in_start_directory(directory: RunDirectory) -> Iterator[None]:
    """Work in the folder of the run's first start, if it exists; the caller's relative paths change too."""
    started = _started(directory)
    if started is None or not Path(started.folder).is_dir():
        yield
        return
    with contextlib.chdir(started.folder):
        yield


def _job_file(directory: RunDirectory, entry: str) -> Path:
    """The original job file, if it and its local imports still equal the run's copies; else the copy."""
    copies = (directory.path / JOB_COPY).absolute()
    started = _started(directory)
    if started is None:
        return copies / entry
    original = Path(started.job_file)
    names = [copy.relative_to(copies) for copy in copies.rglob("*.py")]
    try:
        are_same = names and all(
            (copies / name).read_text(encoding="utf-8") == (original.parent / name).read_text(encoding="utf-8")
            for name in names
        )
    except (OSError, UnicodeError):  # an original is gone, or no longer text
        are_same = False
    return original if are_same and original.name == entry else copies / entry


def _started(directory: RunDirectory) -> Started | None:
    """Where the run was first started; a job made in Python has no record of it, and a damaged one does not count."""
    with suppress(BadRun):
        return directory.read(STARTED)
    return None

"""Compress: from an exported model to a faster one that keeps its metric, with proof."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from stoker import compressing
from stoker.artifacts import Artifact, read, read_settings
from stoker.compressing import Compressed, Course, Material, Metric, PrunedGraph, Surroundings, Terms
from stoker.devices import attached_cpu
from stoker.engines import default_threads
from stoker.errors import BadJob
from stoker.exporting.writing import libraries, now
from stoker.flow.preparation import users_code
from stoker.flow.rows_of_files import TARGETS, read_rows
from stoker.jobs import Job
from stoker.records import Event, Manifest
from stoker.units import Duration

MOST_ROWS = 20_000
"""Validation rows that are looked at, however many there are."""

CALIBRATION_ROWS = 300


def compress(  # noqa: PLR0913 - what the command line offers
    model: str | Path,
    *,
    max_drop: str = "0.5%",
    job: Job | None = None,
    data: str | Path | None = None,
    metric: str | Path | Metric | None = None,
    batch_sizes: tuple[int, ...] = (),
    threads: int | None = None,
    seconds: float = 180.0,
    seed: int = 0,
    keep_all: Path | None = None,
    prune: bool = False,
    fine_tune: Duration | None = None,
    tell: Callable[[str], None] = lambda _line: None,
    sink: Callable[[Event], None] | None = None,
) -> Compressed:
    """Look for the fastest form of an exported model that keeps its metric, and publish it as the next version.

    Args:
        model: a model's directory, or that of one version.
        max_drop: what may be lost of the metric; see `Metric.allowed`.
        job: whose data to use; default: that of the run the model was exported from.
        data: rows in a file instead, an .npz or a Parquet table, with an array or column for each input and `target`.
        metric: a name, a Python file with a function `metric(outputs, targets)`; default: the job's first, or agreement
            with the model's own answers where rows have no target.
        batch_sizes: rows of the batches that count; default: 1, and the most the service takes.
        threads: of an engine; default: as the service has them.
        seconds: for the whole search, about.
        seed: of the split of rows.
        keep_all: a directory for the graphs of all candidates.
        prune: try smaller networks too, each trained on by a run of its own, before the search and its time begin;
            of a model that was exported from a run.
        fine_tune: how long each of them is trained (default: a quarter of what the job was).
        tell: told what happens, a line at a time.
        sink: receives the events of those runs (default: a display on standard error).

    Raises:
        BadArtifact: the model cannot be read or asked.
        BadJob: no data or metric that fits, too few rows to judge by, or nothing to train a pruned network by.
        RunFailed: a pruned network's training was stopped; the same call goes on.
    """
    source = read(model)
    source.verify()
    settings = read_settings(source.path.parent)
    terms = Terms(
        max_drop=max_drop,
        batch_sizes=batch_sizes or tuple(sorted({1, settings.max_batch_rows})),
        most_rows=settings.max_batch_rows,
        threads=threads or settings.threads or default_threads(settings.instances or 1),
        seconds=seconds,
    )
    _require_sensible(terms)
    material, chosen = _material(source, job, data, metric, seed)
    cpu = attached_cpu()
    around = Surroundings(
        clock=time.perf_counter, cpu=cpu.model, fast_dtypes=cpu.fast_dtypes, made_at=now(), libraries=libraries()
    )
    with TemporaryDirectory(prefix="stoker-prune-") as aside:

        def pruned(course: Course) -> Sequence[PrunedGraph]:
            from stoker.flow.pruner import pruner_of  # noqa: PLC0415 - loads torch
            from stoker.flow.pruning import pruned_graphs  # noqa: PLC0415 - likewise

            pruner = pruner_of(source, job, course, fast_dtypes=cpu.fast_dtypes, proved_on=cpu.model, tell=tell)
            return pruned_graphs(pruner, Path(aside), until=fine_tune, sink=sink)

        return compressing.compress(
            source, material, chosen, terms, around=around, tell=tell, keep=keep_all, prune=pruned if prune else None
        )


def _require_sensible(terms: Terms) -> None:
    if min(terms.batch_sizes) < 1:
        raise BadJob(f"batch sizes are 1 or more, got {min(terms.batch_sizes)}")
    if not 0 < terms.seconds < float("inf"):
        raise BadJob(f"--seconds {terms.seconds}: wanted a positive number")


def _material(
    source: Artifact, job: Job | None, data: str | Path | None, metric: str | Path | Metric | None, seed: int
) -> tuple[Material, Metric]:
    """The rows of a search and its metric."""
    manifest = source.manifest
    if data is not None:
        rows = compressing.check_fit(read_rows(Path(data), manifest), manifest, str(data))
        if metric is None and rows.targets is not None:
            raise BadJob(
                "there is no metric to keep", remedy="Give one: --metric accuracy, agreement, …, or a Python file."
            )
        chosen = _metric_of("agreement" if metric is None else metric, manifest)
        if rows.targets is None and metric in compressing.NAMES and not chosen.is_agreement:
            raise BadJob(
                f"{data} has no array or column {TARGETS[0]!r}, which the metric {chosen.name} needs",
                remedy="Add it, or leave --metric out: answers are then compared with the original's.",
            )
        return compressing.dealt(None, rows, seed=seed, calibration=CALIBRATION_ROWS), chosen
    from stoker.flow.rows_of_jobs import job_of, metric_of_job, rows_of_job  # noqa: PLC0415 - loads torch

    with users_code("the job's data", None):
        job = job or job_of(source)
        training, validation = rows_of_job(job, manifest, CALIBRATION_ROWS, MOST_ROWS, seed)
    if metric is None:
        metric = metric_of_job(job) if validation.targets is not None else "agreement"
    chosen = _metric_of(metric, manifest)
    training, validation = (
        compressing.check_fit(rows, manifest, what)
        for rows, what in ((training, "training data"), (validation, "validation data"))
    )
    return compressing.dealt(training, validation, seed=seed, calibration=CALIBRATION_ROWS), chosen


def _metric_of(metric: str | Path | Metric, manifest: Manifest) -> Metric:
    """A metric by name, or out of a Python file."""
    if isinstance(metric, Metric):
        return metric
    path = Path(metric)
    if path.suffix != ".py":
        return compressing.named(str(metric), manifest.labels)
    if not path.is_file():
        raise BadJob(f"there is no {path}")
    spec = importlib.util.spec_from_file_location("stoker_metric", path)
    if spec is None or spec.loader is None:
        raise BadJob(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    with users_code(f"loading {path}", None):
        spec.loader.exec_module(module)
    function = getattr(module, "metric", None)
    if not callable(function):
        raise BadJob(f"{path} has no function `metric`", remedy="Define metric(outputs, targets): one score a row.")
    return Metric(path.stem, function, bool(getattr(function, "lower_is_better", False)))

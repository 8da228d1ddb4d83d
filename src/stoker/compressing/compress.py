"""Compress an exported model: search the fastest form that keeps its metric, and publish it as the next version."""

from __future__ import annotations

import dataclasses
import importlib.util
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from safetensors.numpy import save_file

from stoker import compressing
from stoker.artifacts import Artifact, Golden, publish, read, read_settings
from stoker.artifacts.golden import takes_nan
from stoker.compressing.candidates import GraphKind, PrunedGraph, kind_of
from stoker.compressing.contender import CompressionTerms, Contender, Examination
from stoker.compressing.gates import front
from stoker.compressing.rows import TARGETS, EvaluationData, EvaluationRows, check_fit, read_rows, split_rows
from stoker.compressing.scores import NAMES, Metric, named
from stoker.compressing.search import CompressionSearch, begin_search, run_search
from stoker.devices import attached_cpu
from stoker.engines import default_threads
from stoker.errors import BadArtifact, BadJob
from stoker.exporting.version_writer import GOLDEN, library_versions, now
from stoker.jobs import Job
from stoker.jobs.metrics import says_lower_is_better
from stoker.planning.resolved_job import users_code
from stoker.records import ArtifactSource, Event, FileDigest, Manifest, Proof, dumps
from stoker.records.compression import Compression, RowSplit
from stoker.store import write_atomic
from stoker.store.disk_errors import disk_errors
from stoker.units import Duration

MOST_ROWS = 20_000
"""Validation rows that are used at most."""

CALIBRATION_ROWS = 300


@dataclass(frozen=True)
class Compressed:
    """A search's record, and the version it published; None if nothing was better than the original."""

    record: Compression
    artifact: Artifact | None


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
    """Search the fastest form of an exported model that keeps its metric, and publish it as the next version.

    Args:
        model: a model's directory, or a version's.
        max_drop: allowed loss of the metric; see `Metric.allowed`.
        job: source of the data; default: the job of the run that the model was exported from.
        data: rows in a file instead, an .npz or a Parquet table, with an array or column for each input and `target`.
        metric: a name, or a Python file with a function `metric(outputs, targets)`; default: the job's first, or
            agreement with the model's own answers if rows have no target.
        batch_sizes: of the batches that are timed [rows]; default: 1, and the service's largest.
        threads: of an engine; default: as in the service.
        seconds: for the whole search, about.
        seed: of the split of rows.
        keep_all: a directory for the graphs of all candidates.
        prune: also try smaller networks, each trained in a run of its own before the search's time begins; only for a
            model that was exported from a run.
        fine_tune: length of their training (default: a quarter of the job's).
        tell: receives progress, a line at a time.
        sink: receives the events of those runs (default: a display on standard error).

    Raises:
        BadArtifact: the model cannot be read or run.
        BadJob: both a job and a file for the rows, no data or metric that fits, too few rows to judge by, or no job to
            train a pruned network by.
        RunFailed: a pruned network's training was stopped; the same call continues it.
    """
    if data is not None and job is not None and not prune:
        raise BadJob(
            "--job and --data both say where rows come from",
            remedy="Leave one of them out; with --prune both are used: the job trains, and the rows of --data judge.",
        )
    source = read(model)
    source.verify()
    settings = read_settings(source.path.parent)
    terms = CompressionTerms(
        max_drop=max_drop,
        batch_sizes=batch_sizes or tuple(sorted({1, settings.max_batch_rows})),
        most_rows=settings.max_batch_rows,
        threads=threads or settings.threads or default_threads(settings.instances or 1),
        seconds=seconds,
    )
    if min(terms.batch_sizes) < 1:
        raise BadJob(f"batch sizes are 1 or more, got {min(terms.batch_sizes)}")
    if not 0 < terms.seconds < float("inf"):
        raise BadJob(f"--seconds {terms.seconds}: wanted a positive number")
    allow_nan = takes_nan(source.golden()) if settings.allow_nan is None else settings.allow_nan
    material, kept_metric = _material(source, job, data, metric, seed, allow_nan=allow_nan)
    if not source.manifest.is_batched:
        raise BadArtifact(
            f"{source.path} has inputs or outputs that do not begin with the batch, so rows cannot be stacked",
            remedy="Export it with a batch that varies.",
        )
    if keep_all is not None and keep_all.exists() and (not keep_all.is_dir() or any(keep_all.iterdir())):
        raise BadJob(f"{keep_all} is not empty", remedy="Name a directory that is not there yet with --keep-all.")
    kind, cpu, made_at = kind_of(source.graph_path), attached_cpu(), now()
    course = Examination(source, material, kept_metric, terms, time.perf_counter)
    with TemporaryDirectory(prefix="stoker-compress-") as aside, TemporaryDirectory(prefix="stoker-prune-") as pruning:
        search = begin_search(course, keep_all or Path(aside), tell, sums_fit="int8" in cpu.fast_dtypes)
        pruned: Sequence[PrunedGraph] = ()
        if prune and not kind.quantised:  # known to have enough rows by now; its time is not the search's
            pruner = compressing.source_job.pruner_of(
                source, job, search.course, fast_dtypes=cpu.fast_dtypes, proved_on=cpu.model, tell=tell
            )
            pruned = compressing.pruning.pruned_graphs(pruner, Path(pruning), until=fine_tune, sink=sink)
            search.started = course.clock()
        run_search(search, kind, cpu.fast_dtypes, pruned)
        search.require_tried()
        chosen = search.accept(material.seed)
        record = _record(search, chosen, kind, cpu.model, made_at)
        published = None
        if chosen is not search.original:
            published = publish_chosen(source, chosen, record, source.path.parent)
        for contender in (search.original, *search.passed):
            contender.engine.close()
    return Compressed(record, published)


def _material(
    source: Artifact,
    job: Job | None,
    data: str | Path | None,
    metric: str | Path | Metric | None,
    seed: int,
    *,
    allow_nan: bool,
) -> tuple[EvaluationData, Metric]:
    """The rows of a search and its metric."""
    manifest = source.manifest
    if data is not None:
        rows = check_fit(read_rows(Path(data), manifest), manifest, str(data), allow_nan=allow_nan)
        if metric is None and rows.targets is not None:
            raise BadJob(
                "there is no metric to keep", remedy="Give one: --metric accuracy, agreement, …, or a Python file."
            )
        chosen = _metric_of("agreement" if metric is None else metric, manifest)
        rows = _counted(rows, chosen)
        if rows.targets is None and metric in NAMES and not chosen.is_agreement:
            raise BadJob(
                f"{data} has no array or column {TARGETS[0]!r}, which the metric {chosen.name} needs",
                remedy="Add it, or leave --metric out: answers are then compared with the original's.",
            )
        return split_rows(None, rows, seed=seed, calibration=CALIBRATION_ROWS), chosen
    with users_code("the job's data", None):
        run = None  # of a job that is given the data are taken as they are
        if job is None:
            run = compressing.source_job.run_of(source)
            job = run.job()
        training, validation = compressing.source_job.rows_of_job(
            job, manifest, CALIBRATION_ROWS, MOST_ROWS, seed, run, with_targets=metric != "agreement"
        )
    if metric is None:
        metric = compressing.source_job.metric_of_job(job) if validation.targets is not None else "agreement"
    chosen = _metric_of(metric, manifest)
    if chosen.ignored is not None:
        chosen = dataclasses.replace(chosen, ignored=compressing.source_job.label_left_out(job))
    validation = _counted(validation, chosen)
    training = check_fit(training, manifest, "training data", allow_nan=allow_nan)
    validation = check_fit(validation, manifest, "validation data", allow_nan=allow_nan)
    return split_rows(training, validation, seed=seed, calibration=CALIBRATION_ROWS), chosen


def _counted(rows: EvaluationRows, metric: Metric) -> EvaluationRows:
    """The rows with a label that the metric counts."""
    labels = rows.targets
    if metric.ignored is None or not isinstance(labels, np.ndarray) or labels.dtype.kind not in "iu":
        return rows
    return rows.take(np.flatnonzero((labels != metric.ignored).reshape(len(labels), -1).any(axis=1)))


def _metric_of(metric: str | Path | Metric, manifest: Manifest) -> Metric:
    """A metric by name, or from a Python file."""
    if isinstance(metric, Metric):
        return metric
    path = Path(metric)
    if path.suffix != ".py":
        return named(str(metric), manifest.labels)
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
    return Metric(path.stem, function, bool(says_lower_is_better(function)))


RECORD = "compression.json"
"""File of a version with every trial of its search."""


def publish_chosen(source: Artifact, chosen: Contender, record: Compression, model: Path) -> Artifact:
    """Write the chosen candidate as the next version of `model`, with its golden answers and the record of the search.

    Raises:
        BadArtifact: the disk is full, or cannot be written.
    """

    def write(directory: Path, digests: Callable[[], tuple[FileDigest, ...]]) -> Manifest:
        inputs = source.golden().inputs
        with disk_errors(directory, "the compressed model", error=BadArtifact, option="-o DIR"):
            for path in (*chosen.made.files, *chosen.made.extra_files):
                shutil.copyfile(path, directory / path.name)
            save_file(Golden(inputs, chosen.engine.run(inputs)).as_tensors(), directory / GOLDEN)
        write_atomic(directory / RECORD, dumps(record) + "\n", what=RECORD, error=BadArtifact)
        drop = 0.0 if chosen.trial.drop is None else chosen.trial.drop.value
        metric = record.baseline + (drop if record.lower_is_better else -drop)
        return dataclasses.replace(
            chosen.manifest,
            graph=chosen.made.graph.name,
            golden=GOLDEN,
            tolerance=chosen.trial.tolerance or source.manifest.tolerance,
            metrics={record.metric: metric},  # on the rows of acceptance; the original's others no longer hold
            proofs=tuple(Proof(what=gate.what, error=gate.found, limit=gate.limit) for gate in chosen.trial.gates),
            notes=record.notes,
            proved_on=record.proved_on,
            source=record.source,
            libraries=record.libraries,
            made_at=record.made_at,
            files=digests(),
        )

    return publish(model, write)


def _record(search: CompressionSearch, chosen: Contender, kind: GraphKind, cpu: str, made_at: str) -> Compression:
    course, terms = search.course, search.course.terms
    material, source = course.material, course.source
    best, notes = front(search.trials), [*search.notes]
    if kind.quantised:
        origin = source.manifest.source
        advice = f"; it was made from {origin.name}, which can be compressed again" if origin.kind == "artifact" else ""
        notes.append(f"already quantised (it has {', '.join(kind.quantised)}): it is not quantised again{advice}")
    elif not kind.heavy:
        notes.append("no convolution or matrix product: there is nothing to gain in 8 bits")
    if count := len(search.left_out):
        enough = f"--seconds {search.seconds_for(count)} would likely try them all"
        notes.append(f"{count} of {len(search.trials) - 1} candidates were left out for want of time; {enough}")
    return Compression(
        source=ArtifactSource(kind="artifact", name=f"{source.manifest.name}/{source.version}", digest=source.digest),
        metric=course.metric.name,
        lower_is_better=course.metric.lower_is_better,
        max_drop=search.bar.allowed,
        confidence=terms.confidence,
        baseline=course.metric.value(search.accepted_scores),
        rows=RowSplit(
            calibration=len(material.calibration),
            selection=len(material.selection),
            acceptance=len(material.acceptance),
            seed=material.seed,
        ),
        batch_sizes=terms.batch_sizes,
        threads=terms.threads,
        proved_on=cpu,
        trials=tuple(dataclasses.replace(trial, on_front=trial.name in best) for trial in search.trials),
        chosen=chosen.trial.name,
        notes=tuple(notes),
        took_s=course.clock() - search.started,
        made_at=made_at,
        libraries=library_versions(),
    )

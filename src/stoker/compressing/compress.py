"""Compress: from an exported model to a faster one that keeps its metric, with proof.

The accepted candidate as the next version of its model.

A search from its beginning to the version it publishes.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors.numpy import save_file

from stoker.artifacts import Artifact, Golden, publish, read, read_settings
from stoker.compressing.candidates import GraphKind, PrunedGraph, kind_of
from stoker.compressing.contender import CompressionTerms, Contender, Examination
from stoker.compressing.gates import front
from stoker.compressing.rows import TARGETS, EvaluationData, check_fit, read_rows, split_rows
from stoker.compressing.scores import NAMES, Metric, named
from stoker.compressing.search import CompressionSearch, Tell, begin_search, run_search
from stoker.devices import attached_cpu
from stoker.engines import default_threads
from stoker.errors import BadArtifact, BadJob
from stoker.exporting.version_writer import library_versions, now
from stoker.jobs import Job
from stoker.planning.resolved_job import users_code
from stoker.records import ArtifactSource, Event, FileDigest, Manifest, Proof, dumps
from stoker.records.compression import Compression, RowSplit
from stoker.store import write_atomic
from stoker.store.disk_errors import disk_errors
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
    terms = CompressionTerms(
        max_drop=max_drop,
        batch_sizes=batch_sizes or tuple(sorted({1, settings.max_batch_rows})),
        most_rows=settings.max_batch_rows,
        threads=threads or settings.threads or default_threads(settings.instances or 1),
        seconds=seconds,
    )
    _require_sensible(terms)
    material, chosen = _material(source, job, data, metric, seed)
    cpu = attached_cpu()
    around = CompressionEnvironment(
        clock=time.perf_counter, cpu=cpu.model, fast_dtypes=cpu.fast_dtypes, made_at=now(), libraries=library_versions()
    )
    with TemporaryDirectory(prefix="stoker-prune-") as aside:

        def pruned(course: Examination) -> Sequence[PrunedGraph]:
            from stoker.compressing.pruning import pruned_graphs  # noqa: PLC0415 - likewise
            from stoker.compressing.source_job import pruner_of  # noqa: PLC0415 - loads torch

            pruner = pruner_of(source, job, course, fast_dtypes=cpu.fast_dtypes, proved_on=cpu.model, tell=tell)
            return pruned_graphs(pruner, Path(aside), until=fine_tune, sink=sink)

        return compress_artifact(
            source, material, chosen, terms, around=around, tell=tell, keep=keep_all, prune=pruned if prune else None
        )


def _require_sensible(terms: CompressionTerms) -> None:
    if min(terms.batch_sizes) < 1:
        raise BadJob(f"batch sizes are 1 or more, got {min(terms.batch_sizes)}")
    if not 0 < terms.seconds < float("inf"):
        raise BadJob(f"--seconds {terms.seconds}: wanted a positive number")


def _material(
    source: Artifact, job: Job | None, data: str | Path | None, metric: str | Path | Metric | None, seed: int
) -> tuple[EvaluationData, Metric]:
    """The rows of a search and its metric."""
    manifest = source.manifest
    if data is not None:
        rows = check_fit(read_rows(Path(data), manifest), manifest, str(data))
        if metric is None and rows.targets is not None:
            raise BadJob(
                "there is no metric to keep", remedy="Give one: --metric accuracy, agreement, …, or a Python file."
            )
        chosen = _metric_of("agreement" if metric is None else metric, manifest)
        if rows.targets is None and metric in NAMES and not chosen.is_agreement:
            raise BadJob(
                f"{data} has no array or column {TARGETS[0]!r}, which the metric {chosen.name} needs",
                remedy="Add it, or leave --metric out: answers are then compared with the original's.",
            )
        return split_rows(None, rows, seed=seed, calibration=CALIBRATION_ROWS), chosen
    from stoker.compressing.source_job import job_of, metric_of_job, rows_of_job  # noqa: PLC0415 - loads torch

    with users_code("the job's data", None):
        job = job or job_of(source)
        training, validation = rows_of_job(job, manifest, CALIBRATION_ROWS, MOST_ROWS, seed)
    if metric is None:
        metric = metric_of_job(job) if validation.targets is not None else "agreement"
    chosen = _metric_of(metric, manifest)
    training, validation = (
        check_fit(rows, manifest, what) for rows, what in ((training, "training data"), (validation, "validation data"))
    )
    return split_rows(training, validation, seed=seed, calibration=CALIBRATION_ROWS), chosen


def _metric_of(metric: str | Path | Metric, manifest: Manifest) -> Metric:
    """A metric by name, or out of a Python file."""
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
    return Metric(path.stem, function, bool(getattr(function, "lower_is_better", False)))


RECORD = "compression.json"
"""Every trial of the search, beside the graph that came of it."""

_GOLDEN = "golden.safetensors"


def publish_chosen(source: Artifact, chosen: Contender, record: Compression, model: Path) -> Artifact:
    """Write the chosen candidate as the next version of `model`, with its golden answers and the record of the search.

    Raises:
        BadArtifact: the disk is full, or cannot be written.
    """

    def write(directory: Path, digests: Callable[[], tuple[FileDigest, ...]]) -> Manifest:
        asked = source.golden().inputs
        with disk_errors(directory, "the compressed model", error=BadArtifact, option="-o DIR"):
            for path in (*chosen.made.files, *chosen.made.beside):
                shutil.copyfile(path, directory / path.name)
            save_file(Golden(asked, chosen.engine.run(asked)).as_tensors(), directory / _GOLDEN)
        write_atomic(directory / RECORD, dumps(record) + "\n", what=RECORD, error=BadArtifact)
        tolerance = chosen.trial.tolerance or source.manifest.tolerance
        return dataclasses.replace(
            chosen.manifest,
            graph=chosen.made.graph.name,
            golden=_GOLDEN,
            tolerance=tolerance,
            metrics=_metrics(record, chosen),
            proofs=_proofs(chosen),
            notes=record.notes,
            proved_on=record.proved_on,
            source=ArtifactSource(
                kind="artifact", name=f"{source.manifest.name}/{source.version}", digest=source.digest
            ),
            libraries=record.libraries,
            made_at=record.made_at,
            files=digests(),
        )

    return publish(model, write)


def _metrics(record: Compression, chosen: Contender) -> dict[str, float]:
    """The metric on the rows of acceptance; what was measured of the original does not hold any more."""
    drop = chosen.trial.drop.value if chosen.trial.drop is not None else 0.0
    return {record.metric: record.baseline + (drop if record.lower_is_better else -drop)}


def _proofs(chosen: Contender) -> tuple[Proof, ...]:
    return tuple(Proof(what=gate.what, error=gate.found, limit=gate.limit) for gate in chosen.trial.gates)


Prune = Callable[[Examination], Sequence[PrunedGraph]]
"""Makes smaller networks, trained on, for a model that is searched on this course."""


@dataclass(frozen=True, kw_only=True)
class CompressionEnvironment:
    """What a search does not look up by itself: the clock [s], the machine, the day, the versions of libraries."""

    clock: Callable[[], float]
    cpu: str
    fast_dtypes: Collection[str]
    made_at: str
    libraries: dict[str, str]


@dataclass(frozen=True)
class Compressed:
    """A search's record, and the version it published; None where nothing was better than the original."""

    record: Compression
    artifact: Artifact | None


def compress_artifact(
    source: Artifact,
    material: EvaluationData,
    metric: Metric,
    terms: CompressionTerms,
    *,
    around: CompressionEnvironment,
    tell: Tell,
    keep: Path | None = None,
    prune: Prune | None = None,
) -> Compressed:
    """Look for the fastest form of a model that keeps its metric, and publish it as the model's next version.

    Args:
        source: a model with a batch.
        material: rows to calibrate on, choose by and accept by, as the model takes them.
        metric: what has to be kept.
        terms: how much of it may be lost, for which batch sizes, in which time.
        around: clock, machine and versions.
        tell: told what happens.
        keep: where the graphs of all candidates are kept; None: they are thrown away.
        prune: makes smaller networks that answer as the model does; asked once it is known that there are rows enough
            to judge by, and its time is not the search's.

    Raises:
        BadArtifact: the model cannot be asked or has no batch, or the disk cannot be written.
        BadJob: too few rows to judge by, a metric that cannot be used, or no time to try anything.
    """
    if not source.manifest.is_batched:
        raise BadArtifact(
            f"{source.path} has inputs or outputs that do not begin with the batch, so rows cannot be stacked",
            remedy="Export it with a batch that varies.",
        )
    if keep is not None and keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise BadJob(f"{keep} is not empty", remedy="Name a directory that is not there yet with --keep-all.")
    kind = kind_of(source.graph_path)
    course = Examination(source, material, metric, terms, around.clock)
    with tempfile.TemporaryDirectory(prefix="stoker-compress-") as aside:
        directory = Path(aside) if keep is None else keep
        search = begin_search(course, directory, tell, sums_fit="int8" in around.fast_dtypes)
        pruned: Sequence[PrunedGraph] = ()
        if prune is not None and not kind.quantised:
            pruned, search.started = prune(search.course), around.clock()
        run_search(search, kind, around.fast_dtypes, pruned)
        search.require_tried()
        chosen = search.accept(material.seed)
        record = _record(search, chosen, around, (*search.notes, *_notes(kind, source), *_untried(search)))
        published = None
        if chosen is not search.original:
            published = publish_chosen(source, chosen, record, source.path.parent)
        for one in (search.original, *search.passed):
            one.engine.close()
    return Compressed(record, published)


def _record(
    search: CompressionSearch, chosen: Contender, around: CompressionEnvironment, notes: tuple[str, ...]
) -> Compression:
    course, terms = search.course, search.course.terms
    best = front(search.trials)
    material, source = course.material, course.source
    return Compression(
        source=ArtifactSource(kind="artifact", name=f"{source.manifest.name}/{source.version}", digest=source.digest),
        metric=course.metric.name,
        lower_is_better=course.metric.lower_is_better,
        max_drop=search.bar.allowed,
        confidence=terms.confidence,
        baseline=course.metric.value(search.accepted_scores),
        rows=RowSplit(
            calibration=len(material.calibration), selection=len(material.selection),
            acceptance=len(material.acceptance), seed=material.seed,
        ),
        batch_sizes=terms.batch_sizes,
        threads=terms.threads,
        proved_on=around.cpu,
        trials=tuple(dataclasses.replace(one, on_front=one.name in best) for one in search.trials),
        chosen=chosen.trial.name,
        notes=notes,
        took_s=around.clock() - search.started,
        made_at=around.made_at,
        libraries=around.libraries,
    )  # fmt: skip


def _untried(search: CompressionSearch) -> tuple[str, ...]:
    """What there was no time for, and how much it takes."""
    count = len(search.left_out)
    if not count:
        return ()
    enough = f"--seconds {search.seconds_for(count)} would likely try them all"
    return (f"{count} of {len(search.trials) - 1} candidates were left out for want of time; {enough}",)


def _notes(kind: GraphKind, source: Artifact) -> tuple[str, ...]:
    if kind.quantised:
        made_of = source.manifest.source
        origin = f"; it was made of {made_of.name}, which can be compressed anew" if made_of.kind == "artifact" else ""
        return (f"already quantised (it has {', '.join(kind.quantised)}): it is not quantised again{origin}",)
    return () if kind.heavy else ("no convolution or matrix product: there is nothing to gain in 8 bits",)

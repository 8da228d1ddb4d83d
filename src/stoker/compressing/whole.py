"""A search from its beginning to the version it publishes."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from stoker.artifacts import Artifact
from stoker.compressing.candidates import PrunedGraph
from stoker.compressing.contender import Contender, Course, Terms
from stoker.compressing.graphs import GraphKind, kind_of
from stoker.compressing.judging import front
from stoker.compressing.publishing import publish_chosen
from stoker.compressing.rows import Material
from stoker.compressing.scores import Metric
from stoker.compressing.search import Search, Tell, begin, run
from stoker.errors import BadArtifact, BadJob
from stoker.records import ArtifactSource
from stoker.records.compression import Compression, RowSplit

Prune = Callable[[Course], Sequence[PrunedGraph]]
"""Makes smaller networks, trained on, for a model that is searched on this course."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
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


def compress(
    source: Artifact,
    material: Material,
    metric: Metric,
    terms: Terms,
    *,
    around: Surroundings,
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
    course = Course(source, material, metric, terms, around.clock)
    with tempfile.TemporaryDirectory(prefix="stoker-compress-") as aside:
        directory = Path(aside) if keep is None else keep
        search = begin(course, directory, tell, sums_fit="int8" in around.fast_dtypes)
        pruned: Sequence[PrunedGraph] = ()
        if prune is not None and not kind.quantised:
            pruned, search.started = prune(search.course), around.clock()
        run(search, kind, around.fast_dtypes, pruned)
        search.require_tried()
        chosen = search.accept(material.seed)
        record = _record(search, chosen, around, (*search.notes, *_notes(kind, source), *_untried(search)))
        published = None
        if chosen is not search.original:
            published = publish_chosen(source, chosen, record, source.path.parent)
        for one in (search.original, *search.passed):
            one.engine.close()
    return Compressed(record, published)


def _record(search: Search, chosen: Contender, around: Surroundings, notes: tuple[str, ...]) -> Compression:
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


def _untried(search: Search) -> tuple[str, ...]:
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

"""One candidate through the gates, cheap ones first: made, loaded, sane, good enough on the selection, steady, fast."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from stoker.artifacts.elements import Arrays
from stoker.compressing.candidates import Candidate, Made, Workshop
from stoker.compressing.contender import Contender, Course, gain_of, is_finite_like, latencies_beside, likeness
from stoker.compressing.drops import Scores, corrected, drop_of
from stoker.compressing.invariance import steadiness
from stoker.compressing.judging import MOST_FINALISTS, Judgement, fast_enough, foreseen_bound, selected
from stoker.errors import StokerError
from stoker.records.compression import CompressionTrial, Gate

LEAST_LIKENESS = 0.8
"""Answers whose cosine with the original's is lower have little to do with them, whatever the metric says."""

RACE_SHARE = 0.015
"""Each race takes about this share of the search's time."""


@dataclass(frozen=True)
class Bar:
    """What candidates are held against: the original's answers and scores on the selection, and the drop allowed."""

    answers: Arrays
    scores: Scores
    allowed: float


def reference(course: Course) -> Contender:
    """The model given, as the first contender."""
    source = course.source
    manifest = source.manifest
    trial = CompressionTrial(
        name="original",
        how=f"version {source.version} as it is",
        engine=manifest.engine,
        precision=manifest.precision,
        outcome="reference",
        reason="what the others are held against",
        num_bytes=_engine_bytes(source.graph_path),
        pace=1.0,
        selection_drop=0.0,
        tolerance=manifest.tolerance,
    )
    engine = course.engine_of(manifest, source.graph_path)
    rows = course.material.selection
    found = course.answers(engine, rows)
    scores = course.scores(found, course.with_targets(rows, found))
    return Contender(trial, manifest, Made(source.graph_path, (source.graph_path,)), engine, scores)


def examine(
    candidate: Candidate, course: Course, bar: Bar, rival: Contender, workshop: Workshop, directory: Path
) -> Contender | CompressionTrial:
    """A contender that passed every gate but acceptance, or the record of one that did not.

    Whatever a library raises rejects the candidate, and not the search.
    """
    started = course.clock()
    contender: Contender | None = None
    trial = CompressionTrial(
        name=candidate.name, how=candidate.how, engine=candidate.engine, precision=candidate.precision,
        outcome="rejected", reason="",
    )  # fmt: skip
    try:
        made = candidate.make(workshop, directory)
        trial = dataclasses.replace(trial, num_bytes=made.num_bytes)
        manifest, engine = course.load(candidate, made)
        contender = Contender(trial, manifest, made, engine, bar.scores)
        refusal = _judge(contender, candidate, course, bar, rival)
    except StokerError as error:
        refusal = error.message
    found = trial if contender is None else contender.trial
    found = dataclasses.replace(found, took_s=course.clock() - started, reason=refusal or "")
    if contender is None or refusal is not None:
        if contender is not None:
            contender.engine.close()
        return found
    contender.trial = found
    return contender


def _judge(contender: Contender, candidate: Candidate, course: Course, bar: Bar, rival: Contender) -> str | None:
    """Why a contender is rejected; None if it passes. What was found is written down as far as it got."""
    selection = course.material.selection
    found = course.answers(contender.engine, selection)
    if not is_finite_like(found, bar.answers):
        contender.note(Gate(what="answers that are not finite, or missing", passed=False, found=1, limit=0))
        return "gives answers that are not finite, or of another shape, where the original's are"
    alike = likeness(found, bar.answers)
    contender.note(
        Gate(what="cosine with the original's answers", passed=alike >= LEAST_LIKENESS, found=alike,
             limit=LEAST_LIKENESS)
    )  # fmt: skip
    if alike < LEAST_LIKENESS:
        return f"computes something else: the cosine with the original's answers is {alike:.2f}"
    judged = _by_metric(contender, course, bar, found)
    if not judged.passed:
        return judged.reason
    if (unsteady := _by_batch(contender, course)) is not None:
        return unsteady
    raced = _by_time(contender, candidate, course, rival)
    return None if raced.passed else raced.reason


def _by_metric(contender: Contender, course: Course, bar: Bar, found: Arrays) -> Judgement:
    contender.scores = course.scores(found, course.material.selection)
    rows, confidence = len(course.material.acceptance), corrected(course.terms.confidence, MOST_FINALISTS)
    contender.is_likely = foreseen_bound(bar.scores, contender.scores, rows, confidence) <= bar.allowed
    judged = selected(bar.scores, contender.scores, bar.allowed)
    contender.note(judged.gate, selection_drop=drop_of(bar.scores, contender.scores))
    return judged


def _by_batch(contender: Contender, course: Course) -> str | None:
    """Why a contender's answers depend on their batch; None if they do not, at any size that is served."""
    sizes = course.terms.served_sizes
    steady = steadiness(contender.engine, course.material.selection, contender.manifest, sizes)
    contender.note(*steady.gates(), tolerance=steady.tolerance)
    if not all(gate.passed for gate in steady.gates()):
        return f"an answer depends on its batch: it moves by {100 * steady.share:.2g} % of the outputs' scale"
    excess = course.golden_excess(contender.engine, steady.tolerance)
    what = f"golden answers among {', '.join(map(str, sizes))}, as a share of the tolerance"
    contender.note(Gate(what=what, passed=excess <= 1, found=excess, limit=1.0))
    return None if excess <= 1 else f"a golden answer depends on its batch: {excess:.3g} times what is allowed"


def _by_time(contender: Contender, candidate: Candidate, course: Course, rival: Contender) -> Judgement:
    terms = course.terms
    races = course.races(contender.engine, rival.engine, seconds=RACE_SHARE * terms.seconds)
    gain = gain_of(races, terms.confidence)
    contender.pace = gain.value * rival.pace
    judged = fast_enough(gain, rival.trial.name, is_lossy=candidate.is_lossy)
    contender.note(
        judged.gate, latency_s=latencies_beside(rival.trial.latency_s, races, terms.batch_sizes), speed_up=gain,
        rival=rival.trial.name, pace=contender.pace,
    )  # fmt: skip
    return judged


def _engine_bytes(graph: Path) -> int:
    """What the engine reads [bytes]: the graph, and weights that lie beside it (`model.onnx.data`, `model.bin`)."""
    beside = [graph.with_suffix(".bin")] if graph.suffix == ".xml" else [graph.with_name(f"{graph.name}.data")]
    return sum(path.stat().st_size for path in (graph, *beside) if path.is_file())

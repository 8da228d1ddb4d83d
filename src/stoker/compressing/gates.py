"""The gates that a candidate has to pass, cheap ones first: built, loaded, finite, accurate, batch-invariant, fast.

`examine` puts one candidate through all of them but the last: acceptance (`accepted`) on rows that nothing was chosen
by. Every gate records the measured value and its limit.

Batch invariance: a service stacks requests, so an answer must not depend on its neighbours. Quantised models depend on
them to some extent: kernels of other batch sizes round differently, and "dynamic" scales are taken from the batch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np

from stoker.artifacts.dtypes import Arrays
from stoker.artifacts.golden import absolute_differences, is_filled_in
from stoker.compressing.candidates import BuildContext, BuiltGraph, CompressionCandidate
from stoker.compressing.contender import (
    Contender,
    Examination,
    gain_of,
    interleaved_latencies,
    is_finite_like,
    likeness,
)
from stoker.compressing.rows import EvaluationRows, answers, cut_to, row_lengths
from stoker.compressing.scores import Scores, corrected, drop_interval, drop_of, largest_loss, rows_needed, rows_to_tell
from stoker.engines import Engine
from stoker.errors import BadJob, StokerError
from stoker.records import Manifest, Tolerance
from stoker.records.compression import CompressionTrial, Gate, Interval

LEAST_GAIN_LOSSY = 1.1
"""Least speed-up, at its lower bound, of a pruned or 8-bit candidate over the best lossless one: it costs accuracy."""

LEAST_GAIN_LOSSLESS = 1.0
"""Least speed-up of a lossless candidate, at its lower bound."""

MOST_FINALISTS = 3
"""Candidates that are tested on the rows of acceptance. Each further one lowers the confidence of all."""

LEAST_LIKENESS = 0.8
"""Least cosine with the original's answers, whatever the metric says."""

RACE_SHARE = 0.015
"""Each race takes about this share of the search's time."""


@dataclass(frozen=True)
class Baseline:
    """The original's answers and scores on the rows of selection, and the drop that is allowed."""

    answers: Arrays
    scores: Scores
    allowed: float


def reference(course: Examination) -> Contender:
    """The original model as a contender."""
    source = course.source
    manifest, graph = source.manifest, source.graph_path
    weights = graph.with_suffix(".bin") if graph.suffix == ".xml" else graph.with_name(f"{graph.name}.data")
    trial = CompressionTrial(
        name="original",
        how=f"version {source.version} as it is",
        engine=manifest.engine,
        precision=manifest.precision,
        outcome="reference",
        reason="what the others are held against",
        num_bytes=sum(path.stat().st_size for path in (graph, weights) if path.is_file()),
        pace=1.0,
        selection_drop=0.0,
        tolerance=manifest.tolerance,
    )
    engine = course.engine_of(manifest, graph)
    rows = course.material.selection
    outputs = course.answers(engine, rows)
    scores = course.scores(outputs, course.with_targets(rows, outputs))
    return Contender(trial, manifest, BuiltGraph(graph, (graph,)), engine, scores)


def examine(
    candidate: CompressionCandidate,
    course: Examination,
    bar: Baseline,
    rival: Contender,
    context: BuildContext,
    directory: Path,
) -> Contender | CompressionTrial:
    """A contender that passed every gate but acceptance, or the record of a rejected candidate.

    An error of a library rejects the candidate; the search goes on.
    """
    started = course.clock()
    contender: Contender | None = None
    trial = trial_of(candidate)
    try:
        made = candidate.make(context, directory)
        trial = dataclasses.replace(trial, num_bytes=made.num_bytes)
        manifest, engine = course.load(candidate, made)
        contender = Contender(trial, manifest, made, engine, bar.scores)
        refusal = _judge(contender, candidate, course, bar, rival)
    except StokerError as error:
        refusal = error.message
    if contender is not None:
        trial = contender.trial
    trial = dataclasses.replace(trial, took_s=course.clock() - started, reason=refusal or "")
    if contender is not None and refusal is None:
        contender.trial = trial
        return contender
    if contender is not None:
        contender.engine.close()
    return trial


def trial_of(candidate: CompressionCandidate) -> CompressionTrial:
    """The record of a candidate before anything is known of it: rejected."""
    return CompressionTrial(
        name=candidate.name,
        how=candidate.how,
        engine=candidate.engine,
        precision=candidate.precision,
        outcome="rejected",
        reason="",
    )


def _judge(
    contender: Contender, candidate: CompressionCandidate, course: Examination, bar: Baseline, rival: Contender
) -> str | None:
    """Why a contender is rejected, or None. Gates are recorded as far as it got."""
    selection, terms = course.material.selection, course.terms
    outputs = course.answers(contender.engine, selection)
    if not is_finite_like(outputs, bar.answers):
        contender.note(Gate(what="answers that are not finite, or missing", passed=False, found=1, limit=0))
        return "gives answers that are not finite, or of another shape, where the original's are"
    cosine = likeness(outputs, bar.answers)
    is_like = cosine >= LEAST_LIKENESS
    contender.note(Gate(what="cosine with the original's answers", passed=is_like, found=cosine, limit=LEAST_LIKENESS))
    if not is_like:
        return f"computes something else: the cosine with the original's answers is {cosine:.2f}"

    contender.scores = course.scores(outputs, selection)
    rows, confidence = len(course.material.acceptance), corrected(terms.confidence, MOST_FINALISTS)
    contender.is_likely = foreseen_bound(bar.scores, contender.scores, rows, confidence) <= bar.allowed
    accuracy = selected(bar.scores, contender.scores, bar.allowed)
    contender.note(accuracy.gate, selection_drop=drop_of(bar.scores, contender.scores))
    if not accuracy.passed:
        return accuracy.reason

    if (refusal := _judge_invariance(contender, course)) is not None:
        return refusal

    races = course.races(contender.engine, rival.engine, seconds=RACE_SHARE * terms.seconds)
    gain = gain_of(races, terms.confidence)
    contender.pace = gain.value * rival.pace
    speed = fast_enough(gain, rival.trial.name, is_lossy=candidate.is_lossy)
    latency_s = interleaved_latencies(rival.trial.latency_s, races, terms.batch_sizes)
    contender.note(speed.gate, latency_s=latency_s, speed_up=gain, rival=rival.trial.name, pace=contender.pace)
    return None if speed.passed else speed.reason


def _judge_invariance(contender: Contender, course: Examination) -> str | None:
    """Why a contender is rejected for answers that depend on their batch, at any served size; or None."""
    sizes = course.terms.served_sizes
    steady = batch_invariance(contender.engine, course.material.selection, contender.manifest, sizes)
    contender.note(*steady.gates(), tolerance=steady.tolerance)
    if not all(gate.passed for gate in steady.gates()):
        return f"an answer depends on its batch: it moves by {100 * steady.share:.2g} % of the outputs' scale"
    excess = course.golden_excess(contender.engine, steady.tolerance)
    what = f"golden answers among {', '.join(map(str, sizes))}, as a share of the tolerance"
    contender.note(Gate(what=what, passed=excess <= 1, found=excess, limit=1.0))
    return None if excess <= 1 else f"a golden answer depends on its batch: {excess:.3g} times what is allowed"


@dataclass(frozen=True)
class Judgement:
    """A gate, and the reason to show if it was not passed."""

    gate: Gate
    reason: str

    @property
    def passed(self) -> bool:
        """Whether the gate was passed."""
        return self.gate.passed


def foreseen_bound(original: Scores, candidate: Scores, rows: int, confidence: float) -> float:
    """Upper bound of the drop [in the metric's unit] that `rows` rows of acceptance would likely give."""
    losses = original - candidate
    z = NormalDist().inv_cdf(confidence)
    return float(losses.mean()) + z * float(losses.std()) / math.sqrt(rows) + largest_loss(original, candidate) / rows


def selected(original: Scores, candidate: Scores, allowed: float) -> Judgement:
    """Whether the drop on the rows of selection is within the allowed one, without a confidence bound."""
    drop = float(np.mean(original - candidate))
    what = f"the drop on {len(original)} rows for selection"
    gate = Gate(what=what, passed=drop <= allowed, found=drop, limit=allowed)
    return Judgement(gate, f"loses {drop:.4g} on {len(original)} rows for selection, {allowed:.4g} is allowed")


def fast_enough(gain: Interval, rival: str, *, is_lossy: bool) -> Judgement:
    """Whether a candidate is faster, at the lower bound, than the best that is neither pruned nor in 8 bits."""
    least = LEAST_GAIN_LOSSY if is_lossy else LEAST_GAIN_LOSSLESS
    passed = gain.low > least
    gate = Gate(what=f"how much faster than {rival}, at least", passed=passed, found=gain.low, limit=least)
    return Judgement(
        gate, f"{gain.value:.2f}× as fast as {rival} ({gain.low:.2f} to {gain.high:.2f}), wanted more than {least:g}×"
    )


def accepted(
    original: Scores,
    candidate: Scores,
    *,
    allowed: float,
    confidence: float,
    finalists: int,
    seed: int,
    others: int = 0,
) -> tuple[Interval, Judgement]:
    """The drop on the rows of acceptance, and whether its upper bound is within the allowed one.

    With several finalists each bound has a higher confidence, so that all hold together at `confidence`. `others` are
    the validation rows of other uses, for the advice how many rows to give in all.
    """
    each = corrected(confidence, finalists)
    drop = drop_interval(original, candidate, confidence=each, seed=seed)
    share = f"{100 * each:.1f} %".replace(".0 ", " ")
    gate = Gate(
        what=f"the drop at most, with {share} confidence, on {len(original)} rows for acceptance",
        passed=drop.high <= allowed,
        found=drop.high,
        limit=allowed,
    )
    reason = f"may lose up to {drop.high:.4g} ({drop.value:.4g} on {len(original)} rows), {allowed:.4g} is allowed"
    if drop.value <= allowed and (rows := rows_to_tell(original, candidate, allowed, each)):
        reason += f"; about {rows + others:,} rows in all would tell, {rows:,} of them for acceptance"
    return drop, Judgement(gate, reason)


def require_rows(rows: int, original: Scores, allowed: float, confidence: float, others: int = 0) -> None:
    """Refuse so few rows that not even an unchanged model could pass.

    Args:
        rows: number of acceptance rows.
        original: the original's scores of any rows: their range is the most that a row can lose.
        allowed: the drop that is allowed.
        confidence: of all bounds together.
        others: validation rows of other uses.

    Raises:
        BadJob: there are too few; with the number needed, and the drop that these could show.
    """
    worst, each = largest_loss(original, original), corrected(confidence, MOST_FINALISTS)
    needed = rows_needed(allowed, worst, each)
    if rows < needed:
        could = worst * (1 - (1 - each) ** (1 / rows))
        raise BadJob(
            f"{rows} rows for acceptance cannot show a drop below {allowed:.4g} "
            f"with {100 * confidence:g} % confidence: it takes {needed:,}",
            remedy=f"Give {needed + others:,} validation rows in all, or allow a drop of {1.01 * could:.2g} or more.",
        )


def front(trials: Sequence[CompressionTrial]) -> frozenset[str]:
    """Names of the trials on the Pareto front of size, time and drop; those that were not timed are left out."""
    costs: dict[str, tuple[float, ...]] = {}
    for trial in trials:
        if trial.num_bytes is not None and trial.pace is not None:
            drop = trial.selection_drop or 0.0 if trial.drop is None else trial.drop.value
            costs[trial.name] = (float(trial.num_bytes), 1 / trial.pace, drop)
    return frozenset(
        name
        for name, own in costs.items()
        if not any(other != own and all(a <= b for a, b in zip(other, own, strict=True)) for other in costs.values())
    )


ROWS = 8
"""Rows that are asked alone."""

MARGIN = 4.0
"""The manifest's tolerance is this many times the measured deviation: other rows may deviate more than these."""

FLOOR = 1e-5
"""Least tolerance relative to the outputs' scale: rounding of fp32 sums in another order."""

CEILING = 0.05
"""Largest allowed deviation relative to the outputs' scale (their root mean square)."""


@dataclass(frozen=True)
class BatchInvariance:
    """Largest deviation of an answer in a batch from the answer alone, and the outputs' scale, by output.

    The deviation of an output with answers that are not finite is infinite.
    """

    deviation: dict[str, float]
    scale: dict[str, float]

    @property
    def share(self) -> float:
        """Largest deviation of any output relative to its scale [1]."""
        return max((self.deviation[name] / (self.scale[name] or 1.0) for name in self.deviation), default=0.0)

    @property
    def tolerance(self) -> Tolerance:
        """Allowed difference between two answers to one request."""
        largest = max(self.deviation.values(), default=0.0)
        scale = max(self.scale.values(), default=0.0)
        return Tolerance(absolute=max(MARGIN * largest, FLOOR * scale), relative=1e-4)

    def gates(self) -> tuple[Gate, ...]:
        """The gates of finite answers and of the largest deviation."""
        is_finite = all(map(math.isfinite, self.deviation.values()))
        infinite = 0.0 if is_finite else 1.0
        what = "an answer in a batch from the answer alone, of the outputs' root mean square"
        return (
            Gate(what="answers that are not finite", passed=is_finite, found=infinite, limit=0.0),
            Gate(what=what, passed=self.share <= CEILING, found=self.share, limit=CEILING),
        )


def batch_invariance(engine: Engine, rows: EvaluationRows, manifest: Manifest, sizes: Sequence[int]) -> BatchInvariance:
    """Compare answers to rows alone, each cut to its own length, with those in batches, padded to the longest.

    Args:
        engine: loaded as in a service.
        rows: the first `ROWS` of them are asked, repeated where a batch has more.
        manifest: the model's signature.
        sizes: of batches [rows]; those that are served (`artifacts.served_sizes`).

    Raises:
        ServiceError: the engine could not answer.
    """
    few = rows.first(ROWS)
    alone = []
    for row in range(len(few)):
        single = few.take(np.array([row]))
        alone.append(engine.run(cut_to(single.inputs, manifest, int(row_lengths(single, manifest)[0]))))
    deviation = dict.fromkeys(alone[0], 0.0)
    for size in sizes:
        repeated = few.take(np.arange(max(size, len(few))) % len(few))
        forms = [answers(engine, repeated, manifest, batch=size)]
        if size == max(sizes):  # once more in one batch, in the rows' order, with all of their padding
            forms.append(engine.run({name: np.ascontiguousarray(array) for name, array in repeated.inputs.items()}))
        for row in range(len(repeated)):
            for name, own in alone[row % len(few)].items():
                region = (slice(row, row + 1), *(slice(0, length) for length in own.shape[1:]))
                for form in forms:
                    largest = float(absolute_differences(form[name][region], own).max(initial=0.0))
                    deviation[name] = max(deviation[name], largest)
    scale: dict[str, float] = {}
    for name in deviation:
        values = np.concatenate([outputs[name].ravel() for outputs in alone]).astype(np.float64)
        if not np.isfinite(values).all():
            deviation[name] = math.inf
        values = values[~is_filled_in(np.abs(values))]
        scale[name] = float(np.sqrt(np.mean(np.square(values)))) if len(values) else 0.0
    return BatchInvariance(deviation, scale)

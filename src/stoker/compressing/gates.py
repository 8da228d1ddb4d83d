"""What passes: decisions on measured values, each with the reason in words.

Does a model answer a row alike whatever shares its batch, and however far it is filled up?

A service stacks requests, so a model whose answer depends on its neighbours answers at random. Quantised models do so
to some extent: kernels of other batch sizes round elsewhere, and scales that are taken from the batch itself
("dynamic" quantisation) change with every neighbour.

One candidate through the gates, cheap ones first: made, loaded, sane, good enough on the selection, steady, fast.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.artifacts.dtypes import Arrays
from stoker.artifacts.golden import is_filled_in
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
"""How much faster than the best other candidate one that is pruned or in 8 bits is at least, at the lower bound: it
costs accuracy, and a tenth more speed is what that is worth."""

LEAST_GAIN_LOSSLESS = 1.0
"""Any other candidate is measurably faster, or not worth it."""

MOST_FINALISTS = 3
"""Candidates that are held against the rows of acceptance. Each more takes confidence from all."""


@dataclass(frozen=True)
class Judgement:
    """Whether something passed, the gate it was held against, and what to tell where it did not."""

    gate: Gate
    reason: str

    @property
    def passed(self) -> bool:
        """Whether the gate was passed."""
        return self.gate.passed


def foreseen_bound(original: Scores, candidate: Scores, rows: int, confidence: float) -> float:
    """The bound on the drop that `rows` rows of acceptance would likely give, from those of selection."""
    losses = original - candidate
    z = NormalDist().inv_cdf(confidence)
    return float(losses.mean()) + z * float(losses.std()) / math.sqrt(rows) + largest_loss(original, candidate) / rows


def selected(original: Scores, candidate: Scores, allowed: float) -> Judgement:
    """Whether a candidate keeps within what is allowed on the rows of selection, bounds aside."""
    drop = float(np.mean(original - candidate))
    what = f"the drop on {len(original)} rows for selection"
    gate = Gate(what=what, passed=drop <= allowed, found=drop, limit=allowed)
    return Judgement(gate, f"loses {drop:.4g} on {len(original)} rows for selection, {allowed:.4g} is allowed")


def fast_enough(gain: Interval, rival: str, *, is_lossy: bool) -> Judgement:
    """Whether a candidate is faster than the best that is neither pruned nor in 8 bits, at the lower bound."""
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
    """The drop on rows that nothing was chosen by, and whether it keeps within what is allowed.

    With several finalists each bound holds at a higher confidence, so that all hold together at `confidence`. `others`
    are the validation rows that other uses take, for how many to give in all.
    """
    each = corrected(confidence, finalists)
    drop = drop_interval(original, candidate, confidence=each, seed=seed)
    share = f"{100 * each:.1f} %".replace(".0 ", " ")
    gate = Gate(
        what=f"the drop at most, with {share} confidence, on {len(original)} rows for acceptance",
        passed=drop.high <= allowed, found=drop.high, limit=allowed,
    )  # fmt: skip
    reason = f"may lose up to {drop.high:.4g} ({drop.value:.4g} on {len(original)} rows), {allowed:.4g} is allowed"
    if drop.value <= allowed and (rows := rows_to_tell(original, candidate, allowed, each)):
        reason += f"; about {rows + others:,} rows in all would tell, {rows:,} of them for acceptance"
    return drop, Judgement(gate, reason)


def require_rows(rows: int, original: Scores, allowed: float, confidence: float, others: int = 0) -> None:
    """Refuse to judge by so few rows that not even a model that changes nothing could pass.

    Args:
        rows: those of acceptance.
        original: the original's scores, of any rows: how far they lie apart is the most that a row can lose.
        allowed: the drop that is allowed.
        confidence: of all bounds together.
        others: validation rows that other uses take.

    Raises:
        BadJob: they are too few; says how many it takes, and what these could show.
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
    """Names of the trials that no other beats: as good or better in size, pace and metric, and better in one.

    Those that were rejected before they were timed take no part.
    """
    measured = {
        one.name: (float(one.num_bytes), 1 / one.pace, _drop(one))
        for one in trials
        if one.num_bytes is not None and one.pace is not None
    }
    return frozenset(
        name
        for name, own in measured.items()
        if not any(_beats(other, own) for rival, other in measured.items() if rival != name)
    )


def _drop(trial: CompressionTrial) -> float:
    if trial.drop is not None:
        return trial.drop.value
    return trial.selection_drop or 0.0


def _beats(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return all(a <= b for a, b in zip(one, other, strict=True)) and one != other


ROWS = 8
"""Rows that are asked alone."""

MARGIN = 4.0
"""The manifest's tolerance is so many times the deviation found: some rows of many deviate more than ROWS showed."""

FLOOR = 1e-5
"""The tolerance is at least so much of the outputs' scale: rounding of fp32 sums in another order."""

CEILING = 0.05
"""The most that an answer may deviate, of the outputs' scale (their root mean square)."""


@dataclass(frozen=True)
class BatchInvariance:
    """The largest deviation of an answer in company from the same answer alone, and the outputs' scale, by output."""

    deviation: dict[str, float]
    scale: dict[str, float]
    is_finite: bool

    @property
    def share(self) -> float:
        """The largest deviation of any output, in its scale."""
        return max((self.deviation[name] / (self.scale[name] or 1.0) for name in self.deviation), default=0.0)

    @property
    def tolerance(self) -> Tolerance:
        """What two answers to one request may differ by."""
        largest = max(self.deviation.values(), default=0.0)
        scale = max(self.scale.values(), default=0.0)
        return Tolerance(absolute=max(MARGIN * largest, FLOOR * scale), relative=1e-4)

    def gates(self) -> tuple[Gate, ...]:
        """Finite, and steady enough."""
        infinite = 0.0 if self.is_finite else 1.0
        what = "an answer in a batch from the answer alone, of the outputs' root mean square"
        return (
            Gate(what="answers that are not finite", passed=self.is_finite, found=infinite, limit=0.0),
            Gate(what=what, passed=self.share <= CEILING, found=self.share, limit=CEILING),
        )


def batch_invariance(engine: Engine, rows: EvaluationRows, manifest: Manifest, sizes: Sequence[int]) -> BatchInvariance:
    """Ask some rows alone, each cut to its own length, and the same in batches, filled up to the longest.

    Args:
        engine: loaded as a service would.
        rows: the first `ROWS` of them are asked, repeated where a batch has more.
        manifest: what the model takes.
        sizes: of batches [rows]; those that are served (`artifacts.served_sizes`).

    Raises:
        ServiceError: the engine could not.
    """
    few = rows.take(np.arange(min(ROWS, len(rows))))
    alone = [_alone(engine, few, manifest, row) for row in range(len(few))]
    deviation = dict.fromkeys(alone[0], 0.0)
    for size in sizes:
        repeated = few.take(np.arange(max(size, len(few))) % len(few))
        forms = [answers(engine, repeated, manifest, batch=size)]
        if size == max(sizes):
            forms.append(_at_full_length(engine, repeated))
        for row in range(len(repeated)):
            for name, one in alone[row % len(few)].items():
                region = (slice(row, row + 1), *(slice(0, length) for length in one.shape[1:]))
                for other in forms:
                    deviation[name] = max(deviation[name], _max_difference(other[name][region], one))
    stacked = {name: np.concatenate([one[name].ravel() for one in alone]).astype(np.float64) for name in deviation}
    scale = {name: _root_mean_square(values) for name, values in stacked.items()}
    finite = all(np.isfinite(values).all() for values in stacked.values()) and all(map(np.isfinite, deviation.values()))
    return BatchInvariance(deviation, scale, bool(finite))


def _root_mean_square(values: NDArray[np.float64]) -> float:
    """The scale of an output's values; what the model fills in does not count."""
    told = values[~is_filled_in(np.abs(values))]
    return float(np.sqrt(np.mean(np.square(told)))) if len(told) else 0.0


def _max_difference(one: NDArray[Any], other: NDArray[Any]) -> float:
    """The largest difference; infinite where one of them alone is not finite."""
    a, b = one.astype(np.float64), other.astype(np.float64)
    with np.errstate(invalid="ignore"):
        apart = np.where(a == b, 0.0, np.abs(a - b))
    return float(np.max(np.nan_to_num(apart, nan=np.inf), initial=0.0))


def _alone(engine: Engine, rows: EvaluationRows, manifest: Manifest, row: int) -> Arrays:
    one = rows.take(np.array([row]))
    return engine.run(cut_to(one.inputs, manifest, int(row_lengths(one, manifest)[0])))


def _at_full_length(engine: Engine, rows: EvaluationRows) -> Arrays:
    """Answers in one batch, in the rows' order, without cutting what they are filled up with."""
    return engine.run({name: np.ascontiguousarray(array) for name, array in rows.inputs.items()})


LEAST_LIKENESS = 0.8
"""Answers whose cosine with the original's is lower have little to do with them, whatever the metric says."""

RACE_SHARE = 0.015
"""Each race takes about this share of the search's time."""


@dataclass(frozen=True)
class Baseline:
    """What candidates are held against: the original's answers and scores on the selection, and the drop allowed."""

    answers: Arrays
    scores: Scores
    allowed: float


def reference(course: Examination) -> Contender:
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
    return Contender(trial, manifest, BuiltGraph(source.graph_path, (source.graph_path,)), engine, scores)


def examine(
    candidate: CompressionCandidate,
    course: Examination,
    bar: Baseline,
    rival: Contender,
    workshop: BuildContext,
    directory: Path,
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


def _judge(
    contender: Contender, candidate: CompressionCandidate, course: Examination, bar: Baseline, rival: Contender
) -> str | None:
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


def _by_metric(contender: Contender, course: Examination, bar: Baseline, found: Arrays) -> Judgement:
    contender.scores = course.scores(found, course.material.selection)
    rows, confidence = len(course.material.acceptance), corrected(course.terms.confidence, MOST_FINALISTS)
    contender.is_likely = foreseen_bound(bar.scores, contender.scores, rows, confidence) <= bar.allowed
    judged = selected(bar.scores, contender.scores, bar.allowed)
    contender.note(judged.gate, selection_drop=drop_of(bar.scores, contender.scores))
    return judged


def _by_batch(contender: Contender, course: Examination) -> str | None:
    """Why a contender's answers depend on their batch; None if they do not, at any size that is served."""
    sizes = course.terms.served_sizes
    steady = batch_invariance(contender.engine, course.material.selection, contender.manifest, sizes)
    contender.note(*steady.gates(), tolerance=steady.tolerance)
    if not all(gate.passed for gate in steady.gates()):
        return f"an answer depends on its batch: it moves by {100 * steady.share:.2g} % of the outputs' scale"
    excess = course.golden_excess(contender.engine, steady.tolerance)
    what = f"golden answers among {', '.join(map(str, sizes))}, as a share of the tolerance"
    contender.note(Gate(what=what, passed=excess <= 1, found=excess, limit=1.0))
    return None if excess <= 1 else f"a golden answer depends on its batch: {excess:.3g} times what is allowed"


def _by_time(contender: Contender, candidate: CompressionCandidate, course: Examination, rival: Contender) -> Judgement:
    terms = course.terms
    races = course.races(contender.engine, rival.engine, seconds=RACE_SHARE * terms.seconds)
    gain = gain_of(races, terms.confidence)
    contender.pace = gain.value * rival.pace
    judged = fast_enough(gain, rival.trial.name, is_lossy=candidate.is_lossy)
    contender.note(
        judged.gate, latency_s=interleaved_latencies(rival.trial.latency_s, races, terms.batch_sizes), speed_up=gain,
        rival=rival.trial.name, pace=contender.pace,
    )  # fmt: skip
    return judged


def _engine_bytes(graph: Path) -> int:
    """What the engine reads [bytes]: the graph, and weights that lie beside it (`model.onnx.data`, `model.bin`)."""
    beside = [graph.with_suffix(".bin")] if graph.suffix == ".xml" else [graph.with_name(f"{graph.name}.data")]
    return sum(path.stat().st_size for path in (graph, *beside) if path.is_file())

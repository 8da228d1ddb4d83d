"""The search: candidates in turn, each through the gates; the best are accepted on rows that nothing was chosen by.

Time-boxed: a candidate is not begun if it would likely end after the time is over, with a reserve for acceptance. It is
finished once begun, so a search may take longer by about one candidate. Whenever it ends, the best so far is known.

An int8 candidate that loses too much is repaired: `rank` finds the layers that do the damage, and `repaired` puts back
as few as possible; see `openvino_candidates`.
"""

from __future__ import annotations

import dataclasses
import math
import re
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from stoker.artifacts.dtypes import Arrays
from stoker.compressing import onnxruntime_candidates, openvino_candidates
from stoker.compressing.candidates import (
    BuildContext,
    BuiltGraph,
    CompressionCandidate,
    GraphKind,
    PrunedGraph,
    forms_of,
)
from stoker.compressing.contender import Contender, Examination, gain_of, interleaved_latencies, latencies
from stoker.compressing.gates import (
    MOST_FINALISTS,
    RACE_SHARE,
    Baseline,
    accepted,
    examine,
    reference,
    require_rows,
    trial_of,
)
from stoker.compressing.openvino_candidates import LayerGroup, grouped, points_of, shares, undone
from stoker.compressing.rows import EvaluationRows
from stoker.compressing.scores import Scores, are_own_answers, corrected, largest_loss, likeness_of, rows_needed
from stoker.errors import BadArtifact, BadJob, StokerError
from stoker.records import EngineName, ServingPrecision
from stoker.records.compression import CompressionTrial
from stoker.store.disk_errors import disk_errors
from stoker.units import format_seconds

_STYLES: dict[openvino_candidates.Style, str] = {
    "smooth": "static, SmoothQuant, bias correction (NNCF)",
    "mixed": "static, extremes, zero points for activations, bias correction (NNCF)",
    "plain": "static, extremes, zero points for activations (NNCF)",
    "percentile": "static, extremes without outliers, bias correction (NNCF)",
    "min-max": "static, symmetric extremes, bias correction (NNCF)",
}
_HALVES: tuple[ServingPrecision, ...] = ("bf16", "fp16")
"""fp16 is more precise than bf16 but ends at 65,504: larger values become infinite, which the search rejects."""
_EFFORTS: dict[onnxruntime_candidates.CalibrationMethod, float] = {"MinMax": 1.0, "Percentile": 4.0, "Entropy": 6.0}
"""Relative time: histograms of all activations take several times as long as their extremes."""
_UNCHANGED = (
    CompressionCandidate("fp32 openvino", "as it is", "openvino", "fp32", openvino_candidates.as_it_is),
    CompressionCandidate("fp32 onnxruntime", "as it is", "onnxruntime", "fp32", onnxruntime_candidates.as_it_is),
)


def candidates_for(
    kind: GraphKind, fast_dtypes: Collection[str], given: tuple[EngineName, ServingPrecision]
) -> tuple[CompressionCandidate, ...]:
    """Candidates in the order to try them; of those in 8 bits the most promising is the first.

    Args:
        kind: the graph's operators; a quantised graph is not quantised again, nor computed in 16 bits.
        fast_dtypes: dtypes that the device multiplies natively.
        given: engine and precision of the original, which is not tried again as it is.
    """
    if kind.quantised:
        return ()
    candidates: list[CompressionCandidate] = []
    for precision in _HALVES:
        if precision in fast_dtypes and given[1] == "fp32":
            name, how = f"{precision} openvino", f"computed in {precision}, weights stored in fp16"
            candidates.append(CompressionCandidate(name, how, "openvino", precision, openvino_candidates.halved))
    candidates += [form for form in _UNCHANGED if (form.engine, form.precision) != given]
    if not kind.heavy:
        return tuple(candidates)
    rest: ServingPrecision = "int8+bf16" if "bf16" in fast_dtypes else "int8"
    for style, how in _STYLES.items():
        if style != "smooth" or kind.has_attention:
            make = partial(openvino_candidates.quantised, style=style)
            candidates.append(CompressionCandidate(f"int8 {style}", how, "openvino", rest, make))
    if not kind.has_convolutions:  # in convolutions, scales taken in each batch are slower than fp32
        how = "scales of activations taken in each batch (ONNX Runtime)"
        dynamic = onnxruntime_candidates.dynamic
        candidates.append(CompressionCandidate("int8 dynamic", how, "onnxruntime", "int8", dynamic))
    for calibration, effort in _EFFORTS.items():
        name, how = f"int8 qdq {calibration.lower()}", f"static, {calibration.lower()} calibration (ONNX Runtime)"
        make = partial(onnxruntime_candidates.static, calibration=calibration)
        candidates.append(CompressionCandidate(name, how, "onnxruntime", "int8", make, effort))
    return tuple(candidates)


def as_given(given: tuple[EngineName, ServingPrecision]) -> tuple[CompressionCandidate, ...]:
    """The original's form, for other graphs; none if no unchanged candidate has its engine and precision."""
    return tuple(form for form in _UNCHANGED if (form.engine, form.precision) == given)


Tell = Callable[[str], None]
"""Receives progress, a line at a time."""

SELECTION_SHARE, ACCEPTANCE_SHARE, CALIBRATION_SHARE = 0.02, 0.1, 0.01
"""Largest share of the search's time in which the original answers all rows of a part, beyond the fewest rows.
A quantiser runs each calibration row several times, and keeps every activation."""

FEWEST_ROWS, FEWEST_CALIBRATION_ROWS = 200, 48

_CALIBRATION_PASSES = 4
"""Expected passes of a quantiser over the calibration rows, before any has been timed."""

_RANKING_SHARE = 0.25
"""Share of the remaining time for ranking layers."""


@dataclass
class CompressionSearch:
    """The state of a search: contenders that passed, records of the rejected, and the rival to beat."""

    course: Examination
    context: BuildContext
    directory: Path
    tell: Tell
    started: float
    bar: Baseline
    original: Contender
    rival: Contender
    row_s: float = 0.0
    """The original's time for a row [s], in the largest batches."""
    notes: tuple[str, ...] = ()
    passed: list[Contender] = field(default_factory=list)
    rejected: list[CompressionTrial] = field(default_factory=list)
    graphs: dict[str, Path] = field(default_factory=dict)
    """Graphs of OpenVINO's candidates by name, which can be repaired."""
    left_out: dict[str, float] = field(default_factory=dict)
    """Candidates that there was no time for, and the expected time of each [s]."""
    accepted_scores: Scores = field(default_factory=lambda: np.zeros(1))
    """The original's scores on the rows of acceptance, once known."""

    @property
    def left_s(self) -> float:
        """Time for more candidates [s], without the reserve for acceptance."""
        return self.course.terms.seconds - (self.course.clock() - self.started) - self._acceptance_s

    @property
    def trials(self) -> tuple[CompressionTrial, ...]:
        """All records, the original's first."""
        return (self.original.trial, *(contender.trial for contender in self.passed), *self.rejected)

    def consider(self, candidate: CompressionCandidate) -> bool:
        """Examine a candidate if there is time; returns whether it passed."""
        expected_s = self._expected_s(candidate)
        if self.left_s < expected_s:
            self.left_out[candidate.name] = expected_s
            left = format_seconds(self.left_s) if self.left_s > 0 else "nothing"
            reason = f"it takes about {format_seconds(expected_s)}, and {left} was left after the time for acceptance"
            self._reject(dataclasses.replace(trial_of(candidate), outcome="left out", reason=reason))
            return False
        self.tell(f"trying {candidate.name}: {candidate.how}")
        directory = self.directory / re.sub(r"[^a-z0-9]+", "-", candidate.name)
        with disk_errors(directory, "a candidate", error=BadArtifact, option="-o DIR"):
            directory.mkdir(parents=True)
        result = examine(candidate, self.course, self.bar, self.rival, self.context, directory)
        if (graph := directory / "model.xml").is_file():
            self.graphs[candidate.name] = graph
        if isinstance(result, CompressionTrial):
            self._reject(result)
            return False
        self.passed.append(result)
        self.tell(f"{candidate.name}: passed, {result.pace:.2f}× as fast as the original")
        if not candidate.is_lossy and result.pace > self.rival.pace:
            self.rival = result
        return True

    def repair(self, broken: CompressionCandidate) -> None:
        """Put back layers of a candidate that loses too much, or likely does; else do nothing."""
        graph = self.graphs.get(broken.name)
        if graph is None or not self._may_be_repaired(broken.name) or self.left_s <= 0:
            return
        self.tell(f"ranking the layers of {broken.name}")
        until = self.course.clock() + _RANKING_SHARE * self.left_s
        try:
            ranking = rank(self.course, broken, graph, until=until)
        except StokerError as error:
            self.tell(f"{broken.name} cannot be repaired: {error.message}")
            return
        for candidate in repaired(broken, graph, ranking):
            self.consider(candidate)
            if not self._may_be_repaired(candidate.name):
                return

    def accept(self, seed: int) -> Contender:
        """The fastest contender whose drop on the rows of acceptance is within the allowed one, or the original.

        Raises:
            ServiceError: the original no longer answers.
        """
        finalists = sorted(self.passed, key=lambda own: (not own.is_likely, -own.pace))[:MOST_FINALISTS]
        if self.rival is not self.original and self.rival not in finalists:
            finalists[-1] = self.rival  # if every finalist in 8 bits fails, the best lossless one may be accepted
        rows, held = self.course.material.acceptance, list[Contender]()
        self.tell(f"accepting on {len(rows)} rows: {', '.join(own.trial.name for own in finalists) or 'no candidate'}")
        answers = self.course.answers(self.original.engine, rows)
        rows = self.course.with_targets(rows, answers)
        scores = self.accepted_scores = self.course.scores(answers, rows)
        for finalist in finalists:
            try:
                own_scores = self.course.scores(self.course.answers(finalist.engine, rows), rows)
            except StokerError as error:
                finalist.note(outcome="rejected", reason=error.message)
                continue
            drop, judged = accepted(
                scores,
                own_scores,
                allowed=self.bar.allowed,
                confidence=self.course.terms.confidence,
                finalists=len(finalists),
                seed=seed,
                others=self.course.material.num_others,
            )
            outcome = "passed" if judged.passed else "rejected"
            finalist.note(judged.gate, drop=drop, outcome=outcome, reason=judged.reason)
            if judged.passed and finalist.pace > self.original.pace:
                held.append(finalist)

        chosen = self._fastest(held)
        for contender in self.passed:
            if contender not in finalists:
                reason = "slower than those that were held against the rows of acceptance, or less sure"
                contender.note(outcome="passed", reason=reason)
            elif contender.trial.outcome == "passed" and contender is not chosen:
                contender.note(reason=f"{chosen.trial.name} is faster")
        if chosen is not self.original:
            chosen.note(outcome="chosen", reason=f"the fastest that keeps within {self.bar.allowed:.4g}")
        return chosen

    def _fastest(self, held: Sequence[Contender]) -> Contender:
        """The fastest accepted contender, by races between them: before, each was timed at another moment.

        Paces and latencies are updated from these races, so that the fastest is the fastest in the record too.
        """
        terms, ranked = self.course.terms, sorted(held, key=lambda own: -own.pace)
        best = ranked[0] if ranked else self.original
        for contender in ranked[1:]:
            races = self.course.races(contender.engine, best.engine, seconds=RACE_SHARE * terms.seconds)
            contender.pace = best.pace * gain_of(races, terms.confidence).value
            latency_s = interleaved_latencies(best.trial.latency_s, races, terms.batch_sizes)
            contender.note(pace=contender.pace, latency_s=latency_s)
            best = max(best, contender, key=lambda own: own.pace)
        return best

    def _may_be_repaired(self, name: str) -> bool:
        """Whether putting back more layers may help: it loses too much to be accepted, or likely does."""
        is_unlikely = any(own.trial.name == name and not own.is_likely for own in self.passed)
        failed = (trial for trial in self.rejected if trial.name == name and trial.outcome == "rejected")
        return is_unlikely or any(trial.gates and trial.speed_up is None for trial in failed)

    def _reject(self, trial: CompressionTrial) -> None:
        self.rejected.append(trial)
        self.tell(f"{trial.name}: {trial.reason}")

    def _expected_s(self, candidate: CompressionCandidate) -> float:
        """Expected time of a candidate [s]: at the original's pace, or as the longest of its kind so far."""
        material, terms = self.course.material, self.course.terms
        rows = len(material.selection) + sum(terms.served_sizes)
        if candidate.is_reduced:
            rows += _CALIBRATION_PASSES * len(material.calibration)
        same_kind = [trial for trial in self.trials[1:] if trial.precision.startswith("int8") == candidate.is_reduced]
        longest_s = max((trial.took_s for trial in same_kind), default=0.0)
        return candidate.effort * max(longest_s, rows * self.row_s + RACE_SHARE * terms.seconds)

    @property
    def _acceptance_s(self) -> float:
        """Expected time of acceptance [s]: the original, the finalists so far, and one more that may come."""
        paces = sorted((own.pace for own in self.passed), reverse=True)[: MOST_FINALISTS - 1]
        passes = 2 + sum(1 / pace for pace in paces)
        return len(self.course.material.acceptance) * self.row_s * passes

    def require_tried(self) -> None:
        """Refuse to judge if there was no time to try anything.

        Raises:
            BadJob: every candidate was left out; with the time that it takes.
        """
        if not self.left_out or self.passed or len(self.rejected) > len(self.left_out):
            return
        seconds, spent_s = self.course.terms.seconds, self.course.clock() - self.started
        raise BadJob(
            f"Nothing was tried: of --seconds {seconds:g} it took {spent_s:.0f} s to ask the original and set up, "
            f"{self._acceptance_s:.0f} s are kept for acceptance, and the first candidate takes about "
            f"{next(iter(self.left_out.values())):.0f} s",
            remedy=f"Give --seconds {self.seconds_for(1)} or more; all {len(self.left_out)} candidates take about "
            f"{self.seconds_for(len(self.left_out))}.",
        )

    def seconds_for(self, count: int) -> int:
        """Expected time of a search that also tries `count` of the candidates that were left out [s]."""
        spent_s = self.course.clock() - self.started
        more_s = sum(list(self.left_out.values())[:count])
        return math.ceil(1.1 * (spent_s + more_s + self._acceptance_s))


def begin_search(course: Examination, directory: Path, tell: Tell, *, sums_fit: bool = True) -> CompressionSearch:
    """Run the original on the rows of selection, and refuse too few rows to judge by.

    Rows that there would be no time for are left out; for `sums_fit` see `BuildContext`.

    Raises:
        BadJob: too few rows, or a metric that cannot be used.
        BadArtifact, ServiceError: the original cannot be run.
    """
    started, terms = course.clock(), course.terms
    course.metric.allowed(terms.max_drop, 1.0)
    material = course.material.limited(selection=FEWEST_ROWS, acceptance=1, calibration=1)
    few = dataclasses.replace(course, material=material)
    original = reference(few)
    latency_s = latencies(few.solo(original.engine), terms.batch_sizes)
    original.note(latency_s=latency_s)
    largest = max(latency_s, key=int)
    in_time = terms.seconds / (latency_s[largest] / int(largest))  # rows that the original answers in all the time
    _require_other_targets(few, original)
    allowed = course.metric.allowed(terms.max_drop, course.metric.value(original.scores))
    confidence = corrected(terms.confidence, MOST_FINALISTS)
    needed = rows_needed(allowed, largest_loss(original.scores, original.scores), confidence)
    material = course.material.limited(
        selection=max(FEWEST_ROWS, int(SELECTION_SHARE * in_time)),
        acceptance=max(2 * needed, int(ACCEPTANCE_SHARE * in_time)),
        calibration=max(FEWEST_CALIBRATION_ROWS, int(CALIBRATION_SHARE * in_time)),
    )
    asked = course.clock()
    outputs = course.answers(original.engine, material.selection)
    row_s = (course.clock() - asked) / len(material.selection)
    material = dataclasses.replace(material, selection=course.with_targets(material.selection, outputs))
    course = dataclasses.replace(course, material=material)
    original.scores = course.scores(outputs, material.selection)
    require_rows(len(material.acceptance), original.scores, allowed, terms.confidence, material.num_others)
    context = BuildContext(course.source, material.calibration, sums_fit)
    bar, notes = Baseline(outputs, original.scores, allowed), tuple[str, ...]()
    if course.metric.is_agreement:
        labels, version = course.source.manifest.labels, course.source.version
        kinds = (f"{name}: {likeness_of(name, array, labels)}" for name, array in outputs.items())
        basis = f"judged by agreement with the answers of version {version}, not by targets ({'; '.join(kinds)})"
        notes = (f"{basis}: it says how far answers changed, not whether they are right",)
    return CompressionSearch(course, context, directory, tell, started, bar, original, original, row_s, notes)


def _require_other_targets(course: Examination, original: Contender) -> None:
    """Refuse a drop as a share of an error, if the targets are the original's own answers: the error is 0.

    Raises:
        BadJob: they are.
    """
    metric, rows, max_drop = course.metric, course.material.selection, course.terms.max_drop
    if not (metric.lower_is_better and max_drop.strip().endswith("%")):
        return
    if are_own_answers(course.answers(original.engine, rows), rows.targets):
        raise BadJob(
            f"the targets are the original's own answers: its {metric.name} on them is "
            f"{metric.value(original.scores):.2g}, and {max_drop} of that allows nothing",
            remedy="Leave the target out, or give --metric agreement: answers are then compared with the original's. "
            f"Or give --max-drop as a number in the unit of {metric.name}.",
        )


def run_search(
    search: CompressionSearch, kind: GraphKind, fast_dtypes: Collection[str], pruned: Sequence[PrunedGraph] = ()
) -> None:
    """Examine every candidate; if the most promising in 8 bits loses too much, repair it at once.

    Pruned networks come right after it: they took longest to make, and should not be left out for want of time.
    """
    manifest = search.original.manifest
    given = (manifest.engine, manifest.precision)
    candidates = candidates_for(kind, fast_dtypes, given)
    first = next((i for i, candidate in enumerate(candidates) if candidate.is_reduced), len(candidates) - 1)
    for candidate in candidates[: first + 1]:
        search.consider(candidate)
        if candidate.is_reduced:
            search.repair(candidate)
    for network in pruned:
        paces = {form.name: 1.0 for form in as_given(given)} | {own.trial.name: own.pace for own in search.passed}
        for candidate in forms_of(network, (*as_given(given), *candidates[: first + 1]), paces):
            search.consider(candidate)
    for candidate in candidates[first + 1 :]:
        search.consider(candidate)


ROWS = 16
"""Calibration rows for ranking."""

MOST_GROUPS = 24


def rank(course: Examination, broken: CompressionCandidate, graph: Path, *, until: float) -> tuple[LayerGroup, ...]:
    """Undo each group of points alone, and sort the groups, the most harmful first, by the distance of the answers.

    Groups that there was no time for, by the clock's `until` [s], come last in the graph's order.

    Raises:
        StokerError: the graph cannot be read.
    """
    rows = course.material.calibration.first(ROWS)
    engine = course.engine_of(course.source.manifest, course.source.graph_path)
    original = course.answers(engine, rows)
    engine.close()
    groups = grouped(points_of(graph), MOST_GROUPS)
    errors: dict[LayerGroup, float] = {}
    for group in groups:
        if course.clock() > until:
            break
        with tempfile.TemporaryDirectory() as directory:
            errors[group] = _error(course, broken, undone(graph, Path(directory), group), rows, original)
    ranked = sorted(errors, key=errors.__getitem__)
    return (*ranked, *(group for group in groups if group not in errors))


def repaired(
    broken: CompressionCandidate, graph: Path, ranking: Sequence[LayerGroup]
) -> Iterator[CompressionCandidate]:
    """Candidates with more and more of the worst groups put back."""
    for count in shares(ranking):
        points = tuple(point for group in ranking[:count] for point in group)

        def make(_context: BuildContext, directory: Path, points: tuple[str, ...] = points) -> BuiltGraph:
            return undone(graph, directory, points)

        total = sum(map(len, ranking))
        how = f"{broken.how}; activations of the {len(points)} worst of {total} points not quantised"
        yield dataclasses.replace(broken, name=f"{broken.name}, {len(points)} put back", how=how, make=make)


def _error(
    course: Examination, candidate: CompressionCandidate, made: BuiltGraph, rows: EvaluationRows, original: Arrays
) -> float:
    """Mean squared error of the answers, relative to the original's mean square per output; infinite if it fails."""
    try:
        _, engine = course.load(candidate, made)
        outputs = course.answers(engine, rows)
        engine.close()
    except StokerError:
        return float("inf")
    total = 0.0
    for name, expected in original.items():
        scale = float(np.mean(np.square(expected, dtype=np.float64))) or 1.0
        total += float(np.mean(np.square(outputs[name].astype(np.float64) - expected))) / scale
    return total if np.isfinite(total) else float("inf")

"""Which candidates suit a graph and a machine, cheap ones first.

The search: candidates in turn, each through the gates; the best of them against rows that nothing was chosen by.

Time-boxed: a candidate is not begun if it would likely end after the time is over, and enough is kept for acceptance.
What was begun is finished, so a search may take longer by about one candidate. Whenever it ends, the best so far is
known.

Which layers of an int8 candidate do the damage, and how few must be put back.
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
from stoker.compressing.gates import MOST_FINALISTS, RACE_SHARE, Baseline, accepted, examine, reference, require_rows
from stoker.compressing.openvino_candidates import LayerGroup, grouped, points_of, shares, undone
from stoker.compressing.rows import EvaluationRows
from stoker.compressing.scores import Scores, are_own_answers, largest_loss, likeness_of, rows_needed
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
"""fp16 is finer than bf16 and ends at 65,504: what is larger becomes infinite, and the search refuses that."""
_EFFORTS: dict[onnxruntime_candidates.CalibrationMethod, float] = {"MinMax": 1.0, "Percentile": 4.0, "Entropy": 6.0}
"""Histograms of all activations take several times as long as their extremes."""


def candidates_for(
    kind: GraphKind, fast_dtypes: Collection[str], given: tuple[EngineName, ServingPrecision]
) -> tuple[CompressionCandidate, ...]:
    """What to try, in this order; the most promising in 8 bits is the first of those.

    Args:
        kind: what the graph is made of; a quantised one is not quantised again, nor computed in 16 bits.
        fast_dtypes: what the device multiplies natively.
        given: engine and precision of the model given, which is not tried again as it is.
    """
    others = tuple(one for one in _as_they_are() if (one.engine, one.precision) != given)
    if kind.quantised:
        return ()
    halves = tuple(_half(one) for one in _HALVES if one in fast_dtypes and given[1] == "fp32")
    if not kind.heavy:
        return (*halves, *others)
    styles = [style for style in _STYLES if style != "smooth" or kind.has_attention]
    # In convolutions, scales taken in each batch are slower than fp32.
    dynamic = () if kind.has_convolutions else (_dynamic(),)
    rest: ServingPrecision = "int8+bf16" if "bf16" in fast_dtypes else "int8"
    return (*halves, *others, *(_static(style, rest) for style in styles), *dynamic, *map(_qdq, _EFFORTS))


def as_given(given: tuple[EngineName, ServingPrecision]) -> tuple[CompressionCandidate, ...]:
    """The form that the model given is in, for other graphs than its own; none where no engine's is like it."""
    return tuple(one for one in _as_they_are() if (one.engine, one.precision) == given)


def _as_they_are() -> tuple[CompressionCandidate, ...]:
    return (
        CompressionCandidate("fp32 openvino", "as it is", "openvino", "fp32", openvino_candidates.as_it_is),
        CompressionCandidate("fp32 onnxruntime", "as it is", "onnxruntime", "fp32", onnxruntime_candidates.as_it_is),
    )


def _half(precision: ServingPrecision) -> CompressionCandidate:
    how = f"computed in {precision}, weights stored in fp16"
    return CompressionCandidate(f"{precision} openvino", how, "openvino", precision, openvino_candidates.halved)


def _static(style: openvino_candidates.Style, precision: ServingPrecision) -> CompressionCandidate:
    make = partial(openvino_candidates.quantised, style=style)
    return CompressionCandidate(f"int8 {style}", _STYLES[style], "openvino", precision, make)


def _dynamic() -> CompressionCandidate:
    how = "scales of activations taken in each batch (ONNX Runtime)"
    return CompressionCandidate("int8 dynamic", how, "onnxruntime", "int8", onnxruntime_candidates.dynamic)


def _qdq(calibration: onnxruntime_candidates.CalibrationMethod) -> CompressionCandidate:
    word = calibration.lower()
    make = partial(onnxruntime_candidates.static, calibration=calibration)
    how = f"static, {word} calibration (ONNX Runtime)"
    return CompressionCandidate(f"int8 qdq {word}", how, "onnxruntime", "int8", make, _EFFORTS[calibration])


Tell = Callable[[str], None]
"""Told what happens, a line at a time."""

SELECTION_SHARE, ACCEPTANCE_SHARE, CALIBRATION_SHARE = 0.02, 0.1, 0.01
"""Asking the original for all rows of a part takes at most this share of the search's time, beyond the fewest rows.
A quantiser asks for each calibration row several times, and with every activation between layers."""

FEWEST_ROWS, FEWEST_CALIBRATION_ROWS = 200, 48

_CALIBRATION_PASSES = 4
"""How often a quantiser likely asks for each calibration row, before any has been timed."""

_RANKING_SHARE = 0.25
"""The share of the time that is left which ranking layers may take."""


@dataclass
class CompressionSearch:
    """The state of a search: who passed, who was rejected, who is to be beaten."""

    course: Examination
    workshop: BuildContext
    directory: Path
    tell: Tell
    started: float
    bar: Baseline
    original: Contender
    rival: Contender
    row_s: float = 0.0
    """Seconds that the original takes for a row, asked in the largest batches."""
    notes: tuple[str, ...] = ()
    passed: list[Contender] = field(default_factory=list)
    rejected: list[CompressionTrial] = field(default_factory=list)
    graphs: dict[str, Path] = field(default_factory=dict)
    """Graphs of OpenVINO's candidates by name: what can be repaired."""
    left_out: dict[str, float] = field(default_factory=dict)
    """Candidates that there was no time for, and about how long each takes [s]."""
    accepted_scores: Scores = field(default_factory=lambda: np.zeros(1))
    """The original's scores on the rows of acceptance, once they were asked."""

    @property
    def left_s(self) -> float:
        """Time for more candidates [s], without what acceptance will take."""
        return self.course.terms.seconds - (self.course.clock() - self.started) - self._acceptance_s

    @property
    def trials(self) -> tuple[CompressionTrial, ...]:
        """Records of all, the original first."""
        return (self.original.trial, *(one.trial for one in self.passed), *self.rejected)

    def consider(self, candidate: CompressionCandidate) -> bool:
        """Examine a candidate, if there is time; whether it passed."""
        expected_s = self._expected_s(candidate)
        if self.left_s < expected_s:
            self.left_out[candidate.name] = expected_s
            left = format_seconds(self.left_s) if self.left_s > 0 else "nothing"
            reason = f"it takes about {format_seconds(expected_s)}, and {left} was left beside acceptance"
            self._reject(dataclasses.replace(_record(candidate), outcome="left out", reason=reason))
            return False
        self.tell(f"trying {candidate.name}: {candidate.how}")
        directory = self.directory / re.sub(r"[^a-z0-9]+", "-", candidate.name)
        with disk_errors(directory, "a candidate", error=BadArtifact, option="-o DIR"):
            directory.mkdir(parents=True)
        found = examine(candidate, self.course, self.bar, self.rival, self.workshop, directory)
        if (graph := directory / "model.xml").is_file():
            self.graphs[candidate.name] = graph
        if isinstance(found, CompressionTrial):
            self._reject(found)
            return False
        self.passed.append(found)
        self.tell(f"{candidate.name}: passed, {found.pace:.2f}× as fast as the original")
        if not candidate.is_lossy and found.pace > self.rival.pace:
            self.rival = found
        return True

    def repair(self, broken: CompressionCandidate) -> None:
        """Put back layers of a candidate that loses too much, or likely so; nothing happens if it does not."""
        if broken.name not in self.graphs or not self._may_be_repaired(broken.name) or self.left_s <= 0:
            return
        self.tell(f"ranking the layers of {broken.name}")
        until = self.course.clock() + _RANKING_SHARE * self.left_s
        try:
            ranking = rank(self.course, broken, self.graphs[broken.name], until=until)
        except StokerError as error:
            self.tell(f"{broken.name} cannot be repaired: {error.message}")
            return
        for candidate in repaired(broken, ranking):
            self.consider(candidate)
            if not self._may_be_repaired(candidate.name):
                return

    def accept(self, seed: int) -> Contender:
        """The fastest whose drop keeps within what is allowed on the rows of acceptance, or else the original.

        Raises:
            ServiceError: the original cannot be asked any more.
        """
        finalists = sorted(self.passed, key=lambda one: (not one.is_likely, -one.pace))[:MOST_FINALISTS]
        if self.rival is not self.original and self.rival not in finalists:
            finalists[-1] = self.rival  # where every finalist in 8 bits fails, the best of the others may hold
        rows, held = self.course.material.acceptance, list[Contender]()
        self.tell(f"accepting on {len(rows)} rows: {', '.join(one.trial.name for one in finalists) or 'no candidate'}")
        answers = self.course.answers(self.original.engine, rows)
        rows = self.course.with_targets(rows, answers)
        scores = self.accepted_scores = self.course.scores(answers, rows)
        for one in finalists:
            try:
                found = self.course.scores(self.course.answers(one.engine, rows), rows)
            except StokerError as error:
                one.note(outcome="rejected", reason=error.message)
                continue
            drop, judged = accepted(
                scores, found, allowed=self.bar.allowed, confidence=self.course.terms.confidence,
                finalists=len(finalists), seed=seed, others=self.course.material.num_others,
            )  # fmt: skip
            one.note(judged.gate, drop=drop, outcome="passed" if judged.passed else "rejected", reason=judged.reason)
            if judged.passed and one.pace > self.original.pace:
                held.append(one)
        chosen = self._fastest(held)
        self._conclude(finalists, chosen)
        return chosen

    def _fastest(self, held: Sequence[Contender]) -> Contender:
        """The fastest of those that held, in rounds with one another: each was timed at another moment before.

        Paces and latencies become those of these rounds, so that the fastest is the fastest in the record too.
        """
        terms, ranked = self.course.terms, sorted(held, key=lambda one: -one.pace)
        best = ranked[0] if ranked else self.original
        for one in ranked[1:]:
            races = self.course.races(one.engine, best.engine, seconds=RACE_SHARE * terms.seconds)
            one.pace = best.pace * gain_of(races, terms.confidence).value
            latency_s = interleaved_latencies(best.trial.latency_s, races, terms.batch_sizes)
            one.note(pace=one.pace, latency_s=latency_s)
            best = max(best, one, key=lambda each: each.pace)
        return best

    def _conclude(self, finalists: Collection[Contender], chosen: Contender) -> None:
        """Write down why those that passed were not taken."""
        for one in self.passed:
            if one not in finalists:
                one.note(
                    outcome="passed",
                    reason="slower than those that were held against the rows of acceptance, or less sure",
                )
            elif one.trial.outcome == "passed" and one is not chosen:
                one.note(reason=f"{chosen.trial.name} is faster")
        if chosen is not self.original:
            chosen.note(outcome="chosen", reason=f"the fastest that keeps within {self.bar.allowed:.4g}")

    def _may_be_repaired(self, name: str) -> bool:
        """Whether putting back more layers may help: it loses too much to be accepted, or likely so."""
        unlikely = (one for one in self.passed if one.trial.name == name and not one.is_likely)
        failed = (one for one in self.rejected if one.name == name and one.outcome == "rejected")
        return any(unlikely) or any(one.gates and one.speed_up is None for one in failed)

    def _reject(self, trial: CompressionTrial) -> None:
        self.rejected.append(trial)
        self.tell(f"{trial.name}: {trial.reason}")

    def _expected_s(self, candidate: CompressionCandidate) -> float:
        """About how long a candidate takes: at the original's pace, or as the longest of its kind so far."""
        material, terms = self.course.material, self.course.terms
        rows = len(material.selection) + sum(terms.served_sizes)
        if candidate.is_reduced:
            rows += _CALIBRATION_PASSES * len(material.calibration)
        same_kind = [one for one in self.trials[1:] if one.precision.startswith("int8") == candidate.is_reduced]
        longest_s = max((one.took_s for one in same_kind), default=0.0)
        return candidate.effort * max(longest_s, rows * self.row_s + RACE_SHARE * terms.seconds)

    @property
    def _acceptance_s(self) -> float:
        """About how long acceptance takes: of the original, the finalists so far, and a candidate that may be one."""
        paces = sorted((one.pace for one in self.passed), reverse=True)[: MOST_FINALISTS - 1]
        passes = 2 + sum(1 / pace for pace in paces)
        return len(self.course.material.acceptance) * self.row_s * passes

    def require_tried(self) -> None:
        """Refuse to judge where there was no time to try anything.

        Raises:
            BadJob: every candidate was left out; says how long it takes.
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
        """About how long a search takes that tries so many of the candidates that were left out as well [s]."""
        spent_s = self.course.clock() - self.started
        more_s = sum(list(self.left_out.values())[:count])
        return math.ceil(1.1 * (spent_s + more_s + self._acceptance_s))


def begin_search(course: Examination, directory: Path, tell: Tell, *, sums_fit: bool = True) -> CompressionSearch:
    """Ask the model given, and refuse where there are too few rows to judge by.

    Rows that there would be no time for are left out; for `sums_fit` see `Workshop`.

    Raises:
        BadJob: too few rows, or a metric that cannot be used.
        BadArtifact, ServiceError: the model given cannot be asked.
    """
    started, terms = course.clock(), course.terms
    course.metric.allowed(terms.max_drop, 1.0)
    few = dataclasses.replace(
        course, material=course.material.limited(selection=FEWEST_ROWS, acceptance=1, calibration=1)
    )
    original = reference(few)
    original.note(latency_s=latencies(few.solo(original.engine), terms.batch_sizes))
    in_time = terms.seconds / _row_s(original)
    _require_other_targets(few, original)
    allowed = course.metric.allowed(terms.max_drop, course.metric.value(original.scores))
    confidence = 1 - (1 - terms.confidence) / MOST_FINALISTS
    needed = rows_needed(allowed, largest_loss(original.scores, original.scores), confidence)
    material = course.material.limited(
        selection=max(FEWEST_ROWS, int(SELECTION_SHARE * in_time)),
        acceptance=max(2 * needed, int(ACCEPTANCE_SHARE * in_time)),
        calibration=max(FEWEST_CALIBRATION_ROWS, int(CALIBRATION_SHARE * in_time)),
    )
    asked = course.clock()
    found = course.answers(original.engine, material.selection)
    row_s = (course.clock() - asked) / len(material.selection)
    material = dataclasses.replace(material, selection=course.with_targets(material.selection, found))
    course = dataclasses.replace(course, material=material)
    original.scores = course.scores(found, material.selection)
    require_rows(len(material.acceptance), original.scores, allowed, terms.confidence, material.num_others)
    workshop = BuildContext(course.source, material.calibration, sums_fit)
    bar = Baseline(found, original.scores, allowed)
    notes = (_basis_of_agreement(course, found),) if course.metric.is_agreement else ()
    return CompressionSearch(course, workshop, directory, tell, started, bar, original, original, row_s, notes)


def _require_other_targets(course: Examination, original: Contender) -> None:
    """Refuse a share of an error that is 0 because the targets are the original's own answers.

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


def _basis_of_agreement(course: Examination, found: Arrays) -> str:
    """What agreement means for each output, in a sentence."""
    source = course.source
    kinds = (f"{name}: {likeness_of(name, array, source.manifest.labels)}" for name, array in found.items())
    return (
        f"judged by agreement with the answers of version {source.version}, not by targets ({'; '.join(kinds)}): "
        "it says how far answers changed, not whether they are right"
    )


def run_search(
    search: CompressionSearch, kind: GraphKind, fast_dtypes: Collection[str], pruned: Sequence[PrunedGraph] = ()
) -> None:
    """Examine every candidate that suits; where the most promising in 8 bits loses too much, repair it at once.

    Pruned networks come right after it: they took longest to make, and shall not be what there was no time for.
    """
    manifest = search.original.manifest
    given = (manifest.engine, manifest.precision)
    candidates = candidates_for(kind, fast_dtypes, given)
    first = next((at for at, one in enumerate(candidates) if one.is_reduced), len(candidates) - 1)
    for candidate in candidates[: first + 1]:
        search.consider(candidate)
        if candidate.is_reduced:
            search.repair(candidate)
    for network in pruned:
        paces = {one.name: 1.0 for one in as_given(given)} | {one.trial.name: one.pace for one in search.passed}
        for candidate in forms_of(network, (*as_given(given), *candidates[: first + 1]), paces):
            search.consider(candidate)
    for candidate in candidates[first + 1 :]:
        search.consider(candidate)


def _row_s(original: Contender) -> float:
    """Seconds a row in the largest batch."""
    largest = max(original.trial.latency_s, key=int)
    return original.trial.latency_s[largest] / int(largest)


def _record(candidate: CompressionCandidate) -> CompressionTrial:
    return CompressionTrial(
        name=candidate.name, how=candidate.how, engine=candidate.engine, precision=candidate.precision,
        outcome="rejected", reason="",
    )  # fmt: skip


ROWS = 16
"""Rows that each point is asked with."""

MOST_GROUPS = 24


@dataclass(frozen=True)
class Ranking:
    """Groups of points of a graph, the most harmful first."""

    graph: Path
    groups: tuple[LayerGroup, ...]


def rank(course: Examination, broken: CompressionCandidate, graph: Path, *, until: float) -> Ranking:
    """Undo each group of points alone, and sort by how near the answers come to the original's.

    Groups that there was no time for, by the clock's `until`, come last in the graph's order.

    Raises:
        StokerError: the graph cannot be read.
    """
    rows = course.material.calibration.take(np.arange(min(ROWS, len(course.material.calibration))))
    engine = course.engine_of(course.source.manifest, course.source.graph_path)
    wanted = course.answers(engine, rows)
    engine.close()
    groups = grouped(points_of(graph), MOST_GROUPS)
    errors: dict[LayerGroup, float] = {}
    for group in groups:
        if course.clock() > until:
            break
        with tempfile.TemporaryDirectory() as directory:
            errors[group] = _error(course, broken, undone(graph, Path(directory), group), rows, wanted)
    ranked = sorted(errors, key=errors.__getitem__)
    return Ranking(graph, (*ranked, *(group for group in groups if group not in errors)))


def repaired(broken: CompressionCandidate, ranking: Ranking) -> Iterator[CompressionCandidate]:
    """Candidates with more and more of the worst groups put back."""
    for count in shares(ranking.groups):
        points = tuple(point for group in ranking.groups[:count] for point in group)
        yield dataclasses.replace(
            broken,
            name=f"{broken.name}, {len(points)} put back",
            how=f"{broken.how}; activations of the {len(points)} worst of "
            f"{sum(map(len, ranking.groups))} points not quantised",
            make=_maker(ranking.graph, points),
        )


def _maker(graph: Path, points: tuple[str, ...]) -> Callable[[BuildContext, Path], BuiltGraph]:
    def make(_workshop: BuildContext, directory: Path) -> BuiltGraph:
        return undone(graph, directory, points)

    return make


def _error(
    course: Examination, candidate: CompressionCandidate, made: BuiltGraph, rows: EvaluationRows, wanted: Arrays
) -> float:
    """Mean squared distance of the answers from the original's, each output in its own scale; infinite if none."""
    try:
        _, engine = course.load(candidate, made)
        found = course.answers(engine, rows)
        engine.close()
    except StokerError:
        return float("inf")
    total = 0.0
    for name, right in wanted.items():
        scale = float(np.mean(np.square(right, dtype=np.float64))) or 1.0
        total += float(np.mean(np.square(found[name].astype(np.float64) - right))) / scale
    return total if np.isfinite(total) else float("inf")

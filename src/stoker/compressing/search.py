"""The search: candidates in turn, each through the gates; the best of them against rows that nothing was chosen by.

Time-boxed: a candidate is not begun if it would likely end after the time is over, and enough is kept for acceptance.
Whenever it ends, the best so far is known.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from stoker.compressing.candidates import Candidate, PrunedGraph, Workshop, as_given, candidates_for, forms_of
from stoker.compressing.contender import Contender, Course, gain_of, latencies
from stoker.compressing.drops import Scores, largest_loss, rows_needed
from stoker.compressing.examining import RACE_SHARE, Bar, examine, reference
from stoker.compressing.graphs import GraphKind
from stoker.compressing.judging import MOST_FINALISTS, accepted, require_rows
from stoker.compressing.repairing import rank, repaired
from stoker.compressing.rows import Material
from stoker.errors import BadArtifact, StokerError
from stoker.records.compression import CompressionTrial
from stoker.store.disk_errors import disk_errors

Tell = Callable[[str], None]
"""Told what happens, a line at a time."""

SELECTION_SHARE, ACCEPTANCE_SHARE, CALIBRATION_SHARE = 0.02, 0.1, 0.01
"""Asking the original for all rows of a part takes at most this share of the search's time, beyond the fewest rows.
A quantiser asks for each calibration row several times, and with every activation between layers."""

FEWEST_ROWS, FEWEST_CALIBRATION_ROWS = 200, 48

_RANKING_SHARE = 0.25
"""The share of the time that is left which ranking layers may take."""


@dataclass
class Search:
    """The state of a search: who passed, who was rejected, who is to be beaten."""

    course: Course
    workshop: Workshop
    directory: Path
    tell: Tell
    started: float
    bar: Bar
    original: Contender
    rival: Contender
    passed: list[Contender] = field(default_factory=list)
    rejected: list[CompressionTrial] = field(default_factory=list)
    graphs: dict[str, Path] = field(default_factory=dict)
    """Graphs of OpenVINO's candidates by name: what can be repaired."""
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

    def consider(self, candidate: Candidate) -> bool:
        """Examine a candidate, if there is time; whether it passed."""
        expected_s = self._expected_s(candidate)
        if self.left_s < expected_s:
            reason = f"it takes about {expected_s:.0f} s, and {max(0.0, self.left_s):.0f} s were left"
            self._reject(dataclasses.replace(_record(candidate), outcome="left out", reason=reason))
            return False
        self.tell(f"trying {candidate.name}: {candidate.how}")
        directory = self.directory / re.sub(r"[^a-z0-9]+", "-", candidate.name)
        with disk_errors(directory, "a candidate", error=BadArtifact):
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

    def repair(self, broken: Candidate) -> None:
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
        self.tell(f"accepting on {len(rows)} rows: {', '.join(one.trial.name for one in finalists) or 'nobody'}")
        scores = self.accepted_scores = self.course.scores(self.course.answers(self.original.engine, rows), rows)
        for one in finalists:
            try:
                found = self.course.scores(self.course.answers(one.engine, rows), rows)
            except StokerError as error:
                one.note(outcome="rejected", reason=error.message)
                continue
            drop, judged = accepted(
                scores, found, allowed=self.bar.allowed, confidence=self.course.terms.confidence,
                finalists=len(finalists), seed=seed,
            )  # fmt: skip
            one.note(judged.gate, drop=drop, outcome="passed" if judged.passed else "rejected", reason=judged.reason)
            if judged.passed and one.pace > self.original.pace:
                held.append(one)
        chosen = self._fastest(held)
        self._conclude(finalists, chosen)
        return chosen

    def _fastest(self, held: Sequence[Contender]) -> Contender:
        """The fastest of those that held, in rounds with one another: each was timed at another moment before."""
        ranked = sorted(held, key=lambda one: -one.pace)
        best = ranked[0] if ranked else self.original
        for one in ranked[1:]:
            races = self.course.races(one.engine, best.engine, seconds=RACE_SHARE * self.course.terms.seconds)
            if gain_of(races, self.course.terms.confidence).value > 1:
                best = one
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

    def _expected_s(self, candidate: Candidate) -> float:
        """About how long a candidate takes, by the longest of its kind so far."""
        alike = [one for one in self.trials if (one.precision.startswith("int8")) == candidate.is_reduced]
        return candidate.effort * max((one.took_s for one in alike), default=0.0)

    @property
    def _acceptance_s(self) -> float:
        """About how long acceptance takes: the original, and finalists that are about twice as fast."""
        return len(self.course.material.acceptance) * _row_s(self.original) * (1 + MOST_FINALISTS / 2)


def begin(course: Course, directory: Path, tell: Tell, *, sums_fit: bool = True) -> Search:
    """Ask the model given, and refuse where there are too few rows to judge by.

    Rows that there would be no time for are left out; for `sums_fit` see `Workshop`.

    Raises:
        BadJob: too few rows, or a metric that cannot be used.
        BadArtifact, ServiceError: the model given cannot be asked.
    """
    started, terms = course.clock(), course.terms
    few = dataclasses.replace(course, material=limited(course.material, FEWEST_ROWS, 1, 1))
    original = reference(few)
    original.note(latency_s=latencies(few.solo(original.engine), terms.batch_sizes))
    in_time = terms.seconds / _row_s(original)
    allowed = course.metric.allowed(terms.max_drop, course.metric.value(original.scores))
    confidence = 1 - (1 - terms.confidence) / MOST_FINALISTS
    needed = rows_needed(allowed, largest_loss(original.scores, original.scores), confidence)
    material = limited(
        course.material,
        max(FEWEST_ROWS, int(SELECTION_SHARE * in_time)),
        max(2 * needed, int(ACCEPTANCE_SHARE * in_time)),
        max(FEWEST_CALIBRATION_ROWS, int(CALIBRATION_SHARE * in_time)),
    )
    course = dataclasses.replace(course, material=material)
    found = course.answers(original.engine, material.selection)
    original.scores = course.scores(found, material.selection)
    require_rows(len(material.acceptance), original.scores, allowed, terms.confidence)
    workshop = Workshop(course.source, material.calibration, sums_fit)
    return Search(course, workshop, directory, tell, started, Bar(found, original.scores, allowed), original, original)


def run(search: Search, kind: GraphKind, fast_dtypes: Collection[str], pruned: Sequence[PrunedGraph] = ()) -> None:
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


def limited(material: Material, selection: int, acceptance: int, calibration: int) -> Material:
    """At most so many rows for each use: the first, as rows lie in the order they were dealt in."""
    return dataclasses.replace(
        material,
        calibration=material.calibration.first(calibration),
        selection=material.selection.first(selection),
        acceptance=material.acceptance.first(acceptance),
    )


def _row_s(original: Contender) -> float:
    """Seconds a row in the largest batch."""
    largest = max(original.trial.latency_s, key=int)
    return original.trial.latency_s[largest] / int(largest)


def _record(candidate: Candidate) -> CompressionTrial:
    return CompressionTrial(
        name=candidate.name, how=candidate.how, engine=candidate.engine, precision=candidate.precision,
        outcome="rejected", reason="",
    )  # fmt: skip

"""The search: candidates in turn, each through the gates; the best of them against rows that nothing was chosen by.

Time-boxed: a candidate is not begun if it would likely end after the time is over, and enough is kept for acceptance.
Whenever it ends, the best so far is known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from stoker.compressing.candidates import Candidate, Workshop, candidates_for
from stoker.compressing.contender import Contender, Course, latencies
from stoker.compressing.drops import Scores, largest_loss, rows_needed
from stoker.compressing.examining import Bar, examine, reference
from stoker.compressing.graphs import GraphKind
from stoker.compressing.judging import MOST_FINALISTS, accepted, require_rows
from stoker.compressing.repairing import rank, repaired
from stoker.compressing.rows import Material
from stoker.errors import StokerError
from stoker.records.compression import CompressionTrial

Tell = Callable[[str], None]
"""Told what happens, a line at a time."""

SELECTION_SHARE, ACCEPTANCE_SHARE = 0.02, 0.1
"""Asking the original for all rows of a part takes at most this share of the search's time, beyond the fewest rows."""

FEWEST_ROWS = 200

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
    """Graphs of rejected candidates by name: what can be repaired."""
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
        directory = self.directory / f"{len(self.passed) + len(self.rejected)}"
        directory.mkdir(parents=True)
        found = examine(candidate, self.course, self.bar, self.rival, self.workshop, directory)
        if isinstance(found, CompressionTrial):
            self._reject(found)
            if (graph := directory / "model.xml").is_file():
                self.graphs[candidate.name] = graph
            return False
        self.passed.append(found)
        self.tell(f"{candidate.name}: passed, {found.pace:.2f}× as fast as the original")
        if not candidate.is_reduced and found.pace > self.rival.pace:
            self.rival = found
        return True

    def repair(self, broken: Candidate) -> None:
        """Put back layers of a candidate that was rejected for its metric; nothing happens if it was not."""
        trial = next((one for one in self.rejected if one.name == broken.name), None)
        if trial is None or broken.name not in self.graphs or not self._is_promising(trial) or self.left_s <= 0:
            return
        self.tell(f"ranking the layers of {broken.name}")
        until = self.course.clock() + _RANKING_SHARE * self.left_s
        try:
            ranking = rank(self.course, broken, self.graphs[broken.name], until=until)
        except StokerError as error:
            self.tell(f"{broken.name} cannot be repaired: {error.message}")
            return
        for candidate in repaired(broken, ranking):
            if self.consider(candidate) or not self._is_promising(self.rejected[-1]):
                return

    def accept(self, seed: int) -> Contender:
        """The fastest whose drop keeps within what is allowed on the rows of acceptance, or else the original.

        Raises:
            ServiceError: the original cannot be asked any more.
        """
        finalists = sorted(self.passed, key=lambda one: (not one.is_likely, -one.pace))[:MOST_FINALISTS]
        if self.rival is not self.original and self.rival not in finalists:
            finalists[-1] = self.rival  # where every finalist in 8 bits fails, the best of the others may hold
        rows, chosen = self.course.material.acceptance, self.original
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
            if judged.passed and one.pace > chosen.pace:
                chosen = one
        self._conclude(finalists, chosen)
        return chosen

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

    @staticmethod
    def _is_promising(trial: CompressionTrial) -> bool:
        """Whether putting back more layers may help: it was rejected for what it answers, not for its speed."""
        return trial.outcome == "rejected" and bool(trial.gates) and trial.speed_up is None

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


def begin(course: Course, workshop: Workshop, directory: Path, tell: Tell) -> Search:
    """Ask the model given, and refuse where there are too few rows to judge by.

    Rows that there would be no time for are left out.

    Raises:
        BadJob: too few rows, or a metric that cannot be used.
        BadArtifact, ServiceError: the model given cannot be asked.
    """
    started, terms = course.clock(), course.terms
    few = dataclasses.replace(course, material=limited(course.material, FEWEST_ROWS, len(course.material.acceptance)))
    original = reference(few)
    original.note(latency_s=latencies(few.solo(original.engine), terms.batch_sizes))
    most = (
        int(SELECTION_SHARE * terms.seconds / _row_s(original)),
        int(ACCEPTANCE_SHARE * terms.seconds / _row_s(original)),
    )
    allowed = course.metric.allowed(terms.max_drop, course.metric.value(original.scores))
    confidence = 1 - (1 - terms.confidence) / MOST_FINALISTS
    needed = rows_needed(allowed, largest_loss(original.scores, original.scores), confidence)
    material = limited(course.material, max(FEWEST_ROWS, most[0]), max(2 * needed, most[1]))
    course = dataclasses.replace(course, material=material)
    found = course.answers(original.engine, material.selection)
    original.scores = course.scores(found, material.selection)
    require_rows(len(material.acceptance), original.scores, allowed, terms.confidence)
    return Search(
        course, workshop, directory, tell, started, Bar(found, original.scores, allowed), original, original
    )  # fmt: skip


def run(search: Search, kind: GraphKind, fast_dtypes: Collection[str]) -> None:
    """Examine every candidate that suits; where the most promising in 8 bits loses too much, repair it at once."""
    manifest = search.original.manifest
    candidates = candidates_for(kind, fast_dtypes, (manifest.engine, manifest.precision))
    reduced = [one for one in candidates if one.is_reduced]
    for candidate in candidates:
        search.consider(candidate)
        if reduced and candidate is reduced[0]:
            search.repair(candidate)


def limited(material: Material, selection: int, acceptance: int) -> Material:
    """At most so many rows to choose by and to accept by: the first, as rows lie in the order they were dealt in."""
    return dataclasses.replace(
        material, selection=material.selection.first(selection), acceptance=material.acceptance.first(acceptance)
    )  # fmt: skip


def _row_s(original: Contender) -> float:
    """Seconds a row in the largest batch."""
    largest = max(original.trial.latency_s, key=int)
    return original.trial.latency_s[largest] / int(largest)


def _record(candidate: Candidate) -> CompressionTrial:
    return CompressionTrial(
        name=candidate.name, how=candidate.how, engine=candidate.engine, precision=candidate.precision,
        outcome="rejected", reason="",
    )  # fmt: skip

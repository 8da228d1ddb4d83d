"""Which layers of an int8 candidate do the damage, and how few must be put back."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stoker.artifacts.elements import Arrays
from stoker.compressing.candidates import Candidate, Made, Workshop
from stoker.compressing.candidates.reverting import Group, grouped, points_of, shares, undone
from stoker.compressing.contender import Course
from stoker.compressing.rows import Rows
from stoker.errors import StokerError

ROWS = 16
"""Rows that each point is asked with."""

MOST_GROUPS = 24


@dataclass(frozen=True)
class Ranking:
    """Groups of points of a graph, the most harmful first."""

    graph: Path
    groups: tuple[Group, ...]


def rank(course: Course, broken: Candidate, graph: Path, *, until: float) -> Ranking:
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
    errors: dict[Group, float] = {}
    for group in groups:
        if course.clock() > until:
            break
        with tempfile.TemporaryDirectory() as directory:
            errors[group] = _error(course, broken, undone(graph, Path(directory), group), rows, wanted)
    ranked = sorted(errors, key=errors.__getitem__)
    return Ranking(graph, (*ranked, *(group for group in groups if group not in errors)))


def repaired(broken: Candidate, ranking: Ranking) -> Iterator[Candidate]:
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


def _maker(graph: Path, points: tuple[str, ...]) -> Callable[[Workshop, Path], Made]:
    def make(_workshop: Workshop, directory: Path) -> Made:
        return undone(graph, directory, points)

    return make


def _error(course: Course, candidate: Candidate, made: Made, rows: Rows, wanted: Arrays) -> float:
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

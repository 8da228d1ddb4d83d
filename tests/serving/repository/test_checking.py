"""Golden answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stoker import engines
from stoker.artifacts import Artifact, Golden
from stoker.artifacts.dtypes import Arrays
from stoker.errors import BadArtifact
from stoker.serving.repository.version_loader import check_answers
from stoker.testing.tiny_models import tiny_artifact


class Bent:
    """An engine whose answers `bend` changes; it remembers how many rows it was asked for."""

    def __init__(self, artifact: Artifact, bend) -> None:
        (self.engine,) = engines.load(artifact, instances=1, threads=1)
        self.bend = bend
        self.rows: list[int] = []

    def run(self, inputs: Arrays) -> Arrays:
        self.rows.append(len(next(iter(inputs.values()))))
        return {name: self.bend(array) for name, array in self.engine.run(inputs).items()}

    def close(self) -> None:
        self.engine.close()


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    """A tiny model with three golden rows."""
    return tiny_artifact(tmp_path)


def check(artifact: Artifact, bend=lambda array: array, most_rows: int = 8) -> list[int]:
    """The numbers of rows that were asked for."""
    engine = Bent(artifact, bend)
    check_answers(engine, artifact.manifest, artifact.golden(), most_rows=most_rows)
    return engine.rows


def test_the_golden_rows_are_asked_alone_together_and_in_a_full_batch(artifact: Artifact) -> None:
    """Three batch sizes, which warm the engine up as well."""
    assert check(artifact) == [3, 1, 8]
    assert check(artifact, most_rows=1) == [3, 1]


def test_what_is_within_the_tolerance_passes(artifact: Artifact) -> None:
    """The manifest allows 1e-4."""
    check(artifact, lambda array: array + np.float32(5e-5))


@pytest.mark.parametrize(
    ("bend", "says"),
    [
        (lambda array: array + np.float32(0.5), r"\[3, 3\] is off by [\d.e+]+ times"),
        (lambda array: np.where(np.arange(3) == 1, np.float32(np.nan), array), "NaN"),
        (lambda array: array + np.float32(np.inf), "infinities"),
        (lambda array: array[:, :2], r"float32 \[3, 2\] where float32 \[3, 3\]"),
        (lambda array: array if len(array) < 8 else array[::-1], r"\[8, 3\] is off"),
    ],
)
def test_what_is_not_is_refused_with_numbers(artifact: Artifact, bend, says: str) -> None:
    """Wrong everywhere, NaN, infinite, of another shape, or wrong in a full batch alone."""
    with pytest.raises(BadArtifact, match=says):
        check(artifact, bend)


def test_a_missing_output_is_refused(artifact: Artifact) -> None:
    """An engine that leaves an output out is no engine of this model."""
    golden = artifact.golden()
    more = Golden(golden.inputs, {**golden.outputs, "z": golden.outputs["y"]})
    with pytest.raises(BadArtifact, match="output 'z' is not the golden answer: it is nothing"):
        check_answers(Bent(artifact, lambda array: array), artifact.manifest, more, most_rows=4)

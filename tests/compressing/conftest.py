"""A tiny model of images, rows for it, and a course to examine candidates on."""

from pathlib import Path

import numpy as np
import pytest

from stoker.artifacts import Artifact
from stoker.compressing.contender import CompressionTerms, Examination
from stoker.compressing.rows import EvaluationData, EvaluationRows, answers
from stoker.compressing.scores import named
from stoker.engines import load
from stoker.testing import FakeClock
from stoker.testing.tiny_models import tiny_artifact, tiny_inputs


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A model of one convolution."""
    return tiny_artifact(tmp_path_factory.mktemp("models"), kind="images")


def rows_of(artifact: Artifact, count: int, seed: int) -> EvaluationRows:
    """Rows whose targets are what the model says of most of them."""
    inputs = tiny_inputs("images", rows=count, seed=seed)
    (engine,) = load(artifact, threads=1)
    found = answers(engine, EvaluationRows(inputs), artifact.manifest)["logits"].argmax(axis=1)
    engine.close()
    wrong = np.random.default_rng(seed).random(count) < 0.1
    return EvaluationRows(inputs, np.where(wrong, (found + 1) % 3, found))


@pytest.fixture(scope="session")
def material(images: Artifact) -> EvaluationData:
    """Rows for each use."""
    return EvaluationData(rows_of(images, 24, 1), rows_of(images, 80, 2), rows_of(images, 400, 3), seed=0)


@pytest.fixture
def course(images: Artifact, material: EvaluationData) -> Examination:
    """A search that may lose 3 points of accuracy and take 5 seconds, by a clock of which each reading takes 1 ms."""
    terms = CompressionTerms(max_drop="3%", batch_sizes=(1, 4), seconds=5.0)
    return Examination(images, material, named("accuracy"), terms, FakeClock(tick_s=1e-3))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Where graphs of candidates go."""
    path = tmp_path / "candidates"
    path.mkdir()
    return path

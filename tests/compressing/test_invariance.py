"""Models whose answer depends on the rest of the batch, planted."""

from collections.abc import Callable

import numpy as np
import pytest

from stoker.artifacts import served_sizes
from stoker.artifacts.dtypes import Arrays
from stoker.compressing.gates import CEILING, batch_invariance
from stoker.compressing.rows import EvaluationRows
from stoker.records import Manifest
from stoker.testing.tiny_models import tiny_artifact, tiny_inputs

SIZES = served_sizes(32)


class Planted:
    """An engine made of a function."""

    def __init__(self, answer: Callable[[Arrays], np.ndarray]) -> None:
        self.answer = answer

    def run(self, inputs: Arrays) -> Arrays:
        return {"embedding": self.answer(inputs)}

    def close(self) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """The signature of a model of tokens."""
    return tiny_artifact(tmp_path_factory.mktemp("models"), kind="tokens").manifest


def masked_mean(inputs: Arrays) -> np.ndarray:
    """What such a model should compute."""
    ids, mask = inputs["input_ids"].astype(np.float32), inputs["attention_mask"]
    return (ids * mask).sum(axis=1, keepdims=True) / np.maximum(1, mask.sum(axis=1, keepdims=True))


def rows() -> EvaluationRows:
    """Rows of several lengths."""
    found = tiny_inputs("tokens", rows=12, tokens=9, seed=3)
    lengths = np.arange(12) % 8 + 1
    mask = (np.arange(9) < lengths[:, None]).astype(np.int64)
    return EvaluationRows({"input_ids": found["input_ids"] * mask, "attention_mask": mask})


def test_what_a_model_fills_in_is_no_scale(tokens: Manifest) -> None:
    """Relative to classes that are masked by -1e9 a deviation of any size would be nothing."""

    def masked(inputs: Arrays) -> np.ndarray:
        own = masked_mean(inputs) + len(inputs["input_ids"])  # the more there are in a batch, the larger
        return np.concatenate([own, np.full_like(own, -1e9)], axis=1)

    found = batch_invariance(Planted(masked), rows(), tokens, SIZES)
    assert found.share > CEILING
    assert found.scale["embedding"] < 100


def test_a_model_that_minds_its_mask_is_steady(tokens: Manifest) -> None:
    """Its tolerance is the floor, and every gate is passed."""
    found = batch_invariance(Planted(masked_mean), rows(), tokens, SIZES)
    assert found.share < 1e-6
    assert all(gate.passed for gate in found.gates())
    assert 0 < found.tolerance.absolute < 1e-3


def unmasked_mean(inputs: Arrays) -> np.ndarray:
    """Forgets the mask, so that filling counts."""
    return inputs["input_ids"].astype(np.float32).mean(axis=1, keepdims=True)


def scaled_by_batch(inputs: Arrays) -> np.ndarray:
    """Rounds to steps taken from the largest value in the batch, as dynamic quantisation does."""
    found = masked_mean(inputs)
    step = np.abs(found).max() / 3
    return np.round(found / step) * step


def normalised_over_batch(inputs: Arrays) -> np.ndarray:
    """Batch normalisation that was left in training mode."""
    found = masked_mean(inputs)
    return found - found.mean(axis=0)


@pytest.mark.parametrize("answer", [unmasked_mean, scaled_by_batch, normalised_over_batch])
def test_a_model_that_looks_at_its_neighbours_is_rejected(answer, tokens: Manifest) -> None:
    """The deviation is far above the ceiling."""
    found = batch_invariance(Planted(answer), rows(), tokens, SIZES)
    assert found.share > 2 * CEILING
    assert not all(gate.passed for gate in found.gates())


def test_answers_that_are_not_finite_are_rejected(tokens: Manifest) -> None:
    """NaN compares with nothing, and must not pass for steady."""

    def broken(inputs: Arrays) -> np.ndarray:
        found = masked_mean(inputs)
        return np.where(found > found.min(), np.nan, found)

    assert not batch_invariance(Planted(broken), rows(), tokens, SIZES).gates()[0].passed


def test_a_small_deviation_makes_the_tolerance(tokens: Manifest) -> None:
    """What rounding moves is allowed for, with a margin."""

    def rounded(inputs: Arrays) -> np.ndarray:
        found = masked_mean(inputs)
        return found * (1 + 1e-3 * (len(found) > 1))

    found = batch_invariance(Planted(rounded), rows(), tokens, SIZES)
    assert all(gate.passed for gate in found.gates())
    assert found.tolerance.absolute == pytest.approx(4 * max(found.deviation.values()))


@pytest.mark.parametrize("size", [2, 3, 4, 16, 32])
def test_a_model_that_is_wrong_at_one_size_that_is_served_is_rejected(size: int, tokens: Manifest) -> None:
    """Kernels change with the number of rows: it answers well below, and at 32 rows a server would refuse it."""

    def wrong(inputs: Arrays) -> np.ndarray:
        found = masked_mean(inputs)
        return found * (1 + 0.5 * (len(found) == size))

    assert not all(gate.passed for gate in batch_invariance(Planted(wrong), rows(), tokens, SIZES).gates())

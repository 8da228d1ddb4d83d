from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from stoker.verifying.exactness_contract import check_order
from tests.stepping.models import cnn, images, make_job, mlp, vectors
from tests.verifying.examining import ample_time, no_time, subject_of


class Items(torch.utils.data.Dataset[Any]):
    """Map-style samples with noise that each of the three generators may draw."""

    def __init__(self, *, own: bool = False) -> None:
        self.own = random.Random(0) if own else None

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = (self.own or random).random() + torch.rand(6)
        return vectors()[0][index] + noise, index % 4


@pytest.mark.parametrize(
    "plan", [{"loader": "inline"}, {"loader": "workers", "num_workers": 2}], ids=["inline", "workers"]
)
def test_items_with_keyed_draws_are_the_same_from_any_position(plan: dict[str, Any]) -> None:
    """Datasets that draw from the global generators are exact, fetched here or by worker processes."""
    verdict = check_order(subject_of(make_job(mlp, data=Items()), 8, **plan), no_time())
    assert (verdict.passed, verdict.level) == (True, "bit-equal"), verdict.answer
    assert "indexed: the order is computed from (seed, epoch, position)" in verdict.answer


def test_items_with_a_generator_of_their_own_are_found() -> None:
    """A dataset whose content depends on what was fetched before does not resume, and the error says how to."""
    verdict = check_order(subject_of(make_job(mlp, data=Items(own=True)), 8, loader="inline"), no_time())
    assert (verdict.passed, verdict.level) == (False, "none")
    assert "the same samples with other content" in verdict.answer


def test_arrays_are_compared_over_the_end_of_an_epoch() -> None:
    """Sixteen batches of a set of four batches an epoch: positions in later epochs are reached as well."""
    verdict = check_order(subject_of(make_job(mlp), 8), ample_time())
    assert verdict.passed
    assert "batches 9 to 16" in verdict.evidence
    assert "the order of 64 samples of two epochs" in verdict.evidence


def test_without_time_four_batches_are_compared() -> None:
    """The page says how little was looked at."""
    assert "batches 3 to 4" in check_order(subject_of(make_job(mlp), 8), no_time()).evidence


@pytest.mark.parametrize(
    "augment",
    [lambda x, draw: x + torch.rand(len(x), 1, 1, 1), lambda x, draw: x - x.mean(0)],
    ids=["draws of its own", "means over the batch"],
)
def test_augmentation_that_depends_on_the_cut_is_found(augment: Any) -> None:
    """A transform that does not draw per sample, or mixes samples, makes micro-batches another job."""
    verdict = check_order(subject_of(make_job(cnn, data=images(), augment=[augment]), 8), no_time())
    assert not verdict.passed
    assert "when the batch is cut otherwise" in verdict.answer

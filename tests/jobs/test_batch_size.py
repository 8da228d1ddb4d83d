"""Batches that are still to be chosen, and the rules that learning rates follow."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest

import stoker
from stoker.errors import BadJob
from stoker.jobs.batch_size import AUTO_BASE, AutoBatch, largest_batch, rate_factor, scalable, with_rates_scaled
from tests.flow.builders import blobs_job


def test_auto_is_short_for_the_default_base() -> None:
    """`batch="auto"` is `stoker.auto()`."""
    job = blobs_job(batch="auto")
    assert isinstance(job.batch, AutoBatch)
    assert job.batch == AutoBatch(AUTO_BASE, None)
    assert repr(stoker.auto(base=32, most=256)) == "stoker.auto(base=32, most=256)"


def test_a_copy_keeps_what_was_asked() -> None:
    """A job may be copied before its batch is chosen."""
    copied = copy.deepcopy(stoker.auto(base=32, most=256))
    assert copied == AutoBatch(32, 256)


@pytest.mark.parametrize("given", [{"base": 0}, {"base": 2.5}, {"base": True}, {"base": 64, "most": 32}])
def test_a_base_that_cannot_be_meant_is_refused(given: dict[str, Any]) -> None:
    """The message says what is wanted."""
    with pytest.raises(BadJob, match="1 <= base <= most"):
        stoker.auto(**given)


def test_another_word_is_no_batch() -> None:
    """Only "auto" is a word for a batch."""
    with pytest.raises(BadJob, match="positive whole number of samples, got 'large'"):
        blobs_job(batch="large")


@pytest.mark.parametrize(("exponent", "expected"), [(1.0, 8.0), (0.5, math.sqrt(8))])
def test_rates_follow_the_published_rules_far_below_the_noise_scale(exponent: float, expected: float) -> None:
    """Linear for SGD, the square root for Adam."""
    assert rate_factor(32, 256, noise_scale=1e9, exponent=exponent) == pytest.approx(expected, rel=1e-5)
    assert rate_factor(32, 256, noise_scale=math.inf, exponent=exponent) == pytest.approx(expected)


def test_rates_level_off_at_the_noise_scale() -> None:
    """At the noise scale the best rate is half of the largest: equation 2.6 of McCandlish et al."""
    at_scale = rate_factor(1, 1000, noise_scale=1000.0, exponent=1.0)
    far_above = rate_factor(1, 10**9, noise_scale=1000.0, exponent=1.0)
    assert at_scale / far_above == pytest.approx(0.5, rel=1e-3)
    assert rate_factor(64, 512, noise_scale=0.0, exponent=1.0) == pytest.approx(1.0)


def test_only_learning_rates_are_scaled() -> None:
    """Momentum and weight decay stay; the rates of groups move with the first."""
    before = stoker.SGD(lr=0.1, momentum=0.9, weight_decay=1e-4, groups={"*.bias": {"lr": 0.2, "weight_decay": 0.0}})
    after = with_rates_scaled(before, 2.0)
    expected = {"*.bias": {"lr": 0.4, "weight_decay": 0.0}}
    assert after == stoker.SGD(lr=0.2, momentum=0.9, weight_decay=1e-4, groups=expected)


def test_an_unknown_optimiser_is_refused() -> None:
    """How a function's rate should follow the batch is unknown."""
    assert scalable(stoker.AdamW(lr=1e-3))[1] == 0.5
    with pytest.raises(BadJob, match=r"scales the learning rate of stoker\.SGD, Adam and AdamW"):
        scalable(lambda parameters: None)


@pytest.mark.parametrize(
    ("noise_scale", "limit", "expected"), [(700.0, 10_000, 512), (700.0, 300, 256), (10.0, 300, 64), (512.0, 512, 512)]
)
def test_the_batch_is_the_largest_doubling_within_the_limits(noise_scale: float, limit: int, expected: int) -> None:
    """A power of two times the base, neither above the noise scale nor the limit, and never below the base."""
    assert largest_batch(64, noise_scale, limit) == expected

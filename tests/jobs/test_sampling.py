from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import stoker
from stoker.errors import BadJob
from stoker.jobs.job_description import describe


def job(**changes: Any) -> stoker.Job:
    """A job whose sampling and lengths are to be looked at."""
    data = (torch.zeros(6, 2), torch.tensor([0, 0, 0, 0, 1, 1]))
    settings: dict[str, Any] = {
        "model": lambda: nn.Linear(2, 2),
        "data": data,
        "loss": "cross_entropy",
        "optimizer": stoker.SGD(lr=0.1),
        "batch": 4,
        "until": stoker.epochs(1),
    }
    return stoker.Job(**(settings | changes))


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ([1.0, -0.5, 2.0], "1 of 3 weights are negative or not finite: number 1 is -0.5"),
        ([1.0, float("nan")], "1 of 2 weights are negative or not finite: number 1 is nan"),
        ([float("inf"), 1.0], "1 of 2 weights are negative or not finite: number 0 is inf"),
        ([0, 0, 0], "all 3 weights are 0"),
        ([[1.0], [2.0]], r"weights are of shape \[2, 1\]"),
        ([[1.0], [2.0, 3.0]], "weights are no array"),
        (["a", "b"], "weights are no numbers"),
        (None, "weights are no numbers"),
    ],
)
def test_weights_that_cannot_be_drawn_by_are_refused(weights: Any, words: str) -> None:
    """At once, with the first wrong one named."""
    with pytest.raises(BadJob, match=words):
        stoker.sampling.weighted(weights)


@pytest.mark.parametrize("num_samples", [0, -3, 2.5, True])
def test_an_epoch_draws_a_positive_whole_number(num_samples: Any) -> None:
    """Of samples."""
    for sampling in (
        lambda: stoker.sampling.balanced(num_samples=num_samples),
        lambda: stoker.sampling.weighted([1.0], num_samples=num_samples),
    ):
        with pytest.raises(BadJob, match="num_samples is how many samples an epoch draws"):
            sampling()


def test_weights_are_described_by_a_digest_whatever_holds_them() -> None:
    """A million weights do not become a million numbers in a spec; equal ones are one job."""
    given = [0.5, 1.0, 2.0]
    described = [describe(stoker.sampling.weighted(kind(given))) for kind in (list, np.array, torch.tensor, tuple)]
    assert described[0]["weights"]["shape"] == [3]
    assert all(one == described[0] for one in described)
    assert describe(stoker.sampling.weighted([0.5, 1.0, 2.1])) != described[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sampling": "balanced"}, r"Job\(sampling=…\): wanted stoker.sampling.balanced"),
        ({"sampling": [2, 0, 1]}, r"got a list\. An order of your own is that of the data, such as .*Subset"),
        ({"sampling": 512}, r"Job\(sampling=…\): wanted .*, stoker.lengths.bucketed"),
        (
            {"sampling": stoker.lengths.bucketed(), "batch": "auto", "optimizer": stoker.SGD(lr=1)},
            "the batch is a number",
        ),
    ],
)
def test_what_does_not_go_together_is_said(changes: dict[str, Any], words: str) -> None:
    """When the job is made."""
    with pytest.raises(BadJob, match=words):
        job(**changes)


@pytest.mark.parametrize("value", [0, -1, 2.5, True, "8"])
def test_lengths_and_windows_are_positive_whole_numbers(value: Any) -> None:
    """Windows in batches, rows in tokens."""
    for make in (lambda: stoker.lengths.bucketed(window=value), lambda: stoker.lengths.packed(value)):
        with pytest.raises(BadJob, match="is a whole number, 1 or more"):
            make()

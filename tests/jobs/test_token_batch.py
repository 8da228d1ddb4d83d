from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import stoker
from stoker.errors import BadJob
from stoker.jobs.batch_size import TokenBatch
from stoker.jobs.job_description import describe_settings


def job_of(**changes: Any) -> stoker.Job:
    """A job of 40 tokens a batch."""
    settings: dict[str, Any] = {
        "model": lambda: nn.Linear(1, 1),
        "data": (torch.zeros(8, 4), torch.zeros(8, 1)),
        "loss": "mse",
        "optimizer": stoker.SGD(lr=0.1),
        "batch": stoker.tokens(40),
        "until": stoker.epochs(1),
    }
    return stoker.Job(**(settings | changes))


@pytest.mark.parametrize("given", [0, -3, 1.5, True, "many", None])
def test_a_batch_is_a_whole_number_of_tokens(given: Any) -> None:
    """What cannot be meant is refused where it is written."""
    with pytest.raises(BadJob, match="wanted a whole number of tokens"):
        stoker.tokens(given)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sampling": stoker.sampling.weighted([1.0] * 8)}, "does not go with sampling"),
        ({"step": lambda model, optimizers, batch: 0.0}, "does not go with step"),
        ({"sync": stoker.LocalSGD(every=stoker.samples(80))}, "does not go with sync"),
        ({"coupling_group": 2}, "does not go with coupling_group"),
        ({"loss": stoker.Objective("mse", scope="batch")}, "a loss over the whole batch"),
        (
            {"batch": stoker.tokens(40, length_of=len), "sampling": stoker.lengths.bucketed(length_of=len)},
            "leave out length_of",
        ),
    ],
)
def test_what_needs_one_number_of_samples_is_refused(changes: dict[str, Any], words: str) -> None:
    """Nothing goes wrong silently where batches have different numbers of samples."""
    with pytest.raises(BadJob, match=words):
        job_of(**changes)


def test_a_job_is_described_by_its_tokens_not_by_the_samples_they_came_to() -> None:
    """The spec is known before the data are, and distinguishes padding from lengths."""
    described = describe_settings(job_of())["batch"]
    assert described == {"tokens": 40, "padded": False, "length_of": None}
    assert describe_settings(job_of(batch=TokenBatch(40, num_samples=7)))["batch"] == described
    others = [
        stoker.tokens(41),
        stoker.tokens(40, padded=True),
        stoker.tokens(40, length_of=[4] * 8),
        stoker.tokens(40, length_of=len),
    ]
    found = [describe_settings(job_of(batch=one))["batch"] for one in others]
    assert all(found.count(one) == 1 and one != described for one in found)


def test_a_number_of_samples_is_described_as_it_was() -> None:
    """Specs of older jobs stay what they were."""
    assert describe_settings(job_of(batch=4))["batch"] == 4


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])  # noqa: S301 - our own
def test_a_batch_of_tokens_survives_being_copied(copied: Any) -> None:
    """Loader processes and tuners copy jobs."""
    one = TokenBatch(40, [1, 2], is_padded=True, num_samples=7)
    found = copied(one)
    assert (found.num_samples, found.num_tokens, found.length_of, found.is_padded) == (7, 40, [1, 2], True)
    assert repr(found) == "stoker.tokens(40, padded=True)"


@pytest.mark.parametrize("batch", [stoker.tokens(40), stoker.auto(base=16)])
def test_a_batch_without_a_known_number_of_samples_is_not_a_number(batch: Any) -> None:
    """Nothing computes with tokens, or with the base, as if they were the samples of an update."""
    assert not isinstance(batch, int)
    job = job_of(batch=batch)
    assert job.batch is batch
    with pytest.raises(TypeError, match="known of a resolved job only"):
        _ = job.batch_size
    assert job_of(batch=TokenBatch(40, num_samples=7)).batch_size == 7

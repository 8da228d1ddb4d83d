from __future__ import annotations

import numpy as np
import pytest
import torch

from stoker.errors import BadJob
from stoker.jobs import SGD, Job, holdout
from stoker.loading.datasets import datasets_of
from stoker.units import epochs
from tests.loading.data import Noisy, Squares


def job(**changes) -> Job:
    """A job over ten samples."""
    settings = {
        "model": object, "data": Squares(10), "loss": "mse", "optimizer": SGD(lr=0.1), "batch": 4, "until": epochs(1),
    }  # fmt: skip
    return Job(**settings | changes)


def test_a_job_may_have_training_data_alone() -> None:
    """Nothing to choose by and nothing to test on; a run of ten samples by fours."""
    data = datasets_of(job())
    assert (data.valid, data.test, data.note) == (None, None, None)
    assert data.extent(job()).updates_per_epoch == 3
    assert data.fingerprint().startswith("train sha256:")


def test_a_holdout_is_taken_from_the_training_data() -> None:
    """What validates does not train, and the test set is not touched."""
    data = datasets_of(job(valid=holdout(0.2), test=Squares(5)))
    assert [len(one) for one in (data.train, data.valid, data.test)] == [8, 2, 5]
    seen = [set(one.fetch(np.arange(len(one)), 0)[1].tolist()) for one in (data.train, data.valid)]
    assert seen[0] | seen[1] == {i * i for i in range(10)}


def test_each_set_has_its_share_in_the_fingerprint() -> None:
    """Swapping validation and test data is another job."""
    one = datasets_of(job(valid=Squares(3), test=Squares(4)))
    other = datasets_of(job(valid=Squares(4), test=Squares(3)))
    assert one.fingerprint() != other.fingerprint()
    assert datasets_of(job(valid=holdout(0.2))).fingerprint() != datasets_of(job(valid=holdout(0.3))).fingerprint()


def test_an_error_names_the_set() -> None:
    """`valid` and `test` are said to be what they are."""
    with pytest.raises(BadJob, match=r"^valid has no samples"):
        datasets_of(job(valid=[]))
    with pytest.raises(BadJob, match=r"^test is a str"):
        datasets_of(job(test="none"))


def test_the_jobs_seed_keys_the_draws_of_items() -> None:
    """Another seed, other augmentation; the same seed, the same."""
    first, again, other = (
        datasets_of(job(data=Noisy(10), seed=seed)).train.fetch(np.array([3]), 0)["x"] for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_note_of_a_source_is_passed_on() -> None:
    """What the user should know about a choice of data."""

    class Noted(Squares):
        note = "the digits stand in"

    assert datasets_of(job(data=Noted(10))).note == "the digits stand in"

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from stoker.errors import BadJob
from stoker.jobs import SGD, Job
from stoker.jobs.fields import Fields
from stoker.jobs.job_description import describe_settings
from stoker.jobs.objective import Objective
from stoker.jobs.regularization import CutMix, Mixup, mixes_of
from stoker.units import updates


def job_of(**changed: Any) -> Job:
    """A job with some of its settings changed."""
    given = {
        "model": lambda: nn.Linear(2, 2),
        "data": (torch.zeros(4, 2), torch.zeros(4)),
        "loss": "mse",
        "optimizer": SGD(lr=0.1),
        "batch": 2,
        "until": updates(1),
    }
    return Job(**{**given, **changed})


def test_a_mix_is_part_of_what_is_learned() -> None:
    """It is in the description with its settings."""
    assert describe_settings(job_of())["mix"] is None
    assert describe_settings(job_of(mix=Mixup(0.3)))["mix"] == {"type": "Mixup", "alpha": 0.3, "p": 1.0}
    assert describe_settings(job_of(mix=Mixup()))["mix"] != describe_settings(job_of(mix=CutMix()))["mix"]


def test_one_way_and_several_are_both_a_tuple() -> None:
    """None is no way at all."""
    assert mixes_of(None) == ()
    assert mixes_of(Mixup()) == (Mixup(),)
    assert mixes_of([Mixup(), CutMix()]) == (Mixup(), CutMix())


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"mix": "mixup"}, "Job(mix=…): wanted stoker.transforms.Mixup(…), CutMix(…) or a list of these, got 'mixup'"),
        ({"mix": []}, "Job(mix=…): wanted"),
        (
            {"mix": Mixup(), "loss": Objective("mse", scope="batch")},
            "a loss over the whole batch is no sum over samples",
        ),
        ({"mix": Mixup(), "fields": Fields(inputs=["a", "b"])}, "goes with one input, and this job has 2: 'a', 'b'"),
        ({"mix": Mixup(), "step": lambda model, optimizers, batch: None}, "a step of the job's own mixes its batches"),
        ({"mix": Mixup(), "loss": "own"}, 'a model with loss="own" does not give'),
    ],
    ids=["word", "none", "scope", "inputs", "step", "own"],
)
def test_a_mix_that_cannot_be_meant_is_a_bad_job(changed: dict[str, Any], problem: str) -> None:
    """Said when the job is made."""
    with pytest.raises(BadJob, match=re.escape(problem)):
        job_of(**changed)


@pytest.mark.parametrize("make", [Mixup, CutMix])
def test_proportions_that_cannot_be_drawn_are_refused(make: Any) -> None:
    """When they are given, with the value."""
    with pytest.raises(BadJob, match="above 0, got 0"):
        make(0)
    with pytest.raises(BadJob, match=r"in \[0, 1\], got 1.5"):
        make(1.0, p=1.5)

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import BadJob
from stoker.jobs import SGD, AdamW
from stoker.jobs.batch_size import tokens
from stoker.jobs.job_description import describe_settings
from stoker.jobs.numeric_settings import is_number, is_whole, plain_number
from stoker.jobs.objective import Objective
from tests.jobs.test_job import job

NUMPYS = {
    "batch": np.int64(32),
    "seed": np.uint8(7),
    "clip_norm": np.float32(0.5),
    "loss": Objective("cross_entropy", label_smoothing=np.float16(0.25)),
    "coupling_group": np.int32(8),
    "optimizer": SGD(lr=np.float32(0.5), momentum=np.float64(0.75)),  # type: ignore[arg-type]
}
PLAIN = {
    "batch": 32,
    "seed": 7,
    "clip_norm": 0.5,
    "loss": Objective("cross_entropy", label_smoothing=0.25),
    "coupling_group": 8,
    "optimizer": SGD(lr=0.5, momentum=0.75),
}


def test_numpys_scalars_make_the_job_that_pythons_numbers_make() -> None:
    """What a batch or a rate was computed with is no part of what is learned: specs are equal, and are JSON."""
    found = describe_settings(job(**NUMPYS))
    assert found == describe_settings(job(**PLAIN))
    assert json.loads(json.dumps(found)) == found
    assert type(job(**NUMPYS).batch) is int
    assert type(job(**NUMPYS).clip_norm) is float


def test_groups_of_parameters_take_numpys_scalars() -> None:
    """As the settings with them."""
    groups = {"*.bias": {"lr": np.float32(0.5)}}
    assert type(AdamW(lr=1e-3, groups=groups).groups["*.bias"]["lr"]) is float


@pytest.mark.parametrize("changes", [{"batch": np.float64(32)}, {"batch": np.bool_(True)}, {"seed": np.float32(1)}])
def test_a_scalar_of_another_kind_is_still_refused(changes: dict[str, Any]) -> None:
    """A whole number is asked for; a rounded one could be another."""
    with pytest.raises(BadJob, match=r"wanted a .*whole number"):
        job(**changes)


@given(st.one_of(st.integers(-(2**63), 2**63 - 1).map(np.int64), st.floats(allow_nan=False).map(np.float64)))
def test_a_plain_number_is_the_number(value: np.generic) -> None:
    """Of Python's type, and equal."""
    found = plain_number(value)
    assert type(found) in (int, float)
    assert found == value


def test_what_is_no_scalar_stays_as_it_is() -> None:
    """Texts, lists, truths, and numbers that know more than their value."""
    batch = tokens(64)
    for value in ("32", [1], None, True, batch):
        assert plain_number(value) is value
    assert (is_number(True), is_number("1"), is_number(Fraction(1, 2)), is_number(np.float32(1))) == (0, 0, 1, 1)
    assert (is_whole(True), is_whole(1.0), is_whole(np.int8(1))) == (False, False, True)

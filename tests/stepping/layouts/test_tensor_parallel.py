"""Tensor groups learn what one process learns, and layouts that do not divide are refused with numbers."""

from __future__ import annotations

import functools

import pytest
import torch

from stoker.records import Layout, Plan
from stoker.stepping.world import ALONE
from stoker.testing.ranks import on_ranks
from tests.stepping.driving import largest_difference
from tests.stepping.layouts.conformance import Learned, largest_loss_difference, learned

LAYOUTS = {"tensor": Layout(tensor=2), "sequence": Layout(tensor=2, sequence=True)}

LIMITS = {torch.float64: 1e-9, torch.float32: 1e-6}


@functools.cache
def alone(job: str, dtype: torch.dtype) -> Learned:
    """What one process learns, with each batch in one piece."""
    return learned(ALONE, job, Plan(device="cpu", micro_batch=16), dtype)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("job", ["gpt", "momentum"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tensor_group_learns_what_one_process_does(layout: str, job: str, dtype: torch.dtype) -> None:
    """Losses of 30 updates, and the weights after them, are one process's, and so is the average of weights."""
    plan = Plan(device="cpu", micro_batch=3, layout=LAYOUTS[layout])
    expected = alone(job, dtype)
    for one in on_ranks(LAYOUTS[layout], learned, job, plan, dtype):
        assert largest_loss_difference(one, expected) < LIMITS[dtype]
        assert one.indices == expected.indices
        if dtype == torch.float64:
            assert largest_difference(one.weights, expected.weights) < LIMITS[dtype]
            assert largest_difference(one.averages, expected.averages) < LIMITS[dtype]

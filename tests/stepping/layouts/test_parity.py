"""Every layout learns what one process learns."""

from __future__ import annotations

import pytest
import torch

from stoker.records import Layout, Plan
from stoker.stepping.world import ALONE
from stoker.testing.ranks import on_ranks
from tests.stepping.driving import largest_difference
from tests.stepping.layouts.conformance import JOBS, largest_loss_difference, learned

LAYOUTS = {"replicated": Layout(replicas=2)}
"""Layouts by name; each over two processes."""

LIMITS = {torch.float64: 1e-9, torch.float32: 1e-6}


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("job", ["gpt", "momentum"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_processes_learn_what_one_does(layout: str, job: str, dtype: torch.dtype) -> None:
    """Losses of 30 updates, and the weights after them, are one process's; uneven batches and accumulation included."""
    plan = Plan(device="cpu", micro_batch=3, layout=LAYOUTS[layout])
    alone = learned(ALONE, job, Plan(device="cpu", micro_batch=16), dtype)
    for one in on_ranks(LAYOUTS[layout], learned, job, plan, dtype):
        assert largest_loss_difference(one, alone) < LIMITS[dtype]
        if dtype == torch.float64:
            assert largest_difference(one.weights, alone.weights) < LIMITS[dtype]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_samples_and_their_order_do_not_depend_on_the_layout(layout: str) -> None:
    """What the processes take of each batch, one after the other, is the batch."""
    assert "gpt" in JOBS
    chosen = LAYOUTS[layout]
    plan = Plan(device="cpu", micro_batch=16, layout=chosen)
    alone = learned(ALONE, "gpt", Plan(device="cpu", micro_batch=16), torch.float32, 8)
    found = on_ranks(chosen, learned, "gpt", plan, torch.float32, 8)
    parts = {chosen.data_rank(rank): one.indices for rank, one in enumerate(found)}
    for update, batch in enumerate(alone.indices):
        assert [index for part in sorted(parts) for index in parts[part][update]] == batch

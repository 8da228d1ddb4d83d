from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.records import Estimate, Plan
from tests.records.strategies import record_of

PLAN = Plan(device="cpu", micro_batch=64)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"micro_batch": 0}, "micro_batch must be at least 1, got 0"),
        ({"checkpointed_blocks": -1}, "checkpointed_blocks must be at least 0, got -1"),
        (
            {"checkpointing": "selective"},
            "checkpointed_blocks must be at least 1 where checkpointing is selective",
        ),
        ({"threads": 0}, "threads must be at least 1, got 0"),
        ({"prefetch_batches": 0}, "prefetch_batches must be at least 1, got 0"),
        ({"num_workers": 2}, "loader 'memory' does not go with num_workers=2"),
        ({"loader": "workers"}, "loader 'workers' does not go with num_workers=0"),
        ({"num_workers": -1}, "num_workers=-1"),
        ({"checkpoint_every_s": 0.0}, "checkpoint_every_s must be positive, got 0.0"),
        ({"micro_batch": 10**30}, "micro_batch must be at most 1,099,511,627,776"),
        ({"threads": 10**9}, "threads must be at most 65,536, got 1000000000"),
        ({"prefetch_batches": 10**9}, "prefetch_batches must be at most 65,536"),
        ({"loader": "workers", "num_workers": 10**6}, "num_workers must be at most 65,536"),
        ({"checkpointed_blocks": 10**12}, "checkpointed_blocks must be at most"),
        ({"loss_chunks": 10**12}, "loss_chunks must be at most"),
        ({"checkpoint_every_s": float("inf")}, "checkpoint_every_s must be at most"),
        ({"checkpoint_every_s": float("nan")}, "checkpoint_every_s must be positive, got nan"),
    ],
)
def test_a_plan_that_cannot_be_executed_is_refused(changes: dict, problem: str) -> None:
    """A plan from a file is checked when it is read, not when training is under way."""
    with pytest.raises(ValueError, match=problem):
        dataclasses.replace(PLAN, **changes)


def test_a_plan_in_words() -> None:
    """One line, in the order of what matters, with the singular where there is one."""
    plan = Plan(device="cpu", micro_batch=512, precision="bf16", memory_format="channels_last", threads=2)
    assert plan.in_words() == "bf16 · micro-batch 512 · channels-last · 2 threads · memory loader · default optimiser"
    workers = dataclasses.replace(PLAN, loader="workers", num_workers=2)
    assert workers.in_words().startswith("fp32 · micro-batch 64 · contiguous · 1 thread · 2 loader workers")


def test_a_plan_that_saves_memory_says_how() -> None:
    """Checkpointed blocks, compilation and mapped memory are reported where they are used, and only there."""
    saving = dataclasses.replace(PLAN, checkpointed_blocks=6, compile=True, malloc="mapped")
    assert saving.in_words() == f"{PLAN.in_words()} · 6 checkpointed blocks · compiled · mapped memory"


NUMBERS = st.floats(-1e100, 1e100)


def estimate(low: float, value: float, high: float) -> Estimate:
    """Seconds, measured."""
    return Estimate(value=value, low=low, high=high, unit="s", basis="measured here")


@pytest.mark.parametrize("ends", [(2.0, 1.0, 3.0), (0.0, 4.0, 3.0), (float("nan"), 1.0, 2.0), (0.0, float("nan"), 1.0)])
def test_a_value_lies_within_its_interval(ends: tuple[float, float, float]) -> None:
    """An estimate that contradicts itself is not made."""
    with pytest.raises(ValueError, match="must be within its interval"):
        estimate(*ends)


@given(st.tuples(NUMBERS, NUMBERS, NUMBERS).map(sorted), st.floats(-1e100, 1e100))
def test_scaling_keeps_the_interval_around_the_value(ends: list[float], factor: float) -> None:
    """Whatever the factor and its sign: rounding does not push the value out of its interval."""
    scaled = estimate(*ends).scaled(factor)
    assert scaled.low <= scaled.value <= scaled.high
    assert scaled.value == ends[1] * factor


@given(record_of(Estimate))
def test_scaling_by_one_changes_nothing_but_the_unit(original: Estimate) -> None:
    """The unit is kept unless another is given; the basis always is."""
    assert original.scaled(1.0) == original
    other = original.scaled(1.0, "samples/s")
    assert (other.unit, other.basis) == ("samples/s", original.basis)

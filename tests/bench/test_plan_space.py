"""The plans that are named before anything is timed."""

from __future__ import annotations

import dataclasses

from bench.forecast.plan_space import MOST, every_plan, registered_plans, same_execution
from stoker.records import Coupling, Plan, digest

SEPARABLE = Coupling(kind="separable", group=None, causes=(), evidence="")
GROUPS = Coupling(kind="batch_norm", group=16, causes=("BatchNorm",), evidence="")


def grid(coupling: Coupling = GROUPS) -> list[Plan]:
    """All plans of a convolutional job of batches of 64."""
    return every_plan(coupling=coupling, batch=64, cores=2, num_blocks=6, has_convolutions=True)


def test_the_grid_has_every_combination_once() -> None:
    """Three micro-batches, three ways to have memory, and five settings of two values each."""
    assert len(grid()) == len(set(grid())) == 3 * 3 * 2**5


def test_every_plan_is_legal() -> None:
    """A micro-batch never cuts a coupling group."""
    assert all(GROUPS.problem_with(plan.micro_batch, 64) is None for plan in grid())
    assert {plan.micro_batch for plan in grid()} == {64, 32, 16}


def test_what_a_job_has_not_makes_no_plans() -> None:
    """Without convolutions, blocks, or a second core, those settings have one value."""
    plans = every_plan(coupling=SEPARABLE, batch=2, cores=1, num_blocks=0, has_convolutions=False)
    assert len(plans) == 2 * 2 * 2 * 3  # micro-batches 2 and 1, precision, optimiser, malloc
    assert {plan.memory_format for plan in plans} == {"contiguous"}


def test_at_most_48_are_named_by_a_rule_that_does_not_move() -> None:
    """The same grid gives the same plans, each once, from the grid."""
    named = registered_plans(grid())
    assert len(named) == len(set(named)) == MOST
    assert set(named) <= set(grid())
    assert digest(named) == digest(registered_plans(grid()))


def test_the_likely_ones_are_named_first() -> None:
    """The plain plan is among them, and so are some that checkpoint or map memory."""
    named = registered_plans(grid())
    first = named[: 2 * MOST // 3]
    assert Plan(device="cpu", micro_batch=64, threads=2, malloc="retained") in first
    assert not any(plan.checkpointed_blocks or plan.malloc != "retained" for plan in first)
    assert {plan.malloc for plan in named} == {"retained", "default", "mapped"}
    assert any(plan.checkpointed_blocks for plan in named)


def test_a_small_grid_is_taken_whole() -> None:
    """Nothing is drawn where there are few plans."""
    assert registered_plans(grid()[:10]) == grid()[:10]


def test_plans_that_fetch_differently_execute_the_same() -> None:
    """What an update does not see makes no other plan; its precision does."""
    plan = grid()[0]
    assert same_execution(plan, dataclasses.replace(plan, checkpoint_every_s=5.0, prefetch_batches=4))
    assert not same_execution(plan, dataclasses.replace(plan, precision="bf16"))

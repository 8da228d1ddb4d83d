"""One process's whole state, in the others' steps."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stoker.records import Layout, Plan, Position
from stoker.stepping.world import World
from stoker.testing.ranks import on_ranks
from stoker.training.elastic.state_broadcast import _chunks, broadcast_state
from stoker.training.snapshots import restore_snapshot, snapshot_of
from tests.training.builders import advance, assert_bit_equal, everything_of, step_of, tiny_job
from tests.training.legs import advanced, made

TWO = Layout(replicas=2)
PLAN = Plan(device="cpu", micro_batch=16, layout=TWO)


def catch_up(world: World) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The state of a run of five updates that never stopped; and of one in which process 0 was replaced after three."""
    whole = made(world, "momentum", PLAN)
    _, position = advanced(whole, Position(), 3)
    step = made(world, "momentum", PLAN)
    if world.rank == 1:
        restore_snapshot(step, snapshot_of(whole))
    broadcast_state(step, 1)
    for one in (whole, step):
        advanced(one, position, 5)
    return everything_of(whole), everything_of(step)


def test_a_process_that_comes_anew_takes_over_the_state_of_another() -> None:
    """Weights, buffers, momentum and average; from then on it is as if it had always been there, bit for bit."""
    for whole, step in on_ranks(TWO, catch_up):
        assert len(whole) > 20
        assert_bit_equal(step, whole)


def test_where_no_process_holds_all_there_is_nothing_to_give() -> None:
    """Asking for it is our own bug."""
    step = step_of(tiny_job())
    step.world = World(Layout(shards=2))
    with pytest.raises(ValueError, match="no process holds all of the state in a layout of 2 shards"):
        broadcast_state(step, 0)


@given(sizes=st.dictionaries(st.text(max_size=3), st.integers(0, 50), max_size=20))
def test_tensors_go_in_messages_of_a_limited_size(sizes: dict[str, int]) -> None:
    """Each goes once, in order, empty ones not at all; only one that is too large alone makes a larger message."""
    chunks = list(_chunks(sizes, 60))
    assert [name for names in chunks for name in names] == [name for name, size in sizes.items() if size]
    assert all(sum(sizes[name] for name in names) <= 60 for names in chunks)


def test_the_implementation_of_a_users_optimizer_is_the_steps_own() -> None:
    """The layout that it was saved in may allow another one; its other settings and state come from there."""
    saved, step = (
        step_of(tiny_job(optimizer=functools.partial(torch.optim.AdamW, lr=rate, fused=is_fused)))
        for rate, is_fused in ((1e-2, False), (1e-3, True))
    )
    advance(saved, 0, 2)
    restore_snapshot(step, snapshot_of(saved))
    [group], [saved_group] = step.optimizer.param_groups, saved.optimizer.param_groups
    assert group["fused"] is True
    assert group["lr"] == saved_group["lr"]
    assert_bit_equal(everything_of(step), everything_of(saved))


def test_a_snapshot_goes_on_bit_equal() -> None:
    """Into a step that has made no update, and is changed no more by the one it was taken of."""
    job = tiny_job(average=0.9)
    whole = step_of(job)
    advance(whole, 0, 3)
    snapshot = snapshot_of(whole)
    advance(whole, 3, 5)
    fresh = step_of(job)
    restore_snapshot(fresh, snapshot)
    advance(fresh, 3, 5)
    assert_bit_equal(everything_of(fresh), everything_of(whole))

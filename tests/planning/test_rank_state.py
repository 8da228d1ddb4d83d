"""What a process keeps: parts of tensors to the byte, by shards, tensor groups and stages."""

from __future__ import annotations

import pytest

from stoker.planning.model.communication import sharding_groups
from stoker.planning.model.rank_traces import (
    OptimizerFootprint,
    communication_buffers,
    even_cuts,
    gloo_buffers,
    local_bytes,
    of_stage,
    rank_state,
)
from stoker.records import Layout
from tests.planning.spreading import PARTS, parameter, trace

MOMENTS = OptimizerFootprint(like=2, scalar_bytes=4)
WHOLE = PARTS.trained_bytes


def test_moments_are_read_from_a_trace() -> None:
    """Two tensors like each parameter, and a count for each."""
    assert OptimizerFootprint.of(trace(), PARTS) == MOMENTS


@pytest.mark.parametrize(("rank", "rows"), [(0, 3), (1, 3), (2, 1), (3, 0)])
def test_the_last_shards_of_a_short_tensor_hold_less_or_nothing(rank: int, rows: int) -> None:
    """Seven rows over four: as `torch.chunk` cuts them, three, three, one and none at three each."""
    one = parameter("short", 7, 8)
    layout = Layout(shards=3) if rank < 3 else Layout(shards=4)
    expected = rows if rank < 3 else 1
    assert local_bytes(one, layout, rank) == 4 * 8 * expected


def test_replicas_hold_all_of_it_and_shards_a_part_padded() -> None:
    """Parameters as they are stored, gradients and moments as they are used."""
    assert rank_state(PARTS, Layout(replicas=2), 1, MOMENTS).total == 4 * WHOLE + 6 * 4
    first, last = (rank_state(PARTS, Layout(shards=2), rank, MOMENTS) for rank in (0, 1))
    assert first.parameters == last.parameters == WHOLE // 2 + 4 * 4  # the head's third row of five, padded
    assert first.gradients + last.gradients == WHOLE
    assert first.gradients - last.gradients == 4 * 8
    assert first.optimizer == 2 * first.gradients + 6 * 4


def test_a_tensor_group_divides_what_its_plan_divides() -> None:
    """Blocks in half, table and head whole."""
    state = rank_state(PARTS, Layout(tensor=2), 0, MOMENTS)
    assert state.gradients == 4 * (10 * 8 + 5 * 8) + 4 * 2 * 256 // 2


def test_stages_hold_their_blocks_and_their_end() -> None:
    """The table goes with the first block, the head with the last."""
    layout = Layout(stages=2, replicas=2)
    first, last = (rank_state(PARTS, layout, rank, MOMENTS) for rank in (0, 2))
    assert first.gradients == 4 * (80 + 256)
    assert last.gradients == 4 * (40 + 256)
    assert [one.name for one in of_stage(PARTS, 1, 2).parameters][-1] == "head.weight"
    assert [one.block for one in of_stage(PARTS, 1, 2).parameters] == [0, 0, None]


def test_stages_are_cut_evenly() -> None:
    """Seven blocks on three stages: two, two and three."""
    assert even_cuts(7, 3) == (2, 4)


def test_buffers_of_shards_are_two_blocks_and_the_gradients_of_one() -> None:
    """Kept gathered, it is all of them; replicas have none."""
    root, block = 4 * (80 + 48), 4 * 256
    assert communication_buffers(PARTS, Layout(shards=2)) == root + 2 * block + 2 * block
    assert communication_buffers(PARTS, Layout(shards=2, reshard=False)) == root + 2 * block + 2 * block
    assert communication_buffers(PARTS, Layout(replicas=2)) == 0


def test_gloo_keeps_several_copies_of_what_it_gathers() -> None:
    """More where blocks are gathered twice; none without shards."""
    gathered = sum(sharding_groups(PARTS, 2))
    assert gloo_buffers(PARTS, Layout(replicas=2)) == 0
    assert gathered < gloo_buffers(PARTS, Layout(shards=2, reshard=False)) < gloo_buffers(PARTS, Layout(shards=2))

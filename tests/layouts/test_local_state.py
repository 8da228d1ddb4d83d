"""What a process keeps: parts of tensors to the byte, by shards, tensor groups and stages."""

from __future__ import annotations

import dataclasses

import pytest

from stoker.layouts.local_state import OptimizerFootprint, held_parts, local_bytes, rank_state
from stoker.layouts.replicas import AXIS as REPLICAS
from stoker.layouts.shards import AXIS as SHARDS
from stoker.layouts.shards import sharding_groups
from stoker.layouts.stages import cuts_of
from stoker.records import Layout
from stoker.records.profile import ModelParts
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


@pytest.mark.parametrize(
    ("shape", "shards", "held"),
    [((8, 6, 64), 32, 8 * 6 * 2), ((8, 6, 64), 8, 6 * 64), ((3, 5), 4, 5), ((3, 8), 4, 8), ((2,), 4, 1)],
)
def test_fewer_rows_than_shards_are_divided_along_another_dimension(
    shape: tuple[int, ...], shards: int, held: int
) -> None:
    """As stacked experts: of eight over 32 processes, 24 would hold nothing; matrices are cut into rows."""
    assert local_bytes(parameter("stacked", *shape), Layout(shards=shards), 0) == 4 * held


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
    assert [one.name for one in held_parts(PARTS, layout, 2).parameters][-1] == "head.weight"
    assert [one.block for one in held_parts(PARTS, layout, 2).parameters] == [0, 0, None]


def test_stages_are_cut_evenly() -> None:
    """Seven blocks on three stages, two, two and three; unless the model was cut elsewhere."""
    seven = ModelParts(name="Seven", parameters=(), blocks=tuple("abcdefg"))
    assert cuts_of(seven, 3) == (2, 4)
    assert cuts_of(dataclasses.replace(seven, cuts=(1, 3)), 3) == (1, 3)


def test_buffers_of_shards_are_two_blocks_and_the_gradients_of_one() -> None:
    """Kept gathered, it is all of them; replicas have none."""
    root, block = 4 * (80 + 48), 4 * 256
    assert SHARDS.message_bytes(PARTS, Layout(shards=2), is_on_cpu=False) == root + 2 * block + 2 * block
    assert SHARDS.message_bytes(PARTS, Layout(shards=2, reshard=False), is_on_cpu=False) == root + 2 * block + 2 * block
    assert REPLICAS.message_bytes(PARTS, Layout(replicas=2), is_on_cpu=False) == 0


def test_gloo_keeps_several_copies_of_what_it_gathers() -> None:
    """More where blocks are gathered twice; none without shards."""
    gathered = sum(sharding_groups(PARTS, Layout(shards=2)))
    assert REPLICAS.message_bytes(PARTS, Layout(replicas=2), is_on_cpu=True) == 0
    kept, freed = (
        SHARDS.message_bytes(PARTS, Layout(shards=2, reshard=reshard), is_on_cpu=True) for reshard in (False, True)
    )
    assert gathered < kept < freed

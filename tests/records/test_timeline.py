from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.records.trace import (
    NotPeriodic,
    Occurrence,
    Operation,
    Repetition,
    Segment,
    Storage,
    TensorShape,
    Trace,
    TraceItem,
    TraceSettings,
    in_order,
    prove,
    settled,
    sweeps_of,
    timeline,
)

X = TensorShape(shape=(4,), dtype="fp32")
OPERATIONS = tuple(
    Operation(name=name, inputs=(X,), outputs=(X,), flops=0, bytes_read=16, bytes_written=16)
    for name in ("relu", "threshold_backward", "add_")
)


def storage(born: int, died: int | None, block: int | None = None, num_bytes: int = 16) -> Storage:
    """Memory that lives from `born` to `died`."""
    return Storage(num_bytes=num_bytes, category="activation", born=born, died=died, block=block)


def tower(*, second_relu_bytes: int = 16) -> tuple[Trace, Repetition]:
    """Four blocks: each makes an activation in the forward pass and frees it in the backward pass."""
    forward = [Occurrence(operation=0, phase="forward", part=0, module=b, source=0) for b in range(4)]
    backward = [Occurrence(operation=1, phase="backward", part=0, module=b, source=0) for b in reversed(range(4))]
    storages = [storage(b, 7 - b, num_bytes=second_relu_bytes if b == 2 else 16) for b in range(4)]
    trace = Trace(
        settings=TraceSettings(target="cpu", capability="", micro_batch=1),
        operations=OPERATIONS,
        occurrences=(*forward, *backward),
        storages=tuple(storages),
        events=(1, 2, 3, 4, -4, -3, -2, -1),
        modules=tuple(f"blocks.{b}" for b in range(4)),
        sources=("",),
    )
    segments = tuple(Segment(block=b, start=i, stop=i + 1) for i, b in enumerate((0, 1, 2, 3, 3, 2, 1, 0)))
    return trace, Repetition(module="blocks", num_blocks=9, traced=4, segments=segments, copies=((1, 5),))


def test_births_follow_their_occurrence_and_deaths_the_last():
    """The order of a trace as one sequence."""
    trace, _ = tower()
    items = in_order(
        dataclasses.replace(trace, occurrences=trace.occurrences[:2], storages=(storage(0, 1),) * 2, events=(1, -1))
    )
    assert items == (TraceItem("execution", 0), TraceItem("birth", 0), TraceItem("execution", 1), TraceItem("death", 0))


def test_what_lives_before_comes_first():
    """Births before the update stand before its first occurrence."""
    trace, _ = tower()
    found = in_order(dataclasses.replace(trace, storages=(storage(-1, None),), events=(1,)))
    assert found[0] == TraceItem("birth", 0)
    assert len(found) == 1 + len(trace.occurrences)


def test_an_allocation_before_its_occurrence_keeps_its_place():
    """An event stated to be later than one that follows it has happened before that one; it says by how much."""
    trace, _ = tower()
    early = dataclasses.replace(trace, storages=(storage(-1, 2), storage(3, None)), events=(1, 2, -1))
    found = [item for item in in_order(early) if item.kind != "execution"]
    assert found == [TraceItem("birth", 0), TraceItem("birth", 1, lag=1), TraceItem("death", 0)]


@given(st.permutations([-1, -2, -3]))
def test_the_order_of_deaths_at_one_moment_says_nothing(deaths):
    """However PyTorch frees what dies together, the events are the same; births and moments keep their order."""
    storages = [storage(-1, 5), storage(-1, 5), storage(-1, 5), storage(-1, 6)]
    assert settled((1, 2, 3, 4, *deaths, -4), storages) == (1, 2, 3, 4, -1, -2, -3, -4)


def test_sweeps_go_forth_and_back():
    """Where they turn without anything in between, the outermost run is of both and counts to the first."""
    assert sweeps_of([0, 1, 2, 3, None, 3, 2, 1, 0], 4) == (0, 0, 0, 0, -1, 1, 1, 1, 1)
    assert sweeps_of([0, 1, 2, 3, 2, 1, 0, 1, 2, 3], 4) == (0, 0, 0, 0, 1, 1, 1, 2, 2, 2)
    assert sweeps_of([0, 1, 2, 3, 0, 1, 2, 3], 4) == (0,) * 4 + (1,) * 4
    assert sweeps_of([None, None], 4) == (-1, -1)


@pytest.mark.parametrize("blocks", [[0, 1, 2], [1, 2, 3], [0, 2, 1, 3], [0, 1, None, 2, 3], [3], [0, 1, 2, 3, 2, 1]])
def test_sweeps_go_through_all_blocks(blocks):
    """A block that is passed over, or stands alone, is one of which nothing follows for the others."""
    with pytest.raises(NotPeriodic, match="not all 4 in order"):
        sweeps_of(blocks, 4)


def test_equal_blocks_are_proved():
    """Two blocks in the middle that do the same, each to its own storages."""
    found = prove(*tower())
    assert [run.block for run in found.runs] == [0, 1, 2, 3, 2, 1, 0]
    assert found.sweeps == (0, 0, 0, 0, 1, 1, 1)
    assert found == timeline(*tower())


def test_a_block_with_more_memory_is_not_the_same():
    """Sizes of what is allocated are compared."""
    with pytest.raises(NotPeriodic, match="blocks 1 and 2 differ"):
        prove(*tower(second_relu_bytes=32))


def test_a_block_with_another_operation_is_not_the_same():
    """Operations are compared, in every sweep."""
    trace, repetition = tower()
    occurrences = list(trace.occurrences)
    occurrences[5] = dataclasses.replace(occurrences[5], operation=2)
    with pytest.raises(NotPeriodic, match="blocks 1 and 2 differ in sweep 1"):
        prove(dataclasses.replace(trace, occurrences=tuple(occurrences)), repetition)


def freed_at(*died: int) -> tuple[Trace, Repetition]:
    """As `tower`, with two occurrences of no block after all blocks, 8 and 9, of which some free the activations."""
    trace, repetition = tower()
    storages = [dataclasses.replace(one, died=at) for one, at in zip(trace.storages, died, strict=True)]
    last = Occurrence(operation=2, phase="optimizer", part=0, module=0, source=0)
    deaths = sorted(range(4), key=lambda block: died[block])
    outside = dataclasses.replace(
        trace,
        occurrences=(*trace.occurrences, last, last),
        storages=tuple(storages),
        events=(1, 2, 3, 4, *(-block - 1 for block in deaths)),
    )
    return outside, repetition


def test_memory_of_all_blocks_may_die_outside():
    """What each block makes, and the same occurrence frees of each, is freed there of all blocks."""
    assert prove(*freed_at(8, 8, 8, 8)).births().keys() == {0, 1, 2, 3}


def test_memory_that_dies_at_different_occurrences_outside_is_not_understood():
    """Until when the blocks left out would hold theirs is not known then."""
    with pytest.raises(NotPeriodic, match="blocks 1 and 2 differ"):
        prove(*freed_at(8, 8, 9, 9))


def test_memory_that_skips_a_block_is_not_understood():
    """A storage of block 1 that block 3 frees might be freed by the third, or by the last of the whole model."""
    trace, repetition = tower()
    storages = [dataclasses.replace(one, died=4 if b == 1 else one.died) for b, one in enumerate(trace.storages)]
    skipping = dataclasses.replace(trace, storages=tuple(storages), events=(1, 2, 3, 4, -2, -4, -3, -1))
    with pytest.raises(NotPeriodic, match="block 1 makes is freed by block 3"):
        prove(skipping, repetition)

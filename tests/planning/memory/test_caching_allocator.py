"""The replay of CUDA's caching allocator: its rules one by one, then laws over random sequences."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.planning.model.caching_allocator import LARGE_POOL_BASE, AllocatorSettings, CachingAllocator

KIB, MIB = 1 << 10, 1 << 20


def sizes_of(allocator: CachingAllocator) -> tuple[int, int]:
    """Allocated and reserved bytes."""
    return allocator.allocated, allocator.reserved


@pytest.mark.parametrize(
    ("request_bytes", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        # 10 MiB + 1 lies in a segment of 12 MiB; the rest is split off, being more than 1 MiB.
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        # Of 22 MiB less than a page is left over: not split.
        (22 * MIB - 100, 22 * MIB, 22 * MIB),
        (21 * MIB, 22 * MIB, 22 * MIB),
    ],
)
def test_a_first_request_gets_the_segment_of_its_size(request_bytes: int, block: int, segment: int) -> None:
    """Rounded to 512 bytes, from 2 MiB, 20 MiB or a segment of its own; of large ones 1 MiB is not split off."""
    allocator = CachingAllocator()
    allocator.malloc(request_bytes)
    assert sizes_of(allocator) == (block, segment)


def test_the_best_fit_is_taken_and_the_lowest_among_equals() -> None:
    """Of free blocks of 3, 4 and 3 MiB a request for 2.5 MiB gets the first of 3."""
    allocator = CachingAllocator()
    blocks = [allocator.malloc(size * MIB // 2) for size in (8, 3, 6, 3, 6, 3)]
    for index in (0, 4, 2):
        allocator.free(blocks[index])
    assert allocator.malloc(5 * MIB // 2) == blocks[2]
    assert allocator.malloc(5 * MIB // 2) == blocks[4]
    assert allocator.malloc(5 * MIB // 2) == blocks[0]
    assert allocator.reserved == 20 * MIB


def test_a_small_rest_stays_with_a_large_block() -> None:
    """A free block of 3 MiB serves 2 MiB whole, for a rest of 1 MiB is no block; 2 MiB less 512 bytes split it."""
    allocator = CachingAllocator()
    first, _, second = (allocator.malloc(3 * MIB) for _ in range(3))
    allocator.free(first)
    allocator.malloc(2 * MIB)
    assert allocator.allocated == 9 * MIB
    allocator.free(second)
    # The second joined the rest of its segment: 14 MiB, from which any size is cut.
    allocator.malloc(2 * MIB - 512)
    assert allocator.allocated == 8 * MIB - 512


def test_small_and_large_requests_never_share_a_segment() -> None:
    """A free large block does not serve a small request."""
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(5 * MIB))
    allocator.malloc(MIB)
    assert allocator.reserved == 22 * MIB


def test_freed_neighbours_join_in_any_order() -> None:
    """Three blocks of a segment, freed middle last, serve one request for all of it."""
    allocator = CachingAllocator()
    blocks = [allocator.malloc(6 * MIB) for _ in range(3)]
    for index in (0, 2, 1):
        allocator.free(blocks[index])
    assert allocator.malloc(20 * MIB) == blocks[0]
    assert sizes_of(allocator) == (20 * MIB, 20 * MIB)


def test_segments_do_not_join() -> None:
    """Two free segments of 10 MiB do not serve 20 MiB."""
    allocator = CachingAllocator()
    for block in [allocator.malloc(10 * MIB) for _ in range(2)]:
        allocator.free(block)
    allocator.malloc(20 * MIB)
    assert allocator.reserved == 40 * MIB


def test_at_the_limit_cached_segments_are_returned_and_the_request_tried_again() -> None:
    """With 40 MiB, of which 24 are cached and free, 30 MiB fit; what was reserved at most stays on record."""
    allocator = CachingAllocator(AllocatorSettings(capacity=40 * MIB))
    allocator.free(allocator.malloc(24 * MIB))
    assert allocator.malloc(30 * MIB) is not None
    assert (allocator.reserved, allocator.peak_reserved) == (30 * MIB, 30 * MIB)


def test_a_segment_with_one_block_in_use_cannot_be_returned() -> None:
    """Fragmentation: 20 MiB are reserved for 2 MiB in use, and 30 MiB do not fit into 40."""
    allocator = CachingAllocator(AllocatorSettings(capacity=40 * MIB))
    kept, freed = allocator.malloc(2 * MIB), allocator.malloc(8 * MIB)
    allocator.free(freed)
    assert allocator.malloc(30 * MIB) is None
    allocator.free(kept)
    assert allocator.malloc(30 * MIB) is not None


def test_oversize_blocks_are_neither_split_nor_given_to_small_requests() -> None:
    """With max_split_size 20 MiB, a free block of 64 MiB serves 50 MiB whole, but neither 30 MiB nor 8."""
    allocator = CachingAllocator(AllocatorSettings(max_split_bytes=20 * MIB))
    big = allocator.malloc(64 * MIB)
    allocator.free(big)
    assert allocator.malloc(50 * MIB) == big
    assert sizes_of(allocator) == (64 * MIB, 64 * MIB)
    allocator.free(big)
    allocator.malloc(30 * MIB)  # 64 is 20 MiB more than asked for, and more
    assert allocator.reserved == 94 * MIB
    allocator.malloc(8 * MIB)
    assert allocator.reserved == 114 * MIB


def test_oversize_blocks_are_returned_first() -> None:
    """With max_split_size set, one large cached segment is enough to go, and the others stay cached."""
    allocator = CachingAllocator(AllocatorSettings(capacity=100 * MIB, max_split_bytes=20 * MIB))
    for block in [allocator.malloc(size * MIB) for size in (40, 8, 30)]:
        allocator.free(block)
    assert allocator.malloc(70 * MIB) is None or allocator.reserved <= 100 * MIB
    assert allocator.malloc(4 * MIB) is not None
    assert allocator.reserved == 90 * MIB  # 70, and the 20 of the segment for 8


def test_of_oversize_blocks_the_smallest_that_makes_room_is_returned() -> None:
    """60 and 90 MiB are cached; 25 MiB may use neither, and the 60 go, which is enough."""
    allocator = CachingAllocator(AllocatorSettings(capacity=160 * MIB, max_split_bytes=20 * MIB))
    for block in [allocator.malloc(size * MIB) for size in (90, 60)]:
        allocator.free(block)
    allocator.malloc(25 * MIB)
    assert allocator.reserved == 116 * MIB  # 90, and a segment of 26


@st.composite
def sequences(draw: st.DrawFn) -> list[tuple[int, float]]:
    """Requests of all classes of sizes, and frees of one of the blocks in use (size 0)."""
    size = st.one_of(
        st.just(0), st.integers(1, 2000), st.integers(1, MIB), st.integers(MIB, 10 * MIB), st.integers(1, 90 * MIB)
    )
    return draw(st.lists(st.tuples(size, st.floats(0, 1, exclude_max=True)), max_size=80))


SETTINGS = st.builds(
    AllocatorSettings,
    capacity=st.one_of(st.none(), st.integers(8 * MIB, 300 * MIB)),
    max_split_bytes=st.one_of(st.none(), st.integers(20 * MIB, 60 * MIB)),
    expandable=st.booleans(),
)


@settings(deadline=None, max_examples=150)
@given(sequences(), SETTINGS)
def test_blocks_never_overlap_and_reserved_covers_them(sequence: list[tuple[int, float]], chosen: AllocatorSettings):
    """After each step: blocks are disjoint and large enough, their sum is allocated, and the capacity is kept."""
    allocator, requests = CachingAllocator(chosen), {}
    for size, place in sequence:
        if size:
            address = allocator.malloc(size)
            if address is not None:
                requests[address] = size
        elif requests:
            address = sorted(requests)[int(place * len(requests))]
            del requests[address]
            allocator.free(address)
        blocks = sorted(allocator.blocks.items())
        assert all(start + size <= other for (start, size), (other, _) in pairwise(blocks))
        assert all(allocator.blocks[address] >= wanted for address, wanted in requests.items())
        assert allocator.allocated == sum(size for _, size in blocks) <= allocator.reserved <= allocator.peak_reserved
        assert chosen.capacity is None or allocator.peak_reserved <= chosen.capacity


@settings(deadline=None, max_examples=100)
@given(sequences(), SETTINGS)
def test_when_all_is_free_all_can_be_returned(sequence: list[tuple[int, float]], chosen: AllocatorSettings) -> None:
    """Blocks join to whole segments again: an emptied cache leaves nothing reserved."""
    allocator = CachingAllocator(chosen)
    blocks = [allocator.malloc(size) for size, _ in sequence if size]
    given_out = [block for block in blocks if block is not None]
    order = sorted(zip(given_out, (place for _, place in sequence), strict=False), key=lambda pair: pair[1])
    for block, _ in order:
        allocator.free(block)
    assert allocator.allocated == 0
    allocator.empty_cache()
    assert allocator.reserved == 0


def test_a_second_round_of_the_same_requests_may_need_more() -> None:
    """With all segments cached the best fit is another one: why more than one update is replayed."""
    allocator, peaks = CachingAllocator(), []
    for _ in range(3):
        for block in [allocator.malloc(size * MIB) for size in (5, 15, 10)]:
            allocator.free(block)
        peaks.append(allocator.peak_reserved)
    assert peaks == [30 * MIB, 40 * MIB, 40 * MIB]


def test_the_large_pool_lies_above_the_small_one() -> None:
    """By its address a freed block goes back to its pool."""
    allocator = CachingAllocator()
    assert allocator.malloc(MIB) < LARGE_POOL_BASE <= allocator.malloc(MIB + 1)

"""Segments that grow: mapped granule by granule, and unmapped where memory runs short."""

from __future__ import annotations

from stoker.planning.model.caching_allocator import AllocatorSettings, CachingAllocator

MIB = 1 << 20


def expandable(capacity: int | None = None) -> CachingAllocator:
    """An allocator with `expandable_segments:True`."""
    return CachingAllocator(AllocatorSettings(expandable=True, capacity=capacity))


def test_a_freed_block_grows_into_the_room_behind_it() -> None:
    """16 MiB freed at the end serve 30 MiB with one granule more; fixed segments would need 30 more than the 20."""
    allocator = expandable()
    allocator.free(allocator.malloc(16 * MIB))
    assert allocator.reserved == 20 * MIB
    allocator.malloc(30 * MIB)
    assert (allocator.allocated, allocator.reserved) == (30 * MIB, 40 * MIB)


def test_requests_follow_each_other_without_gaps() -> None:
    """Ten requests of 11 MiB take 120 MiB, not ten segments of 12."""
    allocator = expandable()
    for _ in range(10):
        allocator.malloc(11 * MIB)
    assert allocator.reserved == 120 * MIB


def test_a_rest_of_512_bytes_is_split_off() -> None:
    """Where a fixed segment would keep a rest of up to 1 MiB with the block."""
    allocator = expandable()
    allocator.malloc(20 * MIB - 512)
    assert allocator.allocated == 20 * MIB - 512


def test_whole_granules_in_the_middle_are_unmapped_at_the_limit() -> None:
    """A freed 60 MiB between two blocks gives its whole granules back; the hole is mapped again for what fits it."""
    allocator = expandable(capacity=100 * MIB)
    first, middle, last = allocator.malloc(15 * MIB), allocator.malloc(60 * MIB), allocator.malloc(15 * MIB)
    assert allocator.reserved == 100 * MIB
    allocator.free(middle)
    assert allocator.malloc(80 * MIB) is None
    assert allocator.reserved == 60 * MIB  # the granule each block lies in, and what the two share with the hole
    assert allocator.malloc(44 * MIB) == first + 15 * MIB
    allocator.free(last)
    assert allocator.reserved == 100 * MIB


def test_a_block_that_could_grow_is_kept_for_larger_requests() -> None:
    """5 MiB go into a hole of 8 rather than into the 6 at the end, behind which there is room."""
    allocator = expandable()
    first = allocator.malloc(8 * MIB)
    allocator.malloc(6 * MIB)
    allocator.free(first)
    assert allocator.malloc(5 * MIB) == first


def test_small_requests_grow_by_two_mebibytes() -> None:
    """The small pool's granule is 2 MiB."""
    allocator = expandable()
    for _ in range(5):
        allocator.malloc(MIB)
    assert allocator.reserved == 6 * MIB

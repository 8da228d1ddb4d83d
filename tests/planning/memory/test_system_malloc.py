"""The replay of glibc's malloc: what is mapped, what stays in the heap, and when the heap shrinks."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.planning.model.system_malloc import DEFAULT, MAPPED, PAGE, SystemMalloc

KIB, MIB = 1 << 10, 1 << 20
SLACK = 256 * KIB
"""The pages at both ends, and the room for alignment."""


def test_a_large_request_is_mapped_and_returned() -> None:
    """Nothing of 8 MiB is left when they are freed."""
    malloc = SystemMalloc()
    block = malloc.malloc(8 * MIB)
    assert 8 * MIB < malloc.resident < 8 * MIB + 2 * PAGE
    malloc.free(block)
    assert malloc.resident == 0
    assert malloc.peak_resident > 8 * MIB


def test_what_was_mapped_once_lies_in_the_heap_the_next_time() -> None:
    """The threshold moves: the second 8 MiB, below a block in use, stay resident when freed."""
    malloc = SystemMalloc()
    malloc.free(malloc.malloc(8 * MIB))
    block = malloc.malloc(8 * MIB - 8 * KIB)
    malloc.malloc(MIB)
    malloc.free(block)
    assert malloc.resident > 9 * MIB - SLACK


def test_beyond_32_mebibytes_requests_stay_mapped() -> None:
    """The threshold goes no higher."""
    malloc = SystemMalloc()
    malloc.free(malloc.malloc(64 * MIB))
    block = malloc.malloc(40 * MIB)
    malloc.malloc(MIB)
    malloc.free(block)
    assert malloc.resident < MIB + SLACK


def test_mapped_keeps_only_what_lives() -> None:
    """Under `mapped` no freed tensor of 64 KiB or more stays, whatever was freed before."""
    malloc = SystemMalloc(MAPPED)
    for _ in range(3):
        blocks = [malloc.malloc(size * MIB) for size in (1, 8, 2, 8, 1)]
        for block in blocks[1:]:
            malloc.free(block)
        assert malloc.resident < MIB + SLACK
        malloc.free(blocks[0])
    assert malloc.peak_resident < 20 * MIB + SLACK


def test_the_heap_shrinks_from_its_end_only() -> None:
    """Freed small blocks go back once all above them are free."""
    malloc = SystemMalloc()
    blocks = [malloc.malloc(100 * KIB) for _ in range(50)]
    for block in blocks[:-1]:
        malloc.free(block)
    held = malloc.resident
    assert held > 5_000_000
    malloc.free(blocks[-1])
    assert malloc.resident < SLACK


def test_the_heaps_free_end_may_be_twice_the_largest_block_that_was_mapped() -> None:
    """After 8 MiB were mapped and freed, 11 MiB at the end stay, and 18 do not."""
    malloc = SystemMalloc()
    malloc.free(malloc.malloc(8 * MIB))
    for sizes, stays in (((6, 5), True), ((6, 6, 6), False)):
        for block in [malloc.malloc(size * MIB) for size in sizes]:
            malloc.free(block)
        assert (malloc.resident > 10 * MIB) is stays


def test_a_hole_serves_only_what_is_a_little_smaller() -> None:
    """Room to align is asked for with each tensor, so a hole just as large as the last one is passed over."""
    malloc = SystemMalloc()
    blocks = [malloc.malloc(100 * KIB) for _ in range(3)]
    before = malloc.resident
    malloc.free(blocks[1])
    assert malloc.malloc(100 * KIB - 128) == blocks[1]
    assert malloc.resident == before
    malloc.free(blocks[1])
    assert malloc.malloc(100 * KIB) != blocks[1]
    assert malloc.resident > before


@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.tuples(st.one_of(st.just(0), st.integers(1, 4 * MIB)), st.floats(0, 1, exclude_max=True)), max_size=80),
    st.sampled_from((DEFAULT, MAPPED)),
)
def test_resident_memory_covers_what_lives(sequence: list[tuple[int, float]], chosen) -> None:
    """Never less than what was asked for and not yet freed; all blocks freed, at most the heap's padding remains."""
    malloc, live = SystemMalloc(chosen), []
    for size, place in sequence:
        if size:
            live.append((malloc.malloc(size), size))
        elif live:
            malloc.free(live.pop(int(place * len(live)))[0])
        assert sum(size for _, size in live) <= malloc.resident <= malloc.peak_resident
    for block, _ in live:
        malloc.free(block)
    assert malloc.resident <= max(2 * 4 * MIB, SLACK) + SLACK

"""The pools of CUDA's caching allocator: segments had from the device, cut into blocks.

Source: c10/cuda/CUDACachingAllocator.cpp (`get_free_block`, `should_split`, `get_allocation_size`, `alloc_block`,
`release_available_cached_blocks`, `release_block`) and c10/core/AllocatorConfig.h.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from stoker.planning.memory.free_blocks import FreeBlocks

MIN_BLOCK = 512
"""Sizes of blocks are multiples of this [bytes]; `kMinBlockSize`."""
SMALL_REQUEST = 1 << 20
"""The largest request that is served from the small pool [bytes]; `kSmallSize`."""
SMALL_SEGMENT = 2 << 20
"""A segment of the small pool [bytes]; `kSmallBuffer`."""
LARGE_SEGMENT = 20 << 20
"""A segment for requests between 1 and 10 MiB [bytes]; `large_segment_size`."""
OWN_SEGMENT_FROM = 10 << 20
"""From here on a request gets a segment of its own size [bytes]; `kMinLargeAlloc`."""
SEGMENT_ROUNDING = 2 << 20
"""Such segments are multiples of this [bytes]; `kRoundLarge`."""

LARGE_POOL_BASE = 1 << 48
"""Addresses from here on belong to the large pool."""
_GAP = MIN_BLOCK
"""Between segments, so that blocks of two never touch."""


@dataclass(slots=True)
class Ledger:
    """What is held of the device now and at most [bytes]."""

    capacity: int | None
    reserved: int = 0
    peak_reserved: int = 0

    def take(self, num_bytes: int) -> bool:
        """Ask the device for so much; False where it has it not."""
        if self.capacity is not None and self.reserved + num_bytes > self.capacity:
            return False
        self.reserved += num_bytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    def give_back(self, num_bytes: int) -> None:
        """Return so much to the device."""
        self.reserved -= num_bytes


def rounded(num_bytes: int) -> int:
    """Size of the block that a request for so many bytes gets at least [bytes]."""
    return max(MIN_BLOCK, -(-num_bytes // MIN_BLOCK) * MIN_BLOCK)


def segment_bytes(size: int) -> int:
    """Size of the segment asked for when no free block suffices for `size` bytes, already rounded [bytes]."""
    if size <= SMALL_REQUEST:
        return SMALL_SEGMENT
    if size < OWN_SEGMENT_FROM:
        return LARGE_SEGMENT
    return -(-size // SEGMENT_ROUNDING) * SEGMENT_ROUNDING


class Pool(ABC):
    """Blocks for small or for large requests. What it takes of the device and gives back is written in `ledger`."""

    def __init__(self, ledger: Ledger, *, base: int) -> None:
        self.ledger = ledger
        self.free = FreeBlocks()
        self.is_small = base < LARGE_POOL_BASE

    @abstractmethod
    def find(self, size: int) -> int | None:
        """Address of the free block to be used for `size` bytes; None where there is none."""

    @abstractmethod
    def grow(self, size: int) -> int | None:
        """Address of a free block of at least `size` bytes, new from the device; None where it has no more."""

    @abstractmethod
    def smallest_rest(self, size: int) -> int | None:
        """Bytes from which the rest of a block cut to `size` is split off; None where it never is."""

    @abstractmethod
    def give_back_oversize(self, size: int) -> bool:
        """Return just enough large free segments to make room for `size`; whether that was possible."""

    @abstractmethod
    def give_back(self) -> None:
        """Return to the device all that is free and may be returned."""

    def take(self, address: int, size: int) -> int:
        """Take `size` bytes of a free block; returns how much the block taken has."""
        have = self.free.remove(address)
        smallest = self.smallest_rest(size)
        if smallest is None or have - size < smallest:
            return have
        self.free.add(address + size, have - size)
        return size


class SegmentedPool(Pool):
    """Segments of fixed size: PyTorch's default."""

    def __init__(self, ledger: Ledger, *, base: int, max_split_bytes: int | None) -> None:
        super().__init__(ledger, base=base)
        self._segments: dict[int, int] = {}
        self._next_address = base
        self._max_split = max_split_bytes

    def find(self, size: int) -> int | None:
        """The best fit, unless splitting would leave an oversize block or waste one."""
        address = self.free.best_fit(size)
        if address is None or self._max_split is None:
            return address
        have = self.free.sizes[address]
        if size < self._max_split <= have or (size >= self._max_split and have >= size + LARGE_SEGMENT):
            return None
        return address

    def grow(self, size: int) -> int | None:
        """A new segment."""
        segment = segment_bytes(size)
        if not self.ledger.take(segment):
            return None
        address = self._next_address
        self._next_address += segment + _GAP
        self._segments[address] = segment
        self.free.add(address, segment)
        return address

    def smallest_rest(self, size: int) -> int | None:
        """Small blocks are split to the last 512 bytes, large ones only if more than 1 MiB remains."""
        if self.is_small:
            return MIN_BLOCK
        if self._max_split is not None and size >= self._max_split:
            return None
        return SMALL_REQUEST + 1

    def give_back_oversize(self, size: int) -> bool:
        """The smallest segment that suffices, else the largest until they do."""
        if self._max_split is None:
            return False
        wanted, given = max(size, self._max_split), 0
        oversize = [(have, at) for have, at in self.free.fitting(self._max_split) if self._segments.get(at) == have]
        enough = [(have, at) for have, at in oversize if have >= wanted]
        for have, address in enough[:1] or reversed(oversize):
            if given >= wanted:
                break
            self._return(address)
            given += have
        return given >= wanted

    def give_back(self) -> None:
        """All segments that are wholly free."""
        whole = [a for a, size in self._segments.items() if self.free.sizes.get(a) == size]
        for address in whole:
            self._return(address)

    def _return(self, address: int) -> None:
        self.free.remove(address)
        self.ledger.give_back(self._segments.pop(address))

"""Replay of PyTorch's CUDA caching allocator: the memory that a process holds of a GPU, to the byte.

PyTorch asks the driver for segments and cuts them into blocks. A request is rounded up to 512 bytes and gets the
smallest free block of its pool that suffices; a rest worth keeping is split off, and freed neighbours join again.
Requests up to 1 MiB come from segments of 2 MiB, those below 10 MiB from segments of 20 MiB, larger ones from segments
of their own size, rounded up to 2 MiB. If the device has no more, cached segments that are wholly free go back to it
and the request is tried again; then it is out of memory.

With `expandable_segments:True` each pool is one range of addresses, into which memory is mapped granule by granule, so
that a freed block and the room behind it can serve a larger request. If the device has no more, all granules that are
wholly free are unmapped.

Source: c10/cuda/CUDACachingAllocator.cpp (`malloc`, `get_free_block`, `should_split`, `get_allocation_size`,
`alloc_block`, `release_available_cached_blocks`, `release_cached_blocks`, `free_block`, `try_merge_blocks`,
`find_expandable_block`, `map_block`, `unmap_block`) and c10/core/AllocatorConfig.h. Left out: several streams, graph
captures, `garbage_collection_threshold`, `roundup_power2_divisions` (off by default), and the end of an expandable
range at 9/8 of the device's memory. The driver's addresses are unknown: segments are ordered as they were asked for,
which decides only between free blocks of the same size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AllocatorSettings:
    """Settings of `PYTORCH_CUDA_ALLOC_CONF`, and the device's memory.

    `capacity` limits all segments together [bytes] (None: no limit), `max_split_bytes` is the size from which blocks
    are not split (None: all are; PyTorch's default), `expandable`: segments can grow.
    """

    capacity: int | None = None
    max_split_bytes: int | None = None
    expandable: bool = False


class CachingAllocator:
    """An allocator with nothing allocated yet.

    `allocated` and `peak_allocated` count whole blocks [bytes], as `torch.cuda.memory_allocated` does.
    """

    def __init__(self, settings: AllocatorSettings | None = None) -> None:
        settings = settings or AllocatorSettings()
        self._ledger = Ledger(settings.capacity)
        self._small: AllocatorPool
        self._large: AllocatorPool
        if settings.expandable:
            self._small, self._large = (ExpandablePool(self._ledger, base=base) for base in (0, LARGE_POOL_BASE))
        else:
            self._small, self._large = (
                SegmentedPool(self._ledger, base=base, max_split_bytes=settings.max_split_bytes)
                for base in (0, LARGE_POOL_BASE)
            )
        self._taken: dict[int, int] = {}
        self.allocated = 0
        self.peak_allocated = 0

    @property
    def reserved(self) -> int:
        """Memory of all segments now [bytes], as `torch.cuda.memory_reserved`."""
        return self._ledger.reserved

    @property
    def peak_reserved(self) -> int:
        """Peak memory of all segments [bytes], as `torch.cuda.max_memory_reserved`."""
        return self._ledger.peak_reserved

    @property
    def blocks(self) -> dict[int, int]:
        """Sizes of the blocks in use [bytes] by address."""
        return dict(self._taken)

    def malloc(self, num_bytes: int) -> int | None:
        """Allocate `num_bytes` > 0; returns the block's address, None if the device is out of memory."""
        size = rounded(num_bytes)
        pool = self._small if size <= SMALL_REQUEST else self._large
        address = pool.find(size)
        if address is None:
            address = pool.grow(size)
        if address is None and pool.give_back_oversize(size):
            address = pool.grow(size)
        if address is None:
            self.empty_cache()
            address = pool.grow(size)
        if address is None:
            return None
        taken = pool.take(address, size)
        self._taken[address] = taken
        self.allocated += taken
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return address

    def free(self, address: int) -> None:
        """Free a block; its segment stays cached."""
        size = self._taken.pop(address)
        self.allocated -= size
        (self._large if address >= LARGE_POOL_BASE else self._small).free.absorb(address, size)

    def empty_cache(self) -> None:
        """Return free segments to the device, as `torch.cuda.empty_cache`."""
        self._large.give_back()
        self._small.give_back()


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
    """Memory held of the device, now and at the peak [bytes]."""

    capacity: int | None
    reserved: int = 0
    peak_reserved: int = 0

    def take(self, num_bytes: int) -> bool:
        """Take memory of the device; False if it has too little."""
        if self.capacity is not None and self.reserved + num_bytes > self.capacity:
            return False
        self.reserved += num_bytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    def give_back(self, num_bytes: int) -> None:
        """Return memory to the device."""
        self.reserved -= num_bytes


def rounded(num_bytes: int) -> int:
    """Least size of the block for a request [bytes]."""
    return max(MIN_BLOCK, -(-num_bytes // MIN_BLOCK) * MIN_BLOCK)


def segment_bytes(size: int) -> int:
    """Size of a new segment for a request of `size` bytes, already rounded [bytes]."""
    if size <= SMALL_REQUEST:
        return SMALL_SEGMENT
    if size < OWN_SEGMENT_FROM:
        return LARGE_SEGMENT
    return -(-size // SEGMENT_ROUNDING) * SEGMENT_ROUNDING


class AllocatorPool(ABC):
    """Blocks for small or for large requests; `ledger` counts the memory taken of the device and given back."""

    def __init__(self, ledger: Ledger, *, base: int) -> None:
        self.ledger = ledger
        self.free = FreeBlocks()
        self.is_small = base < LARGE_POOL_BASE

    @abstractmethod
    def find(self, size: int) -> int | None:
        """Address of the free block to use for `size` bytes, or None."""

    @abstractmethod
    def grow(self, size: int) -> int | None:
        """Address of a free block of at least `size` bytes, new from the device; None if it has no more."""

    @abstractmethod
    def smallest_rest(self, size: int) -> int | None:
        """Size from which the rest of a block cut to `size` is split off [bytes]; None: never."""

    @abstractmethod
    def give_back_oversize(self, size: int) -> bool:
        """Return just enough large free segments to make room for `size`; True if that was possible."""

    @abstractmethod
    def give_back(self) -> None:
        """Return all free memory that may be returned to the device."""

    def take(self, address: int, size: int) -> int:
        """Take at least `size` bytes of a free block; returns the size of the block taken [bytes]."""
        have = self.free.remove(address)
        smallest = self.smallest_rest(size)
        if smallest is None or have - size < smallest:
            return have
        self.free.add(address + size, have - size)
        return size


class SegmentedPool(AllocatorPool):
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
        needed, given = max(size, self._max_split), 0
        fitting = self.free.fitting(self._max_split)
        oversize = [(have, address) for have, address in fitting if self._segments.get(address) == have]
        enough = [(have, address) for have, address in oversize if have >= needed]
        for have, address in enough[:1] or reversed(oversize):
            if given >= needed:
                break
            self._return(address)
            given += have
        return given >= needed

    def give_back(self) -> None:
        """All segments that are wholly free."""
        whole = [a for a, size in self._segments.items() if self.free.sizes.get(a) == size]
        for address in whole:
            self._return(address)

    def _return(self, address: int) -> None:
        self.free.remove(address)
        self.ledger.give_back(self._segments.pop(address))


_RANGE = 1 << 47
"""Size of a pool's range of addresses: more than any device has bytes."""


class ExpandablePool(AllocatorPool):
    """One range of addresses, mapped on demand."""

    def __init__(self, ledger: Ledger, *, base: int) -> None:
        super().__init__(ledger, base=base)
        self._granule = SMALL_SEGMENT if self.is_small else LARGE_SEGMENT
        self._base = base
        self._holes = [base]
        self._hole_sizes = {base: _RANGE}

    def find(self, size: int) -> int | None:
        """The block that could grow the least, among the first ones by size."""
        best, smallest = None, 0
        for have, address in self.free.fitting(size):
            # A block counts as large as it could become, but the search ends at the first that is no smaller.
            could_be = have + self._hole_sizes.get(address + have, 0)
            if best is not None and could_be >= smallest:
                break
            best, smallest = address, could_be
        return best

    def smallest_rest(self, size: int) -> int | None:
        """Blocks are split to the last 512 bytes."""
        return MIN_BLOCK

    def grow(self, size: int) -> int | None:
        """Granules mapped behind the lowest free block with room behind it."""
        # A search begins at each hole, or at the free block right before it, by address.
        before = ((hole, self.free.ending_at(hole)) for hole in self._holes)
        starts = (hole if block is None else block for hole, block in before)
        start = next(start for start in starts if self._room_from(start, size) >= size)
        if start not in self.free.sizes:
            mapped = self._map(start, min(self._hole_sizes[start], size))
            if mapped is None:
                return None
            start = mapped
        while (have := self.free.sizes[start]) < size:
            hole = start + have
            if self._map(hole, min(self._hole_sizes[hole], size - have)) is None:
                return None
        return start

    def give_back_oversize(self, size: int) -> bool:
        """None: a range is one segment, and stays."""
        return False

    def give_back(self) -> None:
        """All granules without a block in use."""
        for address, size in list(self.free.sizes.items()):
            first = self._base - (self._base - address) // self._granule * self._granule
            last = self._base + (address + size - self._base) // self._granule * self._granule
            if first < last:
                self._unmap(address, size, first, last)

    def _room_from(self, address: int, enough: int) -> int:
        """Bytes from `address` on without a block in use; counted no further than `enough`."""
        room = 0
        while room < enough:
            more = self.free.sizes.get(address + room) or self._hole_sizes.get(address + room)
            if more is None:
                break
            room += more
        return room

    def _map(self, hole: int, size: int) -> int | None:
        """Map the first `size` bytes of a hole, rounded up to granules; returns where the free block there begins."""
        mapped = -(-size // self._granule) * self._granule
        if not self.ledger.take(mapped):
            return None
        self._holes.remove(hole)
        rest = self._hole_sizes.pop(hole) - mapped
        if rest > 0:
            self._add_hole(hole + mapped, rest)
        return self.free.absorb(hole, mapped)

    def _unmap(self, address: int, size: int, first: int, last: int) -> None:
        """Make the granules from `first` to `last` of a free block a hole."""
        self.free.remove(address)
        if address < first:
            self.free.add(address, first - address)
        if last < address + size:
            self.free.add(last, address + size - last)
        self.ledger.give_back(last - first)
        following = self._hole_sizes.get(last)
        if following is not None:
            self._holes.remove(last)
            last += self._hole_sizes.pop(last)
        index = bisect_left(self._holes, first)
        if index > 0 and (before := self._holes[index - 1]) + self._hole_sizes[before] == first:
            self._hole_sizes[before] += last - first
        else:
            self._add_hole(first, last - first)

    def _add_hole(self, address: int, size: int) -> None:
        insort(self._holes, address)
        self._hole_sizes[address] = size


_ADDRESS_BITS = 50
_ADDRESS = (1 << _ADDRESS_BITS) - 1


class FreeBlocks:
    """Free blocks [bytes], found by size; `absorb` joins a block with its neighbours.

    A block is one integer, its size above its address: in sorted order the first that is not smaller than a request is
    the best fit, at the lowest address among equals.
    """

    def __init__(self) -> None:
        self._keys: list[int] = []
        self.sizes: dict[int, int] = {}
        self._starts: dict[int, int] = {}

    def add(self, address: int, size: int) -> None:
        """Add a block without joining it."""
        insort(self._keys, size << _ADDRESS_BITS | address)
        self.sizes[address] = size
        self._starts[address + size] = address

    def remove(self, address: int) -> int:
        """Remove a block; returns its size [bytes]."""
        size = self.sizes.pop(address)
        del self._starts[address + size]
        del self._keys[bisect_left(self._keys, size << _ADDRESS_BITS | address)]
        return size

    def best_fit(self, size: int) -> int | None:
        """Address of the smallest block of at least `size` bytes."""
        index = bisect_left(self._keys, size << _ADDRESS_BITS)
        return self._keys[index] & _ADDRESS if index < len(self._keys) else None

    def fitting(self, size: int) -> list[tuple[int, int]]:
        """(size, address) of all blocks of at least `size` bytes, the smallest first."""
        keys = self._keys[bisect_left(self._keys, size << _ADDRESS_BITS) :]
        return [(key >> _ADDRESS_BITS, key & _ADDRESS) for key in keys]

    def ending_at(self, address: int) -> int | None:
        """Address of the block that ends at `address`, or None."""
        return self._starts.get(address)

    def absorb(self, address: int, size: int) -> int:
        """Add a block, joined with those it touches; returns the address of the whole [bytes from 0]."""
        if address + size in self.sizes:
            size += self.remove(address + size)
        before = self._starts.get(address)
        if before is not None:
            size += self.remove(before)
            address = before
        self.add(address, size)
        return address

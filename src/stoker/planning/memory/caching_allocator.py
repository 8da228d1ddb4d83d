"""CUDA's caching allocator of PyTorch, replayed: what a process holds of a GPU, to the byte.

PyTorch asks the driver for segments and cuts them into blocks. A request is rounded up to 512 bytes and gets the
smallest free block of its pool that suffices; a rest worth keeping is split off, and freed neighbours join again.
Requests up to 1 MiB come from segments of 2 MiB, those below 10 MiB from segments of 20 MiB, larger ones from segments
of their own size, rounded up to 2 MiB. Where the device has no more, cached segments that are wholly free go back to it
and the request is tried again; then it is out of memory.

Source: c10/cuda/CUDACachingAllocator.cpp (`malloc`, `get_free_block`, `should_split`, `get_allocation_size`,
`alloc_block`, `release_available_cached_blocks`, `release_cached_blocks`, `free_block`, `try_merge_blocks`) and
c10/core/AllocatorConfig.h. Left out: several streams, graph captures, `garbage_collection_threshold` and
`roundup_power2_divisions` (off unless asked for). The driver's addresses are not known: segments lie in the order in
which they were asked for, which decides only between free blocks of the same size.
"""

from __future__ import annotations

from dataclasses import dataclass

from stoker.planning.memory.expandable_segments import ExpandablePool
from stoker.planning.memory.pools import LARGE_POOL_BASE, SMALL_REQUEST, Ledger, Pool, SegmentedPool, rounded


@dataclass(frozen=True, kw_only=True)
class AllocatorSettings:
    """What a user may set in `PYTORCH_CUDA_ALLOC_CONF`, and how much of the device there is.

    `capacity` is what segments may take altogether [bytes] (None: no limit), `max_split_bytes` the size from which
    blocks are not split (None: all are; PyTorch's default), `expandable` whether segments can grow.
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
        self._small, self._large = (_pool(self._ledger, base, settings) for base in (0, LARGE_POOL_BASE))
        self._taken: dict[int, int] = {}
        self.allocated = 0
        self.peak_allocated = 0

    @property
    def reserved(self) -> int:
        """What segments take of the device now [bytes], as `torch.cuda.memory_reserved`."""
        return self._ledger.reserved

    @property
    def peak_reserved(self) -> int:
        """The most segments ever took [bytes], as `torch.cuda.max_memory_reserved`."""
        return self._ledger.peak_reserved

    @property
    def blocks(self) -> dict[int, int]:
        """Sizes of the blocks in use [bytes] by address."""
        return dict(self._taken)

    def malloc(self, num_bytes: int) -> int | None:
        """Allocate `num_bytes` > 0; returns the block's address, None where the device is out of memory."""
        size = rounded(num_bytes)
        pool = self._small if size <= SMALL_REQUEST else self._large
        address = pool.find(size)
        if address is None:
            address = self._grow(pool, size)
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
        """Return what is free to the device, as `torch.cuda.empty_cache`."""
        self._large.give_back()
        self._small.give_back()

    def _grow(self, pool: Pool, size: int) -> int | None:
        address = pool.grow(size)
        if address is None and pool.give_back_oversize(size):
            address = pool.grow(size)
        if address is None:
            self.empty_cache()
            address = pool.grow(size)
        return address


def _pool(ledger: Ledger, base: int, settings: AllocatorSettings) -> Pool:
    if settings.expandable:
        return ExpandablePool(ledger, base=base)
    return SegmentedPool(ledger, base=base, max_split_bytes=settings.max_split_bytes)

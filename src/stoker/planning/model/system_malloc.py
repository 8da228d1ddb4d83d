"""Replay of the GNU C library's malloc: the system memory that a process on a CPU keeps.

PyTorch asks malloc for each tensor on a CPU. Large requests are mapped from the system and go back to it when freed;
the others lie in a heap that grows at its end, keeps freed chunks, and shrinks only from its end. The threshold moves:
each time a mapped block is freed, requests up to its size count as small from then on, up to 32 MiB. So a training
process soon has nearly all tensors in a heap with holes, 15 to 60 % larger than its live chunks. Setting the threshold
(`M_MMAP_THRESHOLD`) stops that: all large tensors stay mapped.

Source: glibc 2.36, malloc/malloc.c (`_int_malloc`, `sysmalloc`, `_int_free`, `systrim`, `_mid_memalign`,
`munmap_chunk`'s caller `__libc_free` for the moving threshold); c10/core/impl/alloc_cpu.cpp (`posix_memalign` to 64
bytes). From 2.38 on glibc looks for chunks that are aligned already, and reuses more. Left out: the arenas of other
threads, the caches of small chunks, and all requests that are not tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from stoker.planning.model.caching_allocator import FreeBlocks

PAGE = 4096
"""Size of a page of the system's memory [bytes]."""
ALIGNMENT = 64
"""PyTorch's CPU allocator aligns tensors to this [bytes]; `c10::gAlignment`."""
_HEADER = 16
"""A chunk's header and the rounding of its size [bytes]; `MALLOC_ALIGNMENT`."""
_MIN_CHUNK = 32
"""The smallest chunk [bytes]; `MINSIZE`."""
_TRIM_FROM = 64 << 10
"""Only a freed chunk at least so large lets the heap shrink [bytes]; `FASTBIN_CONSOLIDATION_THRESHOLD`."""
_LARGEST_THRESHOLD = 32 << 20
"""The moving threshold goes no higher [bytes]; `DEFAULT_MMAP_THRESHOLD_MAX`."""


@dataclass(frozen=True, kw_only=True)
class MallocSettings:
    """malloc's parameters [bytes]: sizes from which requests are mapped, and the heap's free end is returned.

    `is_moving`: both follow the mapped blocks that are freed, as they do until one is set. `pad` is the growth of the
    heap beyond the request.
    """

    mmap_threshold: int = 128 << 10
    trim_threshold: int = 128 << 10
    is_moving: bool = True
    pad: int = 128 << 10


MAPPED = MallocSettings(mmap_threshold=64 << 10, trim_threshold=0, is_moving=False)
"""Settings of a plan's `malloc="mapped"`."""
RETAINED = MallocSettings(mmap_threshold=2**62, trim_threshold=2**31 - 1, is_moving=False)
"""Settings of `malloc="retained"`."""
DEFAULT = MallocSettings()
"""glibc's defaults."""


class SystemMalloc:
    """An empty heap.

    `resident` and `peak_resident` are pages of the heap touched and not yet returned, and mapped blocks [bytes].
    Tensors are assumed to be written from end to end.
    """

    def __init__(self, settings: MallocSettings = DEFAULT) -> None:
        self._mmap_threshold, self._trim_threshold = settings.mmap_threshold, settings.trim_threshold
        self._is_moving, self._pad = settings.is_moving, settings.pad
        self._free = FreeBlocks()
        self._taken: dict[int, int] = {}
        self._top = self._touched = self._end = 0
        self._mapped: dict[int, int] = {}
        self._mapped_bytes = 0
        self._next_mapping = -1
        self.peak_resident = 0

    @property
    def resident(self) -> int:
        """System memory that the process keeps now [bytes]."""
        return self._touched + self._mapped_bytes

    def malloc(self, num_bytes: int) -> int:
        """Allocate a chunk of at least `num_bytes` [bytes]; returns an address for `free`."""
        # posix_memalign asks for room to move the chunk to a multiple of 64, and gives the rest back.
        needed, size = _chunk(num_bytes + ALIGNMENT + _MIN_CHUNK), _chunk(num_bytes)
        address = self._free.best_fit(needed)
        if address is not None:
            have = self._free.remove(address)
            if have - size >= _MIN_CHUNK:
                self._free.add(address + size, have - size)
                have = size
            self._taken[address] = have
        elif self._end - self._top >= needed + _MIN_CHUNK:
            address = self._from_top(size)
        elif needed >= self._mmap_threshold:
            address = self._next_mapping
            self._next_mapping -= 1
            self._mapped[address] = _pages(needed + _HEADER // 2)
            self._mapped_bytes += self._mapped[address]
        else:
            missing = needed + self._pad + _MIN_CHUNK - (self._end - self._top)
            self._end += _pages(missing)
            address = self._from_top(size)
        self.peak_resident = max(self.peak_resident, self.resident)
        return address

    def free(self, address: int) -> None:
        """Free a chunk by its address."""
        if address < 0:
            size = self._mapped.pop(address)
            self._mapped_bytes -= size
            if self._is_moving and self._mmap_threshold < size <= _LARGEST_THRESHOLD:
                self._mmap_threshold, self._trim_threshold = size, 2 * size
            return
        start = self._free.absorb(address, self._taken.pop(address))
        size = self._free.sizes[start]
        if start + size == self._top:
            self._free.remove(start)
            self._top = start
            size += self._end - start - size
        if size >= _TRIM_FROM and self._end - self._top >= self._trim_threshold:
            extra = (self._end - self._top - _MIN_CHUNK - 1 - self._pad) // PAGE * PAGE
            if extra > 0:
                self._end -= extra
                self._touched = min(self._touched, self._end)

    def _from_top(self, size: int) -> int:
        address = self._top
        self._taken[address] = size
        self._top += size
        self._touched = max(self._touched, _pages(self._top))
        return address


def _chunk(num_bytes: int) -> int:
    """Size of the chunk for a request [bytes]."""
    return max(_MIN_CHUNK, -(-(num_bytes + _HEADER // 2) // _HEADER) * _HEADER)


def _pages(num_bytes: int) -> int:
    """Rounded up to pages [bytes]."""
    return -(-num_bytes // PAGE) * PAGE

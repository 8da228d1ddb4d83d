"""The variant of CUDA's caching allocator whose segments can grow: `expandable_segments:True`.

Each pool is one range of addresses, into which memory is mapped granule by granule, so that a freed block and the room
behind it can serve a larger request. Where the device has no more, all granules that are wholly free are unmapped.

Source: c10/cuda/CUDACachingAllocator.cpp (`find_expandable_block`, `map_block`, `try_allocate_expandable_block`,
`get_free_block`, `unmap_block`, `ExpandableSegment`). Left out: the range's end, at 9/8 of the device's memory, beyond
which PyTorch opens another.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from stoker.planning.memory.pools import LARGE_SEGMENT, MIN_BLOCK, SMALL_SEGMENT, Ledger, Pool

_RANGE = 1 << 47
"""Addresses a pool has: more than any device has bytes."""


class ExpandablePool(Pool):
    """One range of addresses, mapped where it is needed."""

    def __init__(self, ledger: Ledger, *, base: int) -> None:
        super().__init__(ledger, base=base)
        self._granule = SMALL_SEGMENT if self.is_small else LARGE_SEGMENT
        self._base = base
        self._holes = [base]
        self._hole_sizes = {base: _RANGE}

    def find(self, size: int) -> int | None:
        """The block that could grow the least, among those that are at first glance the best fit."""
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
        start = next(start for start in self._starts() if self._room_from(start, size) >= size)
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

    def _starts(self) -> list[int]:
        """Where a search may begin: at each hole, or at the free block right before it, by address."""
        before = (self.free.ending_at(hole) for hole in self._holes)
        return [hole if start is None else start for hole, start in zip(self._holes, before, strict=True)]

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

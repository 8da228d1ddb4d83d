"""Free blocks of memory, found by size and joined with their neighbours."""

from __future__ import annotations

from bisect import bisect_left, insort

_ADDRESS_BITS = 50
_ADDRESS = (1 << _ADDRESS_BITS) - 1


class FreeBlocks:
    """Free blocks [bytes], none of which touches another once it went through `absorb`.

    A block is one integer, its size above its address: in sorted order the first that is not smaller than a request is
    the best fit, at the lowest address among equals.
    """

    def __init__(self) -> None:
        self._keys: list[int] = []
        self.sizes: dict[int, int] = {}
        self._starts: dict[int, int] = {}

    def add(self, address: int, size: int) -> None:
        """Hold a block."""
        insort(self._keys, size << _ADDRESS_BITS | address)
        self.sizes[address] = size
        self._starts[address + size] = address

    def remove(self, address: int) -> int:
        """Give a block away; returns its size."""
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
        found = self._keys[bisect_left(self._keys, size << _ADDRESS_BITS) :]
        return [(key >> _ADDRESS_BITS, key & _ADDRESS) for key in found]

    def ending_at(self, address: int) -> int | None:
        """Where the block that ends at `address` begins."""
        return self._starts.get(address)

    def absorb(self, address: int, size: int) -> int:
        """Add a block, joined with those it touches; returns where the whole begins."""
        if address + size in self.sizes:
            size += self.remove(address + size)
        before = self._starts.get(address)
        if before is not None:
            size += self.remove(before)
            address = before
        self.add(address, size)
        return address

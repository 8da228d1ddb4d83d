"""Many names in one piece of memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import numpy as np


class Names(Sequence[str]):
    """A sequence of strings that never change.

    A list of a million Python strings takes 100 MB, and a forked worker copies each page of it that it looks at, since
    looking counts references. Here all names are one `bytes`, and an array of where each ends.
    """

    def __init__(self, names: Iterable[str]) -> None:
        encoded = [name.encode("utf-8", "surrogateescape") for name in names]  # file names need not be UTF-8
        self.blob = b"".join(encoded)
        self.ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)

    @classmethod
    def of_parts(cls, blob: bytes, ends: np.typing.NDArray[np.int64]) -> Names:
        """Names from what `blob` and `ends` of others were."""
        names = cls(())
        names.blob, names.ends = blob, ends
        return names

    def __len__(self) -> int:
        """How many."""
        return len(self.ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Names: ...
    def __getitem__(self, index: int | slice) -> str | Names:
        """The name at `index`, from the end if it is negative."""
        if isinstance(index, slice):
            return Names(self[at] for at in range(*index.indices(len(self))))
        if not -len(self) <= index < len(self):
            raise IndexError(f"there are {len(self):,} names, no number {index}")
        at = index % len(self)
        start = int(self.ends[at - 1]) if at else 0
        return self.blob[start : int(self.ends[at])].decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        """All of them, in order."""
        start = 0
        for end in self.ends.tolist():
            yield self.blob[start:end].decode("utf-8", "surrogateescape")
            start = end

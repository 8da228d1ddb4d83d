"""Which samples of a batch a process takes, where several train together. Pure arithmetic.

The batch and its order are the Job's and stay as they are. Coupled samples are normalised together over a group, so
each process takes a part of every group; else a part of the batch. Parts follow each other and differ by one sample at
most, so an uneven batch needs no padding; of fewer samples than processes some take none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Pass:
    """Samples that go through the model at once: places start..stop in what this process holds of the batch.

    `first` is the place of the first one in the whole batch. Where there is nothing left to do while other processes
    still work together, a pass `counts` nothing: it takes a sample again, and its loss is left out.
    """

    start: int
    stop: int
    first: int
    counts: bool = True

    @property
    def size(self) -> int:
        """Number of samples."""
        return self.stop - self.start


@dataclass(frozen=True)
class Split:
    """Part number `part` (from 0) of `parts`, of every `group` samples of a batch (None: of the batch)."""

    part: int = 0
    parts: int = 1
    group: int | None = None

    def spans(self, size: int) -> tuple[range, ...]:
        """The places in a batch of `size` samples that are this part's, one range for each group.

        >>> Split(1, 2).spans(5)
        (range(2, 5),)
        >>> Split(1, 2, group=4).spans(8)
        (range(2, 4), range(6, 8))
        """
        group = self.group or size
        return tuple(self._of(first, min(group, size - first)) for first in range(0, size, group))

    def held(self, size: int) -> list[int]:
        """The places in a batch of `size` samples that this process fetches: its own, or the first if it has none."""
        return [place for span in self.spans(size) for place in span] or [0]

    def passes(self, size: int, micro_batch: int) -> tuple[Pass, ...]:
        """What this process does of a batch of `size` samples, at most `micro_batch` of them at once.

        All processes make equally many passes, so that what they do together in each of them cannot hang.

        >>> [(p.first, p.size, p.counts) for p in Split(0, 2).passes(5, 2)]
        [(0, 2, True), (0, 1, False)]
        """
        group = self.group or size
        passes: list[Pass] = []
        start = 0
        for first, span in zip(range(0, size, group), self.spans(size), strict=True):
            longest = math.ceil(min(group, size - first) / self.parts)
            cuts = range(0, len(span), micro_batch)
            passes += [
                Pass(start + at, start + min(at + micro_batch, len(span)), span.start + at) for at in cuts
            ]  # fmt: skip
            start += len(span)
            for _ in range(len(cuts), math.ceil(longest / micro_batch)):
                passes.append(Pass(0, 1, self.held(size)[0], counts=False))
        return tuple(passes)

    def _of(self, first: int, size: int) -> range:
        """This part of the samples first..first + size."""
        return range(first + size * self.part // self.parts, first + size * (self.part + 1) // self.parts)


ALL_OF_IT = Split()
"""What a process that trains alone takes."""

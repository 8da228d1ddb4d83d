"""Which rows share a batch, and how they are put together and taken apart. A law of the rows alone, never of time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Sizes = tuple[int, ...]
"""Sizes of the varying dimensions of one row."""


def batches(sizes: Sequence[Sizes], most_rows: int, *, is_padded: bool) -> tuple[tuple[int, ...], ...]:
    """Rows (from 0) in batches of at most `most_rows`, of like sizes together, in order where sizes are equal.

    Where nothing can be padded, all rows of a batch have one size.
    """
    order = sorted(range(len(sizes)), key=lambda row: (sizes[row], row))
    cut: list[list[int]] = []
    for row in order:
        if not cut or len(cut[-1]) == most_rows or (not is_padded and sizes[cut[-1][0]] != sizes[row]):
            cut.append([])
        cut[-1].append(row)
    return tuple(map(tuple, cut))


def stack(samples: Sequence[NDArray[Any]], pad: float | None) -> NDArray[Any]:
    """Samples in one array, each filled up with `pad` to the largest along every dimension."""
    shape = tuple(max(sizes) for sizes in zip(*(one.shape for one in samples), strict=True))
    if all(one.shape == shape for one in samples):
        return np.stack(samples)
    batch = np.full((len(samples), *shape), 0 if pad is None else pad, samples[0].dtype)
    for row, one in enumerate(samples):
        own: tuple[int | slice, ...] = (row, *map(slice, one.shape))
        batch[own] = one
    return batch


def cut_back(answer: NDArray[Any], shape: Sequence[int | str], sizes: dict[str, int]) -> NDArray[Any]:
    """One row's part of an output, without what belongs to padding: named dimensions have the row's own sizes."""
    own = tuple(slice(sizes.get(size)) if isinstance(size, str) else slice(None) for size in shape)
    part: NDArray[Any] = answer[own]
    return part

"""Rows of equal content, by their digests."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def groups_of(contents_NB: NDArray[np.uint8]) -> tuple[NDArray[np.int64], list[NDArray[np.int64]]]:
    """The first row of each content, in order; and the rows, in order, of each content that is there more than once.

    Args:
        contents_NB: a digest [B bytes] a row.
    """
    if not len(contents_NB):
        return np.empty(0, np.int64), []
    keys = np.ascontiguousarray(contents_NB).view(f"V{contents_NB.shape[1]}").reshape(-1)
    _, first, inverse, counts = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
    repeated = np.flatnonzero(counts[inverse] > 1)
    order = repeated[np.argsort(inverse[repeated], kind="stable")]
    cuts = np.flatnonzero(np.diff(inverse[order])) + 1
    return np.sort(first), [group for group in np.split(order, cuts) if len(group)]

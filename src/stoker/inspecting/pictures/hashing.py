"""Hashes of what a picture looks like.

What: pHash, 64 bits: the signs of the 8 × 8 lowest frequencies (discrete cosine transform, type II) of the picture at
    32 × 32 grey pixels, against the median of those that are not the mean.
Use when: pictures that were stored again, scaled or brightened should be found. Such copies differ in few bits; other
    pictures in about half of them, where pictures vary enough.
Does not find: what was mirrored, turned, or cut to another part.
Source: C. Zauner, "Implementation and Benchmarking of Perceptual Image Hash Functions", 2010, section 3.2.1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SIDE = 32
"""Pixels of a side that hashes are made of."""

_KEPT = 8


def _cosines(kept: int, side: int) -> NDArray[np.float32]:
    """The first rows [kept, side] of the matrix of the orthonormal DCT-II."""
    rows, columns = np.arange(kept)[:, None], np.arange(side)[None, :]
    basis: NDArray[np.float64] = np.cos(np.pi * (2 * columns + 1) * rows / (2 * side)) * np.sqrt(2 / side)
    basis[0] /= np.sqrt(2)
    return np.asarray(basis, np.float32)


_BASIS = _cosines(_KEPT, SIDE)


def perceptual_hashes(grey_NHW: NDArray[np.float32]) -> NDArray[np.uint64]:
    """The hash of each picture [N, 32, 32] of grey values."""
    low_NK = (_BASIS @ grey_NHW @ _BASIS.T).reshape(len(grey_NHW), _KEPT * _KEPT)
    median_N1 = np.median(low_NK[:, 1:], axis=1, keepdims=True)
    packed = np.packbits(low_NK > median_N1, axis=1)
    return np.ascontiguousarray(packed).view(">u8").reshape(len(grey_NHW)).astype(np.uint64)

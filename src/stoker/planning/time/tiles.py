"""Matrix products on a GPU: tiles of the result, in waves over the multiprocessors.

A kernel cuts the result into tiles; each multiprocessor works through its share of them, so that the time is that of
the multiprocessor with the most. Small tiles leave fewer idle, but load more operands per FLOP; where the result has
few tiles, the depth is split and the parts are added up. What the libraries' heuristics choose is taken to be the best
of these. Operands that do not fit into the caches cross memory, in parallel with the arithmetic.

Source: the tile decomposition is that of NeuSight (Lee et al., ASPLOS 2025) and of NVIDIA's guide "Matrix
Multiplication Background" (tile and wave quantisation); here the utilisation is a closed form, not a network.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_TILES = (
    (256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64), (64, 32), (32, 64), (32, 32),
    (8, 128), (128, 8),
)  # fmt: skip
_SPLITS = (1, 2, 4, 8, 16)
_LARGEST_AREA = 128 * 128
_CHOICES = np.array(
    [(*tile, split) for tile in _TILES for split in _SPLITS if split == 1 or tile[0] * tile[1] <= _LARGEST_AREA]
)
_DEPTH_STEP = 8
"""Kernels go through the depth in steps of this many elements, so a depth of 65 costs as much as one of 72."""


@dataclass(frozen=True, kw_only=True)
class TileShape:
    """How tiles behave, the same on every device.

    The efficiencies are of tiles (rows x columns) relative to 128 x 128 [fraction]. `prologue` is what filling and
    draining a tile costs [elements of depth]. `resident` is how many 128 x 128 tiles a multiprocessor needs at once to
    be busy. `tail` is how much of a started wave counts as if the others helped out [fraction]. `split_traffic` scales
    the bytes that a split depth adds, `split_s` is what adding up costs [s]. `overlap` is the exponent of the norm that
    joins arithmetic and memory: 1 would be their sum, infinity their maximum.
    """

    large: float
    half_columns: float
    half_rows: float
    quarter: float
    eighth: float
    sixteenth: float
    prologue: float
    resident: float
    tail: float
    split_traffic: float
    split_s: float
    overlap: float


@dataclass(frozen=True)
class Rates:
    """What a device sustains: `flops` on large tiles [FLOP/s], `bytes_per_s` of memory, and its multiprocessors."""

    flops: float
    bytes_per_s: float
    multiprocessors: int


@functools.lru_cache(maxsize=64)
def _efficiencies(shape: TileShape) -> Floats:
    """Of every choice of tile and split, in the order of `_CHOICES`."""
    by_tile = {
        (256, 128): shape.large, (128, 256): shape.large, (128, 128): 1.0, (128, 64): shape.half_columns,
        (64, 128): shape.half_rows, (64, 64): shape.quarter, (64, 32): shape.eighth, (32, 64): shape.eighth,
        (32, 32): shape.sixteenth, (8, 128): shape.sixteenth, (128, 8): shape.sixteenth,
    }  # fmt: skip
    return np.array([by_tile[rows, columns] for rows, columns, _ in _CHOICES.tolist()])


def product_seconds(sizes: Floats, element_bytes: float, shape: TileShape, rates: Rates) -> Floats:
    """Time of each product [s], without what it takes to start it.

    Args:
        sizes: rows of (batch, rows, columns, depth), shape (n, 4).
        element_bytes: size of an operand's element [bytes].
        shape: how tiles behave.
        rates: what the device sustains.
    """
    batch, rows, columns, depth = (sizes[:, [i]] for i in range(4))
    tile_rows, tile_columns, splits = (_CHOICES[:, i].astype(float) for i in range(3))
    area = tile_rows * tile_columns
    tiles = batch * np.ceil(rows / tile_rows) * np.ceil(columns / tile_columns) * splits
    per_multiprocessor = tiles / rates.multiprocessors
    waves = (1 - shape.tail) * np.ceil(per_multiprocessor) + shape.tail * np.maximum(per_multiprocessor, 1)
    steps = np.ceil(np.ceil(depth / splits) / _DEPTH_STEP) * _DEPTH_STEP + shape.prologue
    tile_s = 2 * area * steps / (rates.flops / rates.multiprocessors * _efficiencies(shape))
    arithmetic = np.maximum(waves, np.maximum(1, shape.resident * _LARGEST_AREA / area)) * tile_s
    operands = batch * (rows * depth + depth * columns + rows * columns) * element_bytes / rates.bytes_per_s
    together = (arithmetic**shape.overlap + operands**shape.overlap) ** (1 / shape.overlap)
    partial_sums = splits * batch * rows * columns * element_bytes / rates.bytes_per_s * shape.split_traffic
    adding = np.where(splits > 1, partial_sums + shape.split_s, 0.0)
    best: Floats = np.min(together + adding, axis=1)
    return best

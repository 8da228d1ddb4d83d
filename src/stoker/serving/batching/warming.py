"""Filling the table of latencies before the first request: golden inputs at several rows and sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.artifacts.elements import Arrays
from stoker.engines.base import Engine
from stoker.records import BATCH, Manifest, TensorSpec
from stoker.serving.batching.latency import LatencyTable
from stoker.serving.batching.shapes import Shapes

LONGEST_WITHOUT_LIMIT = 512
"""Dimensions that the manifest sets no limit are measured up to this size, or that of the golden inputs."""

_REPEATS = 2


def warm_up(
    engine: Engine,
    inputs: Arrays,
    manifest: Manifest,
    shapes: Shapes,
    table: LatencyTable,
    *,
    clock: Callable[[], float],
    budget_s: float,
) -> None:
    """Run golden inputs, repeated or cut to each of the table's rows and sizes, and learn what they take.

    Each is run once for what engines do at the first time, then up to twice for the clock, of which the shorter
    counts. What the budget does not suffice for is extrapolated.
    """
    started = clock()
    for rows, sizes in points(manifest, shapes, inputs, table.grid):
        if clock() - started > budget_s:
            return
        batch = resized(inputs, manifest, shapes, rows, sizes)
        engine.run(batch)
        times = []
        for _ in range(_REPEATS):
            before = clock()
            engine.run(batch)
            times.append(clock() - before)
        _, shape = shapes.measure(batch)
        elements = shape.elements if not sizes else _product(shape.lane) * _product(sizes)
        table.learn(rows, elements, max(min(times), 1e-9), clock())


def points(
    manifest: Manifest, shapes: Shapes, inputs: Arrays, grid: tuple[int, ...]
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Rows and sizes of padded dimensions to measure, those of few elements first."""
    if not shapes.is_batched:
        yield 1, ()
        return
    own = shapes.measure(inputs)[1].sizes
    ladders = [_ladder(manifest, dim, size) for dim, size in zip(shapes.padded_dims, own, strict=True)]
    longest = max((len(ladder) for ladder in ladders), default=1)
    sizes = [tuple(ladder[min(step, len(ladder) - 1)] for ladder in ladders) for step in range(longest)]
    yield from sorted(((rows, each) for each in sizes for rows in grid), key=lambda one: one[0] * _product(one[1]))


def resized(inputs: Arrays, manifest: Manifest, shapes: Shapes, rows: int, sizes: tuple[int, ...]) -> Arrays:
    """Golden inputs with so many rows and such sizes, by taking what is there again and again."""
    wanted = dict(zip(shapes.padded_dims, sizes, strict=True)) | ({BATCH: rows} if shapes.is_batched else {})
    return {spec.name: _resized(inputs[spec.name], spec, wanted) for spec in manifest.inputs}


def _resized(array: NDArray[Any], spec: TensorSpec, wanted: dict[str, int]) -> NDArray[Any]:
    for axis, dim in enumerate(spec.shape):
        if (size := wanted.get(str(dim))) is not None and isinstance(dim, str):
            array = np.take(array, np.arange(size) % array.shape[axis], axis=axis)
    return np.asarray(array, order="C")  # of a single number `ascontiguousarray` makes a row of one


def _ladder(manifest: Manifest, dim: str, golden: int) -> list[int]:
    """Powers of two between the limits of a dimension, and the upper limit."""
    limits = next((one for one in manifest.dims if one.name == dim), None)
    low = limits.low if limits else 1
    high = limits.high if limits and limits.high is not None else max(golden, LONGEST_WITHOUT_LIMIT)
    low = max(low, 8) if high >= 8 else low
    powers = [1 << power for power in range(high.bit_length() + 1)]
    return [*(power for power in powers if low <= power < high), high]


def _product(sizes: tuple[int, ...]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product

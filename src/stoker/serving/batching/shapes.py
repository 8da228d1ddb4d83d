"""Which samples may share a batch: sizes of named dimensions, and what they are padded to."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass

from stoker.artifacts.elements import Arrays
from stoker.records import BATCH, Manifest

STEPS_PER_DOUBLING = 4
"""Without buckets of the user's, sizes are told apart in so many steps between a power of two and the next."""

_MOST_KNOWN = 4096


@dataclass(frozen=True, slots=True)
class SampleShape:
    """Sizes of a sample's named dimensions.

    Samples of one `lane` can share a batch: those dimensions cannot be padded. `sizes` are those of the others, and
    `shelf` the same rounded up, by which what waits is sorted. `elements` is how many positions a sample of such a
    shelf has.
    """

    lane: tuple[int, ...]
    sizes: tuple[int, ...]
    shelf: tuple[int, ...]
    elements: int


class Shapes:
    """Reads the rows and the sample shape of requests to one model.

    A dimension can be padded if every input that has it says with what (`pad`). A model without a batch dimension
    takes one request at a time, each of which counts as a row.
    """

    def __init__(self, manifest: Manifest, buckets: tuple[int, ...] = ()) -> None:
        self.is_batched = manifest.is_batched
        self.padded_dims = _padded_dims(manifest)
        self._buckets = tuple(sorted(buckets))
        self._highs = {dim.name: dim.high for dim in manifest.dims if dim.high is not None}
        self._batch = manifest.inputs[0].name
        places = _first_places(manifest)
        self._lane_places = [place for dim, place in places.items() if dim not in self.padded_dims]
        self._size_places = [places[dim] for dim in self.padded_dims]
        self._known: dict[tuple[int, ...], SampleShape] = {}

    def measure(self, inputs: Arrays) -> tuple[int, SampleShape]:
        """The rows of a request, and the shape of its samples; that inputs fit the manifest is not checked."""
        rows = inputs[self._batch].shape[0] if self.is_batched else 1
        sizes = tuple([inputs[name].shape[axis] for name, axis in self._size_places])
        lane = tuple([inputs[name].shape[axis] for name, axis in self._lane_places])
        shape = self._known.get(lane + sizes)
        if shape is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            shape = self._known[lane + sizes] = self.sample(lane, sizes)
        return rows, shape

    def sample(self, lane: tuple[int, ...], sizes: tuple[int, ...]) -> SampleShape:
        """The shape of samples with such sizes."""
        shelf = tuple(self._shelf(dim, size) for dim, size in zip(self.padded_dims, sizes, strict=True))
        return SampleShape(lane, sizes, shelf, math.prod(lane) * math.prod(shelf))

    def padded(self, shapes: list[SampleShape]) -> tuple[int, ...]:
        """What the dimensions of a batch of such samples are padded to: their bucket, or the largest among them."""
        if not self.padded_dims:
            return ()
        if self._buckets:
            return tuple(max(each) for each in zip(*(shape.shelf for shape in shapes), strict=True))
        return tuple(max(each) for each in zip(*(shape.sizes for shape in shapes), strict=True))

    def _shelf(self, dim: str, size: int) -> int:
        rounded = _next_bucket(size, self._buckets) if self._buckets else round_up(size)
        return max(size, min(rounded, self._highs.get(dim, rounded)))


def round_up(size: int) -> int:
    """The next size of a ladder with `STEPS_PER_DOUBLING` steps between powers of two.

    >>> [round_up(size) for size in (1, 7, 9, 33, 64, 65)]
    [1, 7, 10, 40, 64, 80]
    """
    if size <= 2 * STEPS_PER_DOUBLING:
        return size
    step = (1 << (size - 1).bit_length() - 1) // STEPS_PER_DOUBLING
    return -(-size // step) * step


def _next_bucket(size: int, buckets: tuple[int, ...]) -> int:
    """The smallest bucket that holds it; beyond the largest, the size itself."""
    index = bisect.bisect_left(buckets, size)
    return buckets[index] if index < len(buckets) else size


def _padded_dims(manifest: Manifest) -> tuple[str, ...]:
    carriers: dict[str, list[bool]] = {}
    for spec in manifest.inputs:
        for dim in spec.shape:
            if isinstance(dim, str) and dim != BATCH:
                carriers.setdefault(dim, []).append(spec.pad is not None)
    return tuple(dim for dim, padded in carriers.items() if all(padded)) if manifest.is_batched else ()


def _first_places(manifest: Manifest) -> dict[str, tuple[str, int]]:
    """An input and axis from which the size of each named dimension is read."""
    places: dict[str, tuple[str, int]] = {}
    for spec in manifest.inputs:
        for axis, dim in enumerate(spec.shape):
            if isinstance(dim, str) and dim != BATCH:
                places.setdefault(dim, (spec.name, axis))
    return places

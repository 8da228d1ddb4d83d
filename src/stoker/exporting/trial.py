"""What an export is tried with: eight samples, and the forms in which they are asked."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from stoker.artifacts import served_sizes
from stoker.artifacts.elements import Arrays
from stoker.artifacts.variations import cut, num_rows, rows, sizes_of
from stoker.errors import BadArtifact
from stoker.records import BATCH, DynamicDim, ServiceSettings, TensorSpec

NUM_SAMPLES = 8
_FEWEST = 2
BATCH_SIZES = (1, 3, 8)
"""Samples asked at once, in turn: one, an odd number, and all."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Samples to ask a model about, and what it takes; without a batch they are one request, asked as it is.

    `most_rows` is the largest batch that the model will be served in.
    """

    samples: Arrays
    inputs: tuple[TensorSpec, ...]
    dims: tuple[DynamicDim, ...] = ()
    most_rows: int = ServiceSettings.max_batch_rows

    @property
    def served_sizes(self) -> tuple[int, ...]:
        """Batch sizes [rows] that answers are compared at with each sample alone; without a batch none."""
        return served_sizes(max(self.most_rows, NUM_SAMPLES)) if self.is_batched else ()

    @property
    def is_batched(self) -> bool:
        """Whether samples can be asked one by one."""
        return all(spec.shape[:1] == (BATCH,) for spec in self.inputs)

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of named dimensions, the batch aside, in these samples."""
        return {dim: size for dim, size in sizes_of(self.samples, self.inputs).items() if dim != BATCH}

    @property
    def shorter(self) -> dict[str, int]:
        """Other sizes that they can be cut to: half, or as little as is allowed."""
        lows = {dim.name: dim.low for dim in self.dims}
        return {dim: max(lows.get(dim, 1), size // 2) for dim, size in self.sizes.items()}

    def requests(self) -> Iterator[tuple[str, Arrays]]:
        """Requests of 1, 3 and 8 samples, the middle one of other sizes; each with what it is, in words."""
        if not self.is_batched:
            yield "one request", self.samples
            if self.sizes:
                yield f"another ({_listed(self.shorter)})", cut(self.samples, self.inputs, self.shorter)
            return
        for count in BATCH_SIZES:
            request = rows(self.samples, slice(count))
            if count == BATCH_SIZES[1]:
                request = cut(request, self.inputs, self.shorter)
            sizes = {dim: size for dim, size in sizes_of(request, self.inputs).items() if dim != BATCH}
            yield f"{count} sample{'s' * (count > 1)}{f' ({_listed(sizes)})' * bool(sizes)}", request

    def with_inputs(self, inputs: tuple[TensorSpec, ...]) -> Trial:
        """The same samples for a model that takes this."""
        return dataclasses.replace(self, inputs=inputs)


def eight(samples: Arrays) -> Arrays:
    """Eight samples: the first ones, or all of them in turn where there are fewer.

    Raises:
        BadArtifact: there are not two, so that one that looks at its neighbours would see itself alone; or the inputs
            have different numbers of them.
    """
    counts = {name: len(array) if array.ndim else 0 for name, array in samples.items()}
    if len(set(counts.values())) != 1 or min(counts.values()) < _FEWEST:
        listed = ", ".join(f"{name}: {count}" for name, count in counts.items())
        raise BadArtifact(
            f"The example inputs have no common number of samples, two or more ({listed})",
            remedy="Give inputs whose first dimension is the samples.",
        )
    count = num_rows(samples)
    return rows(samples, list(itertools.islice(itertools.cycle(range(count)), NUM_SAMPLES)))


def _listed(sizes: dict[str, int]) -> str:
    return ", ".join(f"{dim} {size}" for dim, size in sizes.items())


def contiguous(samples: Arrays) -> Arrays:
    """The same content in arrays of their own, as engines read them in place."""
    return {name: np.array(array, order="C") for name, array in samples.items()}

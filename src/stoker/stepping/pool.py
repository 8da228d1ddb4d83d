"""Some of a job's samples at hand, from which the probe puts batches together row by row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from stoker.errors import BadJob
from stoker.jobs import Job
from stoker.loading import BadSample, Batch, Content, Fields, Pipeline, Samples, Stream, key_of, map_tensors
from stoker.loading.fields import take
from stoker.loading.order import Indices, KeyedPermutation

_MOST_IN_MEMORY, _MOST_FETCHED, _MOST_BYTES = 512, 64, 2**28


@dataclass(frozen=True)
class Quad:
    """Rows of a pool for two halves of a batch, and for other samples to put in their place."""

    first: Indices
    second: Indices
    other_first: Indices
    other_second: Indices


@dataclass(frozen=True)
class Pool:
    """Samples that were fetched and collated together, still raw; `pipeline` makes batches of them ready."""

    content: Content
    indices: Indices
    pipeline: Pipeline

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.indices)

    def batch(self, *rows: Indices) -> Batch:
        """The batch of these rows, one after the other."""
        chosen = np.concatenate(rows)
        return Batch(take(self.content, chosen.tolist(), len(self)), self.indices[chosen], 0, self.pipeline)

    def quads(self, sizes: tuple[int, int], seed: int) -> Iterator[Quad]:
        """Rows for ever new comparisons of halves of these sizes.

        The first sets the samples that differ most against each other, such as those with most and least padding. In
        every second one the others are copies of one sample, which overflow a capacity that samples seldom reach.
        """
        turn = 0
        while True:
            picked = [self._rows(size, seed, turn, place) for place, size in enumerate((*sizes, *sizes))]
            if turn % 2:
                picked[2:] = [np.repeat(picked[2][:1], size) for size in sizes]
            elif turn == 0:
                low, high = self._unlike()
                picked = [np.resize(rows, size) for rows, size in zip((low, high, high, low), 2 * sizes, strict=True)]
            for place in (0, 1):
                if np.array_equal(picked[place], picked[place + 2]):
                    picked[place + 2] = (picked[place + 2] + 1) % len(self)
            yield Quad(*picked)
            turn += 1

    def _rows(self, size: int, seed: int, turn: int, place: int) -> Indices:
        order = KeyedPermutation(len(self), key_of(Stream.PROBE, seed, turn, place))
        return order(np.arange(size, dtype=np.int64) % len(self))

    def _unlike(self) -> tuple[Indices, Indices]:
        """Rows that hold an entry's lowest and highest values least and most often, such as padding."""
        low: list[int] = []
        high: list[int] = []

        def note(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dim() > 0 and tensor.shape[0] == len(self) and tensor.numel() and not tensor.is_complex():
                flat = tensor.reshape(len(self), -1)
                for extreme in (flat.min(), flat.max()):
                    times = (flat == extreme).sum(1)
                    low.append(int(times.argmin()))
                    high.append(int(times.argmax()))
            return tensor

        map_tensors(self.content, note)
        return np.array(low or [0], np.int64), np.array(high or [1], np.int64)


def pool_of(job: Job, samples: Samples, dtype: torch.dtype) -> Pool:
    """A pool of up to 512 of the job's samples, the same ones every time.

    Raises:
        BadJob: a sample cannot be fetched, or samples do not collate.
    """
    order = KeyedPermutation(samples.num_at_hand, key_of(Stream.PROBE, job.seed))
    try:
        bytes_each = _num_bytes(samples.fetch(order(np.arange(1, dtype=np.int64)), 0))
        most = min(samples.num_at_hand, _MOST_IN_MEMORY if samples.is_in_memory else _MOST_FETCHED)
        indices = order(np.arange(min(most, max(2, _MOST_BYTES // max(1, bytes_each))), dtype=np.int64))
        content = samples.fetch(indices, 0)
        map_tensors(content, _require_computable)
    except BadSample as problem:
        raise BadJob(str(problem)) from problem
    fields = Fields(job.inputs, job.target)
    pipeline = Pipeline(torch.device("cpu"), fields, samples.prepare, job.augment, job.seed, dtype=dtype)
    return Pool(content, indices, pipeline)


def _require_computable(tensor: torch.Tensor) -> None:
    """Refuse a type that PyTorch stores, and has next to no operations for."""
    if tensor.dtype in (torch.uint16, torch.uint32, torch.uint64):
        raise BadJob(
            f"samples hold {str(tensor.dtype).removeprefix('torch.')}, with which PyTorch does not compute",
            remedy="Give int32, int64 or floats: .astype('int32') or .to(torch.int32) in the dataset.",
        )


def _num_bytes(content: Content) -> int:
    found: list[int] = []
    map_tensors(content, lambda tensor: found.append(tensor.nbytes))
    return sum(found)

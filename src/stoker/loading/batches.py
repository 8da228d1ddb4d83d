"""Batches: the optimiser batches of a run from any position on, cut into micro-batches on the device."""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from stoker.errors import BadJob, RunFailed
from stoker.jobs.extent import Extent
from stoker.loading.fields import Content, Fields, cut, map_tensors
from stoker.loading.order import EpochOrder, Indices
from stoker.loading.samples import BadSample, ItemSamples, Samples, SubsetOf
from stoker.loading.transforms import Draw
from stoker.records import Plan, Position


@dataclass(frozen=True)
class Pipeline:
    """From raw content to what the model takes: to the device, augmented, prepared, in the plan's memory format.

    `dtype` is what floating inputs are turned into (None: left as they are); float64 is for proofs.
    """

    device: torch.device
    fields: Fields
    prepare: Callable[[Content], Content]
    augment: Sequence[Callable[..., Any]] = ()
    seed: int = 0
    channels_last: bool = False
    dtype: torch.dtype | None = None

    def __call__(self, content: Content, epoch: int, indices: Indices) -> Content:
        """The samples `indices` [B] of `epoch`, ready for the model."""
        if self.device.type != "cpu":
            content = map_tensors(content, partial(_move, device=self.device))
        if self.augment:
            draw = Draw(self.seed, epoch, indices, self.device)
            content = self.fields.map_inputs(content, lambda x: self._augmented(x, draw))
        content = self.prepare(content)
        if self.dtype is not None or self.channels_last:
            content = map_tensors(content, self._converted)
        return content

    def _augmented(self, inputs: torch.Tensor, draw: Draw) -> torch.Tensor:
        for transform in self.augment:
            inputs = transform(inputs, draw)
        return inputs

    def _converted(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = self.dtype if self.dtype is not None and tensor.is_floating_point() else tensor.dtype
        if self.channels_last and tensor.dim() == 4:
            return tensor.to(dtype=dtype, memory_format=torch.channels_last)
        return tensor.to(dtype)


@dataclass(frozen=True)
class Batch:
    """An optimiser batch, still raw: `cut` makes micro-batches of it."""

    content: Content
    indices: Indices
    epoch: int
    pipeline: Pipeline

    @property
    def size(self) -> int:
        """Number of samples."""
        return len(self.indices)

    def cut(self, start: int, stop: int) -> Content:
        """Samples start..stop, ready for the model."""
        if start == 0 and stop == self.size:
            return self.pipeline(self.content, self.epoch, self.indices)
        return self.pipeline(cut(self.content, start, stop, self.size), self.epoch, self.indices[start:stop])


@dataclass(frozen=True)
class BatchSource:
    """Where a run's batches come from: samples in keyed order, fetched as the plan says."""

    samples: Samples
    pipeline: Pipeline
    extent: Extent
    seed: int
    plan: Plan
    order: EpochOrder = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "order", EpochOrder(self.extent.num_train, self.seed))

    def batches(self, start: Position, total_updates: int) -> Generator[Batch, None, None]:
        """The batches of updates `start.updates` up to `total_updates`, in order.

        Raises:
            BadJob: a sample cannot be fetched or collated.
            RunFailed: a loader worker died.
        """
        places = self._places(start, total_updates)
        try:
            if self.plan.loader == "workers":
                yield from self._from_workers(places)
            else:
                for epoch, indices in places:
                    yield Batch(self.samples.fetch(indices, epoch), indices, epoch, self.pipeline)
        except BadSample as problem:
            raise BadJob(_own_words(problem)) from problem

    def _places(self, start: Position, total_updates: int) -> Iterator[tuple[int, Indices]]:
        for update in range(start.updates, total_updates):
            position = self.extent.position(update)
            stop = position.cursor + self.extent.batch_at(position)
            yield position.epoch, self.order.indices(position.epoch, position.cursor, stop)

    def _from_workers(self, places: Iterator[tuple[int, Indices]]) -> Iterator[Batch]:
        asked: list[tuple[int, Indices]] = []
        loader = torch.utils.data.DataLoader(
            _KeyedItems(self.samples),
            batch_sampler=_remembered(places, asked),
            num_workers=self.plan.num_workers,
            prefetch_factor=self.plan.prefetch_batches,
            collate_fn=_KeyedItems(self.samples).collate,
            worker_init_fn=_leave_interrupts_to_the_trainer,
            pin_memory=self.pipeline.device.type == "cuda",
        )
        batches = iter(loader)
        while True:
            try:
                content = next(batches)
            except StopIteration:
                return
            except RuntimeError as error:
                if "DataLoader worker" not in str(error):
                    raise
                raise RunFailed(f"a loader worker died: {error}",
                                remedy="Run the same command again to continue; if it recurs, the worker is likely "
                                "out of memory: give a plan with fewer num_workers.") from error  # fmt: skip
            epoch, indices = asked.pop(0)
            yield Batch(content, indices, epoch, self.pipeline)


def in_order(samples: Samples, pipeline: Pipeline, size: int) -> Iterator[Batch]:
    """All samples once, in their own order, in batches of `size`: for evaluation."""
    try:
        for start in range(0, len(samples), size):
            indices = np.arange(start, min(start + size, len(samples)), dtype=np.int64)
            yield Batch(samples.fetch(indices, 0), indices, 0, pipeline)
    except BadSample as problem:
        raise BadJob(str(problem)) from problem


class _KeyedItems(torch.utils.data.Dataset[Any]):
    """Items addressed by (epoch, index), for loader workers."""

    def __init__(self, samples: Samples) -> None:
        self._whole = samples.whole if isinstance(samples, SubsetOf) else samples
        self._indices = samples.indices if isinstance(samples, SubsetOf) else None

    def __getitem__(self, place: tuple[int, int]) -> Any:
        """The item, its random draws keyed by (epoch, index)."""
        epoch, index = place
        if not isinstance(self._whole, ItemSamples):
            raise TypeError(f"{self._whole.name} lies in memory: workers have nothing to fetch")
        return self._whole.item((epoch, index if self._indices is None else int(self._indices[index])))

    def collate(self, items: list[Any]) -> Content:
        """A batch of items."""
        if not isinstance(self._whole, ItemSamples):
            raise TypeError(f"{self._whole.name} lies in memory: workers have nothing to collate")
        return self._whole.collate(items)


def _own_words(problem: BadSample) -> str:
    """What the problem says, without the traceback that a loader worker puts before it."""
    return str(problem).rsplit("BadSample: ", 1)[-1].strip()


def _remembered(
    places: Iterator[tuple[int, Indices]], asked: list[tuple[int, Indices]]
) -> Iterator[list[tuple[int, int]]]:
    """Batches of (epoch, index) for the workers; each also goes to the end of `asked`."""
    for epoch, indices in places:
        asked.append((epoch, indices))
        yield [(epoch, int(index)) for index in indices]


def _leave_interrupts_to_the_trainer(_worker: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


def _move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.to(device, non_blocking=True)

"""Batches: the optimiser batches of a run from any position on, cut into micro-batches on the device."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from stoker.errors import BadJob
from stoker.jobs.extent import Extent
from stoker.loading.ahead import copied_ahead
from stoker.loading.fields import Content, Fields, can_be_cut, cut, is_row_of_tensors, map_tensors
from stoker.loading.order import EpochOrder, Indices
from stoker.loading.samples import Samples
from stoker.loading.transforms import Draw
from stoker.loading.worker_watch import WorkerWatch
from stoker.loading.workers import Place, by_workers
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
        """Samples start..stop, ready for the model.

        Raises:
            BadJob: nothing in the batch has an entry for each sample.
        """
        size = len(self.indices)
        if stop - start == size and is_row_of_tensors(self.content):
            return self.pipeline(self.content, self.epoch, self.indices)
        if not (stop - start == size or can_be_cut(self.content, size)):
            raise BadJob(
                f"a batch of {size} samples cannot be cut: no tensor in it has {size} rows",
                remedy="Let Job(collate=…) give tensors [B, ...], or declare Job(loss_scope='batch').",
            )
        # Cut even where nothing is left out: a batch then has one type, whatever the micro-batch.
        return self.pipeline(cut(self.content, start, stop, size), self.epoch, self.indices[start:stop])


@dataclass(frozen=True)
class BatchSource:
    """Where a run's batches come from: samples in keyed order, fetched as the plan says."""

    samples: Samples
    pipeline: Pipeline
    extent: Extent
    seed: int
    plan: Plan
    watch: WorkerWatch = field(default_factory=WorkerWatch, compare=False)
    """Its workers, where there are any."""
    order: EpochOrder = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "order", EpochOrder(self.extent.num_train, self.seed))

    def batches(self, start: Position, total_updates: int) -> Generator[Batch, None, None]:
        """The batches of updates `start.updates` up to `total_updates`, in order.

        Raises:
            BadJob: a sample cannot be fetched or collated.
            RunFailed: a loader worker died twice over the same batch.
        """
        with closing(self._fetched(self._places(start, total_updates))) as fetched:
            for (epoch, indices), content in fetched:
                yield Batch(content, indices, epoch, self.pipeline)

    def _fetched(self, places: Iterator[Place]) -> Generator[tuple[Place, Content], None, None]:
        """Raw batches, where they are wanted as soon as they can be."""
        device, loader = self.pipeline.device, self.plan.loader
        if loader == "workers":
            return copied_ahead(self._by_workers(places), device)
        if loader == "memory":
            return copied_ahead(self._gathered(self.samples, places), device)
        return self._gathered(self._on_device if loader == "device" else self.samples, places)

    def _gathered(self, samples: Samples, places: Iterator[Place]) -> Generator[tuple[Place, Content], None, None]:
        for epoch, indices in places:
            yield (epoch, indices), samples.fetch(indices, epoch)

    @cached_property
    def _on_device(self) -> Samples:
        """The samples in the device's memory."""
        return self.samples.on(self.pipeline.device)

    def _by_workers(self, places: Iterator[Place]) -> Generator[tuple[Place, Content], None, None]:
        plan, is_pinned = self.plan, self.pipeline.device.type == "cuda"
        return by_workers(
            self.samples, places, plan.num_workers, plan.prefetch_batches, is_pinned=is_pinned, watch=self.watch
        )

    def _places(self, start: Position, total_updates: int) -> Iterator[Place]:
        num_train, batch, updates_per_epoch = self.extent.num_train, self.extent.batch, self.extent.updates_per_epoch
        for update in range(start.updates, total_updates):
            epoch, within = divmod(update, updates_per_epoch)
            first = within * batch
            yield epoch, self.order.indices(epoch, first, min(first + batch, num_train))


def in_order(samples: Samples, pipeline: Pipeline, size: int) -> Iterator[Batch]:
    """All samples once, in their own order, in batches of `size`: for evaluation.

    Raises:
        BadJob: a sample cannot be fetched or collated.
    """
    for start in range(0, len(samples), size):
        indices = np.arange(start, min(start + size, len(samples)), dtype=np.int64)
        yield Batch(samples.fetch(indices, 0), indices, 0, pipeline)


def _move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.to(device, non_blocking=True)

"""Batches: the optimiser batches of a run from any position on, cut into micro-batches on the device."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from stoker.errors import BadJob
from stoker.jobs.extent import Extent
from stoker.jobs.mixing import Mix
from stoker.loading.ahead import copied_ahead
from stoker.loading.fields import Content, Fields, can_be_cut, cut, is_row_of_tensors, map_tensors, take
from stoker.loading.mixing import Pairing, pairing_of
from stoker.loading.order import Indices, Order
from stoker.loading.samples import Samples
from stoker.loading.split import ALL_OF_IT, Pass, Split
from stoker.loading.streams import ReaderState
from stoker.loading.transforms import Draw, Normalize
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
    mix: Sequence[Mix] = ()
    """How samples of a batch are mixed in the end; `Batch.cut` does it, which has their partners."""

    def __call__(self, content: Content, epoch: int, indices: Indices) -> Content:
        """The samples `indices` [B] of `epoch`, ready for the model."""
        if self.device.type != "cpu":
            content = map_tensors(content, partial(_move, device=self.device))
        if self.augment:
            draw = Draw(self.seed, epoch, indices, self.device)
            content = self.fields.map_inputs(content, lambda x: self._augmented(x, draw))
        prepared = self.prepare(content)
        if any(isinstance(transform, Normalize) for transform in self.augment):
            self._require_unprepared(content, prepared)
        if self.dtype is not None or self.channels_last:
            prepared = map_tensors(prepared, self._converted)
        return prepared

    def _augmented(self, inputs: torch.Tensor, draw: Draw) -> torch.Tensor:
        for transform in self.augment:
            inputs = transform(inputs, draw)
        return inputs

    def _require_unprepared(self, content: Content, prepared: Content) -> None:
        """Refuse images that were standardised twice: as they should be, and then as if they were bytes."""
        if self._first_input(prepared) is not self._first_input(content):
            raise BadJob(
                "Job(augment=[…, Normalize(…)]) standardises images, and so do the data afterwards, "
                "which take them for bytes from 0 to 255",
                remedy="Leave Normalize out; a source of files takes mean=… and std=….",
            )

    def _first_input(self, content: Content) -> Any:
        return self.fields.call(lambda *inputs, **named: [*inputs, *named.values()][0], content)

    def _converted(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = tensor.dtype
        if self.dtype is not None and (tensor.is_floating_point() or tensor.is_complex()):
            dtype = self.dtype.to_complex() if tensor.is_complex() else self.dtype
        if self.channels_last and tensor.dim() == 4:
            return tensor.to(dtype=dtype, memory_format=torch.channels_last)
        return tensor.to(dtype)


_NOBODY: Indices = np.empty(0, np.int64)


@dataclass(frozen=True)
class Batch:
    """An optimiser batch, or what this process takes of it, still raw: `cut` makes micro-batches of it.

    `split` says which samples are here, of the batch's `whole` over all processes (None: all there are).
    """

    content: Content
    indices: Indices
    epoch: int
    pipeline: Pipeline
    split: Split = ALL_OF_IT
    whole: int | None = None
    pairing: Pairing | None = None
    """Whom they are mixed with; None: as in the first update, among themselves."""
    along: Indices = field(default_factory=lambda: _NOBODY)
    """Partners that were fetched along with them, and come behind them in `content`."""

    @property
    def size(self) -> int:
        """Number of samples that are here."""
        return len(self.indices)

    @property
    def whole_size(self) -> int:
        """Number of samples over all processes."""
        return self.size if self.whole is None else self.whole

    def passes(self, micro_batch: int) -> tuple[Pass, ...]:
        """How they go through the model, at most `micro_batch` at once."""
        return self.split.passes(self.whole_size, micro_batch)

    def cut(self, start: int, stop: int) -> Content:
        """Samples start..stop, ready for the model.

        Raises:
            BadJob: nothing in the batch has an entry for each sample; or it is to be mixed and is not of that kind.
        """
        ready = self._ready(start, stop)
        return self._mixed(ready, start, stop) if self.pipeline.mix else ready

    def _ready(self, start: int, stop: int) -> Content:
        size = len(self.indices) + len(self.along)
        if stop - start == size and is_row_of_tensors(self.content):
            return self.pipeline(self.content, self.epoch, self.indices)
        if not (stop - start == size or can_be_cut(self.content, size)):
            raise BadJob(
                f"a batch of {size} samples cannot be cut: no tensor in it has {size} rows",
                remedy="Let Job(collate=…) give tensors [B, ...], or declare Job(loss_scope='batch').",
            )
        # Cut even where nothing is left out: a batch then has one type, whatever the micro-batch.
        return self.pipeline(cut(self.content, start, stop, size), self.epoch, self.indices[start:stop])

    def _mixed(self, ready: Content, start: int, stop: int) -> Content:
        """Samples start..stop with their partners, which are made ready here unless they are among them."""
        pairing = self._pairing
        rows, size = pairing.rows[start:stop], len(self.indices) + len(self.along)
        if stop - start == size:
            partners = take(ready, rows.tolist(), size)
        else:
            indices = np.concatenate([self.indices, self.along])[rows]
            partners = self.pipeline(take(self.content, rows.tolist(), size), self.epoch, indices)
        return pairing.mixed(ready, partners, start, stop, self.pipeline.fields)

    @cached_property
    def _pairing(self) -> Pairing:
        if self.pairing is not None:
            return self.pairing
        return pairing_of(self.pipeline.mix, seed=self.pipeline.seed, epoch=self.epoch, update=0, size=self.size)


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
    split: Split = ALL_OF_IT
    """What of each batch this process takes."""
    reader: ReaderState = field(default_factory=ReaderState, compare=False)
    """Where its stream is, if it is one that has a state."""
    order: Order = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "order", self.samples.order(self.seed))

    def batches(self, start: Position, total_updates: int) -> Generator[Batch, None, None]:
        """The batches of updates `start.updates` up to `total_updates`, in order.

        Raises:
            BadJob: a sample cannot be fetched or collated.
            RunFailed: a loader worker died twice over the same batch.
        """
        updates = range(start.updates, total_updates)
        samples = self.reader.begin(self.samples)
        with closing(self._fetched(samples, self._places(updates))) as fetched:
            for update, ((epoch, indices), found) in zip(updates, fetched, strict=True):
                content = self.reader.taken(samples, found)
                pairing = self._pairing(update)
                own = len(indices) - (0 if pairing is None else len(pairing.extra))
                whole = own if self.split.parts == 1 else self._whole(update)
                here, along = (indices, _NOBODY) if pairing is None else (indices[:own], indices[own:])
                yield Batch(content, here, epoch, self.pipeline, self.split, whole, pairing, along)

    def _fetched(self, samples: Samples, places: Iterator[Place]) -> Generator[tuple[Place, Content], None, None]:
        """Raw batches, where they are wanted as soon as they can be."""
        device, loader = self.pipeline.device, self.plan.loader
        if loader == "workers":
            return copied_ahead(self._by_workers(samples, places), device)
        if loader == "memory":
            return copied_ahead(self._gathered(samples, places), device)
        return self._gathered(self._on_device if loader == "device" else samples, places)

    def _gathered(self, samples: Samples, places: Iterator[Place]) -> Generator[tuple[Place, Content], None, None]:
        for epoch, indices in places:
            yield (epoch, indices), samples.fetch(indices, epoch)

    @cached_property
    def _on_device(self) -> Samples:
        """The samples in the device's memory."""
        return self.samples.on(self.pipeline.device)

    def _by_workers(self, samples: Samples, places: Iterator[Place]) -> Generator[tuple[Place, Content], None, None]:
        plan, is_pinned = self.plan, self.pipeline.device.type == "cuda"
        return by_workers(
            samples, places, plan.num_workers, plan.prefetch_batches, is_pinned=is_pinned, watch=self.watch
        )

    def _whole(self, update: int) -> int:
        """Samples of the batch of update number `update`, over all processes."""
        return self.extent.batch_at(self.extent.position(update))

    def _places(self, updates: Iterable[int]) -> Iterator[Place]:
        for update in updates:
            position = self.extent.position(update)
            size = self.extent.batch_at(position)
            indices = self.order.indices(position.epoch, position.cursor, position.cursor + size)
            own = indices if self.split.parts == 1 else indices[self.split.held(size)]
            pairing = self._pairing(update)
            if pairing is not None and len(pairing.extra):
                own = np.concatenate([own, indices[pairing.extra]])
            yield position.epoch, own

    def _pairing(self, update: int) -> Pairing | None:
        """Whom the samples of a batch that are here are mixed with; None where nothing is."""
        if not self.pipeline.mix:
            return None
        size, epoch = self._whole(update), self.extent.position(update).epoch
        held = None if self.split.parts == 1 else self.split.held(size)
        return pairing_of(self.pipeline.mix, seed=self.seed, epoch=epoch, update=update, size=size, held=held)


def in_order(samples: Samples, pipeline: Pipeline, size: int, split: Split = ALL_OF_IT) -> Iterator[Batch]:
    """All samples once, in their own order, `size` of them in each process at once: for evaluation.

    Raises:
        BadJob: a sample cannot be fetched or collated.
    """
    for start in range(0, len(samples), size * split.parts):
        whole = min(size * split.parts, len(samples) - start)
        indices = start + np.array(split.held(whole), dtype=np.int64)
        yield Batch(samples.fetch(indices, 0), indices, 0, pipeline, split, whole)


def _move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.to(device, non_blocking=True)

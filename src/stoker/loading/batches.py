"""Which samples of a batch a process takes, where several train together. Pure arithmetic.

The batch and its order are the Job's and stay as they are. Coupled samples are normalised together over a group, so
each process takes a part of every group; else a part of the batch. Parts follow each other and differ by one sample at
most, so an uneven batch needs no padding; of fewer samples than processes some take none.

Batches: the optimiser batches of a run from any position on, cut into micro-batches on the device.

The next batch on its way to a GPU while this one is computed on.

What: each batch is copied from page-locked memory on a stream of its own, one batch ahead of the one that is given
back. Use when: batches lie in the host's memory, or come from workers. Costs: the device's memory of one more batch.
Does not combine with: fetching in the training process, where a batch fetched ahead would draw from the generators that
a checkpoint keeps. Source: https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np
import torch

from stoker.errors import BadJob
from stoker.jobs.extent import Extent
from stoker.jobs.mixing import Mix
from stoker.loading.fields import Content, Fields, can_be_cut, cut, is_row_of_tensors, map_tensors, take
from stoker.loading.mixing import Pairing, pairing_of
from stoker.loading.order import Indices, Order
from stoker.loading.samples import Samples
from stoker.loading.streams import ReaderState
from stoker.loading.transforms import Draw, Normalize
from stoker.loading.workers import EpochIndices, WorkerWatch, by_workers
from stoker.records import Plan, Position


@dataclass(frozen=True)
class Pass:
    """Samples that go through the model at once: places start..stop in what this process holds of the batch.

    `first` is the place of the first one in the whole batch. Where there is nothing left to do while other processes
    still work together, a pass `counts` nothing: it takes a sample again, and its loss is left out.
    """

    start: int
    stop: int
    first: int
    counts: bool = True

    @property
    def size(self) -> int:
        """Number of samples."""
        return self.stop - self.start


@dataclass(frozen=True)
class Split:
    """Part number `part` (from 0) of `parts`, of every `group` samples of a batch (None: of the batch)."""

    part: int = 0
    parts: int = 1
    group: int | None = None

    def spans(self, size: int) -> tuple[range, ...]:
        """The places in a batch of `size` samples that are this part's, one range for each group.

        >>> Split(1, 2).spans(5)
        (range(2, 5),)
        >>> Split(1, 2, group=4).spans(8)
        (range(2, 4), range(6, 8))
        """
        group = self.group or size
        return tuple(self._of(first, min(group, size - first)) for first in range(0, size, group))

    def held(self, size: int) -> list[int]:
        """The places in a batch of `size` samples that this process fetches: its own, or the first if it has none."""
        return [place for span in self.spans(size) for place in span] or [0]

    def passes(self, size: int, micro_batch: int) -> tuple[Pass, ...]:
        """What this process does of a batch of `size` samples, at most `micro_batch` of them at once.

        All processes make equally many passes, so that what they do together in each of them cannot hang.

        >>> [(p.first, p.size, p.counts) for p in Split(0, 2).passes(5, 2)]
        [(0, 2, True), (0, 1, False)]
        """
        group = self.group or size
        passes: list[Pass] = []
        start = 0
        for first, span in zip(range(0, size, group), self.spans(size), strict=True):
            longest = math.ceil(min(group, size - first) / self.parts)
            cuts = range(0, len(span), micro_batch)
            passes += [
                Pass(start + at, start + min(at + micro_batch, len(span)), span.start + at) for at in cuts
            ]  # fmt: skip
            start += len(span)
            for _ in range(len(cuts), math.ceil(longest / micro_batch)):
                passes.append(Pass(0, 1, self.held(size)[0], counts=False))
        return tuple(passes)

    def _of(self, first: int, size: int) -> range:
        """This part of the samples first..first + size."""
        return range(first + size * self.part // self.parts, first + size * (self.part + 1) // self.parts)


WHOLE_BATCH = Split()
"""What a process that trains alone takes."""


@dataclass(frozen=True)
class InputPipeline:
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


_NO_INDICES: Indices = np.empty(0, np.int64)


@dataclass(frozen=True)
class Batch:
    """An optimiser batch, or what this process takes of it, still raw: `cut` makes micro-batches of it.

    `split` says which samples are here, of the batch's `whole` over all processes (None: all there are).
    """

    content: Content
    indices: Indices
    epoch: int
    pipeline: InputPipeline
    split: Split = WHOLE_BATCH
    whole: int | None = None
    pairing: Pairing | None = None
    """Whom they are mixed with; None: as in the first update, among themselves."""
    along: Indices = field(default_factory=lambda: _NO_INDICES)
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
    pipeline: InputPipeline
    extent: Extent
    seed: int
    plan: Plan
    watch: WorkerWatch = field(default_factory=WorkerWatch, compare=False)
    """Its workers, where there are any."""
    split: Split = WHOLE_BATCH
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
                here, along = (indices, _NO_INDICES) if pairing is None else (indices[:own], indices[own:])
                yield Batch(content, here, epoch, self.pipeline, self.split, whole, pairing, along)

    def _fetched(
        self, samples: Samples, places: Iterator[EpochIndices]
    ) -> Generator[tuple[EpochIndices, Content], None, None]:
        """Raw batches, where they are wanted as soon as they can be."""
        device, loader = self.pipeline.device, self.plan.loader
        if loader == "workers":
            return copied_ahead(self._by_workers(samples, places), device)
        if loader == "memory":
            return copied_ahead(self._gathered(samples, places), device)
        return self._gathered(self._on_device if loader == "device" else samples, places)

    def _gathered(
        self, samples: Samples, places: Iterator[EpochIndices]
    ) -> Generator[tuple[EpochIndices, Content], None, None]:
        for epoch, indices in places:
            yield (epoch, indices), samples.fetch(indices, epoch)

    @cached_property
    def _on_device(self) -> Samples:
        """The samples in the device's memory."""
        return self.samples.on(self.pipeline.device)

    def _by_workers(
        self, samples: Samples, places: Iterator[EpochIndices]
    ) -> Generator[tuple[EpochIndices, Content], None, None]:
        plan, is_pinned = self.plan, self.pipeline.device.type == "cuda"
        return by_workers(
            samples, places, plan.num_workers, plan.prefetch_batches, is_pinned=is_pinned, watch=self.watch
        )

    def _whole(self, update: int) -> int:
        """Samples of the batch of update number `update`, over all processes."""
        return self.extent.batch_at(self.extent.position(update))

    def _places(self, updates: Iterable[int]) -> Iterator[EpochIndices]:
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


def in_order(samples: Samples, pipeline: InputPipeline, size: int, split: Split = WHOLE_BATCH) -> Iterator[Batch]:
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


BatchKey = TypeVar("BatchKey")
Fetched = Generator[tuple[BatchKey, Content], None, None]


def copied_ahead(fetched: Fetched[BatchKey], device: torch.device) -> Fetched[BatchKey]:
    """What is fetched, with its tensors on `device`; as it is where that is no GPU."""
    return _on_gpu(fetched, device) if device.type == "cuda" else fetched


def _on_gpu(fetched: Fetched[BatchKey], device: torch.device) -> Fetched[BatchKey]:
    aside = torch.cuda.Stream(device)

    def copies() -> Iterator[tuple[BatchKey, Content, torch.cuda.Event]]:
        for place, content in fetched:
            with torch.cuda.stream(aside):
                copied = map_tensors(content, lambda tensor: _pinned(tensor).to(device, non_blocking=True))
                arrived = aside.record_event()
            yield place, copied, arrived

    with closing(fetched):
        coming = copies()
        ahead = next(coming, None)
        while ahead is not None:
            (place, content, arrived), ahead = ahead, next(coming, None)
            computing = torch.cuda.current_stream(device)
            computing.wait_event(arrived)
            # The allocator may give the memory to another copy only when what is computed on it is done.
            map_tensors(content, partial(_used_on, computing))
            yield place, content


def _used_on(stream: torch.cuda.Stream, tensor: torch.Tensor) -> None:
    tensor.record_stream(stream)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_cuda or tensor.is_pinned() else tensor.pin_memory()

"""The optimiser batches of a run from any position on: split over processes, cut into micro-batches, on the device.

The batch and its order are the Job's and do not depend on the number of processes. Coupled samples are normalised
together over a group, so each process takes a part of every group; else a part of the batch. Parts are contiguous and
differ by one sample at most, so an uneven batch needs no padding; with fewer samples than processes some take none.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch

from stoker.errors import BadJob
from stoker.jobs.fields import Fields
from stoker.jobs.regularization import Mix
from stoker.jobs.run_length import Extent
from stoker.loading.fields import Content, can_be_cut, cut, is_row_of_tensors, map_tensors, take, tensors_of
from stoker.loading.mixing import Pairing, pairing_of
from stoker.loading.order import Indices, Order
from stoker.loading.samples import Samples
from stoker.loading.streams import ReaderState
from stoker.loading.transforms import Draw, Normalize
from stoker.loading.transforms.traits import moves_pixels, takes_colors
from stoker.loading.workers import EpochIndices, WorkerWatch, by_workers
from stoker.records import Plan, Position


@dataclass(frozen=True)
class Pass:
    """Samples that go through the model at once: places start..stop in this process's part of the batch.

    `first` is the place of the first one in the whole batch. A process that is done while others still work together
    makes passes without `counts`: they repeat a sample, and their loss is left out.
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
        """This part's places in a batch of `size` samples, one range for each group.

        >>> Split(1, 2).spans(5)
        (range(2, 5),)
        >>> Split(1, 2, group=4).spans(8)
        (range(2, 4), range(6, 8))
        """
        group = self.group or size
        spans = []
        for first in range(0, size, group):
            count = min(group, size - first)
            begin, end = (first + count * part // self.parts for part in (self.part, self.part + 1))
            spans.append(range(begin, end))
        return tuple(spans)

    def held(self, size: int) -> list[int]:
        """The places in a batch of `size` samples that this process fetches: its own, or the first if it has none."""
        return [place for span in self.spans(size) for place in span] or [0]

    def passes(self, size: int, micro_batch: int) -> tuple[Pass, ...]:
        """This process's passes over a batch of `size` samples, at most `micro_batch` of them at once.

        All processes make equally many passes, so that their collectives cannot hang.

        >>> [(p.first, p.size, p.counts) for p in Split(0, 2).passes(5, 2)]
        [(0, 2, True), (0, 1, False)]
        """
        group = self.group or size
        passes: list[Pass] = []
        start = 0
        for first, span in zip(range(0, size, group), self.spans(size), strict=True):
            longest = math.ceil(min(group, size - first) / self.parts)
            cuts = range(0, len(span), micro_batch)
            for begin in cuts:
                end = min(begin + micro_batch, len(span))
                passes.append(Pass(start + begin, start + end, span.start + begin))
            start += len(span)
            missing = math.ceil(longest / micro_batch) - len(cuts)
            passes += [Pass(0, 1, self.held(size)[0], counts=False)] * missing
        return tuple(passes)


WHOLE_BATCH = Split()
"""The part of a single process."""


_LEAST_COLOR, _MOST_COLOR = -0.5, 2.0
"""Floating images with values beyond these are no colours from 0 to 1 that noise or resampling moved a little."""


@dataclass(frozen=True)
class InputPipeline:
    """From raw content to model inputs: to the device, augmented, prepared, in the plan's memory format.

    Floating inputs are converted to `dtype` (None: left as they are); float64 is for proofs.
    """

    device: torch.device
    fields: Fields
    prepare: Callable[[Content], Content]
    augment: Sequence[Callable[..., Any]] = ()
    seed: int = 0
    channels_last: bool = False
    dtype: torch.dtype | None = None
    mix: Sequence[Mix] = ()
    """How samples of a batch are mixed in the end; done by `Batch.cut`, which has their partners."""

    def __call__(self, content: Content, epoch: int, indices: Indices, progress: float = 1.0) -> Content:
        """The samples `indices` [B] of `epoch`, ready for the model; `progress` is the share of the run done before."""
        if self._colors is not None:
            self._require_colors(content)
        if self.device.type != "cpu":
            content = map_tensors(content, lambda tensor: tensor.to(self.device, non_blocking=True))
        if self.augment:
            self._require_target_of_no_places(content)
            draw = Draw(self.seed, epoch, indices, self.device, progress)

            def augmented(inputs: torch.Tensor) -> torch.Tensor:
                for transform in self.augment:
                    inputs = transform(inputs, draw)
                return inputs

            content = self.fields.map_inputs(content, augmented)
        prepared = self.prepare(content)
        is_normalized = any(isinstance(transform, Normalize) for transform in self.augment)
        if is_normalized and self._first_input(prepared) is not self._first_input(content):
            raise BadJob(
                "Job(augment=[…, Normalize(…)]) standardises images, and so do the data afterwards, "
                "which take them for bytes from 0 to 255",
                remedy="Leave Normalize out; a source of files takes mean=… and std=….",
            )
        if self.dtype is not None or self.channels_last:
            prepared = map_tensors(prepared, self._converted)
        return prepared

    def _require_colors(self, content: Content) -> None:
        """Raise BadJob if floating images in the host's memory are no colours, of which most would be cut off.

        Only the first images are looked at, which takes no time in later batches.
        """
        images = self._first_input(content)
        if vars(self).get("_has_colors") or type(images) is not torch.Tensor or images.device.type != "cpu":
            return
        if images.is_floating_point() and images.numel():
            low, high = (float(end) for end in images.aminmax())
            if low < _LEAST_COLOR or high > _MOST_COLOR:
                raise BadJob(
                    f"Job(augment=[…, {self._colors}(…)]) takes floating images to go from 0 to 1 and cuts off what is "
                    f"beyond; these go from {low:.3g} to {high:.3g}",
                    remedy="Give bytes, or colours from 0 to 1, and standardise last: "
                    "augment=[…, Normalize(mean, std)].",
                )
        vars(self)["_has_colors"] = True

    def _require_target_of_no_places(self, content: Content) -> None:
        """Raise BadJob if pixels of the input are moved, and the target has as many of its own, which stay.

        Learned would be from an image and a mask that do not belong together.
        """
        if self._moving is None:
            return
        inputs, target = self._first_input(content), self.fields.target_of(content)
        if not (isinstance(inputs, torch.Tensor) and isinstance(target, torch.Tensor) and target is not inputs):
            return
        if inputs.dim() == 4 and target.dim() >= 3 and target.shape[-2:] == inputs.shape[-2:] != (1, 1):
            raise BadJob(
                f"Job(augment=[…, {self._moving}(…)]) moves the pixels of the input {list(inputs.shape[1:])} alone, "
                f"and the target {list(target.shape[1:])} is an image of the same size: they would no longer match",
                remedy="Move both in the dataset's __getitem__, where draws from random, numpy.random and torch are "
                "keyed; colours, noise and covering can stay in augment. A transform of your own is taken as it is.",
            )

    @cached_property
    def _colors(self) -> str | None:
        return takes_colors(self.augment)

    @cached_property
    def _moving(self) -> str | None:
        return moves_pixels(self.augment)

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


@dataclass(eq=False)
class Batch:
    """An optimiser batch, or this process's part of it, still raw: `cut` makes micro-batches of it.

    `split` is the part held here, and `whole` the batch's samples over all processes (None: as many as are here).
    """

    content: Content
    indices: Indices
    epoch: int
    pipeline: InputPipeline
    split: Split = WHOLE_BATCH
    whole: int | None = None
    pairing: Pairing | None = None
    """The partners they are mixed with; None: as in the first update, among themselves."""
    along: Indices = field(default_factory=lambda: _NO_INDICES)
    """Partners fetched in addition, which follow them in `content`."""
    progress: float = 1.0
    """Share of the run's samples done before; 1 outside of a run's updates."""

    @property
    def size(self) -> int:
        """Number of samples held here."""
        return len(self.indices)

    @property
    def whole_size(self) -> int:
        """Number of samples over all processes."""
        return self.size if self.whole is None else self.whole

    def passes(self, micro_batch: int) -> tuple[Pass, ...]:
        """The passes of its samples through the model, at most `micro_batch` at once."""
        return self.split.passes(self.whole_size, micro_batch)

    def cut(self, start: int, stop: int) -> Content:
        """Samples start..stop, ready for the model.

        Raises:
            BadJob: nothing in the batch has an entry for each sample; or its inputs cannot be mixed as the job asks.
        """
        ready = self._ready(start, stop)
        if not self.pipeline.mix:
            return ready
        pairing = self._pairing
        rows, size = pairing.rows[start:stop], len(self.indices) + len(self.along)
        if stop - start == size:
            partners = take(ready, rows.tolist(), size)
        else:
            indices = np.concatenate([self.indices, self.along])[rows]
            partners = self.pipeline(take(self.content, rows.tolist(), size), self.epoch, indices, self.progress)
        return pairing.mixed(ready, partners, start, stop, self.pipeline.fields)

    def _ready(self, start: int, stop: int) -> Content:
        size = len(self.indices) + len(self.along)
        if stop - start == size and is_row_of_tensors(self.content):
            return self.pipeline(self.content, self.epoch, self.indices, self.progress)
        if not (stop - start == size or can_be_cut(self.content, size)):
            raise BadJob(
                f"a batch of {size} samples cannot be cut: no tensor in it has {size} rows",
                remedy="Let stoker.Fields(collate=…) give tensors [B, ...], or declare Objective(loss, scope='batch').",
            )
        # Cut even where nothing is left out: a batch then has one type, whatever the micro-batch.
        raw = cut(self.content, start, stop, size)
        return self.pipeline(raw, self.epoch, self.indices[start:stop], self.progress)

    @cached_property
    def _pairing(self) -> Pairing:
        if self.pairing is not None:
            return self.pairing
        return pairing_of(self.pipeline.mix, seed=self.pipeline.seed, epoch=self.epoch, update=0, size=self.size)


@dataclass(frozen=True)
class BatchSource:
    """The batches of a run: samples in keyed order, fetched as the plan says."""

    samples: Samples
    pipeline: InputPipeline
    extent: Extent
    seed: int
    plan: Plan
    watch: WorkerWatch = field(default_factory=WorkerWatch, compare=False)
    """Its workers, if any."""
    split: Split = WHOLE_BATCH
    """This process's part of each batch."""
    reader: ReaderState = field(default_factory=ReaderState, compare=False)
    """The position of its stream, if that has a state."""
    order: Order = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "order", self.samples.order(self.seed))

    def use(self, pipeline: InputPipeline) -> None:
        """Make the next batches' inputs by another pipeline, such as one of another memory format."""
        object.__setattr__(self, "pipeline", pipeline)

    def batches(self, start: Position, total_updates: int) -> Generator[Batch, None, None]:
        """The batches of updates `start.updates` up to `total_updates`, in order.

        Raises:
            BadJob: a sample cannot be fetched or collated.
            RunFailed: a loader worker died twice over the same batch.
        """
        updates = range(start.updates, total_updates)
        samples = self.reader.begin(self.samples)
        with closing(self._fetched(samples, self._places(updates))) as fetched:
            for update, ((epoch, indices), raw) in zip(updates, fetched, strict=True):
                content = self.reader.taken(samples, raw)
                pairing = self._pairing(update)
                own = len(indices) - (0 if pairing is None else len(pairing.extra))
                whole = own if self.split.parts == 1 else self._whole(update)
                here, along = (indices, _NO_INDICES) if pairing is None else (indices[:own], indices[own:])
                yield Batch(content, here, epoch, self.pipeline, self.split, whole, pairing, along)

    def _fetched(self, samples: Samples, places: Iterator[EpochIndices]) -> Fetched[EpochIndices]:
        """Raw batches, copied to the device ahead of use if their loader allows it."""
        device, loader, plan = self.pipeline.device, self.plan.loader, self.plan
        if loader == "workers":
            fetched = by_workers(
                samples,
                places,
                plan.num_workers,
                plan.prefetch_batches,
                is_pinned=device.type == "cuda",
                watch=self.watch,
            )
            return copied_ahead(fetched, device)
        if loader == "memory":
            return copied_ahead(self._gathered(samples, places), device)
        return self._gathered(self._on_device if loader == "device" else samples, places)

    def _gathered(self, samples: Samples, places: Iterator[EpochIndices]) -> Fetched[EpochIndices]:
        for epoch, indices in places:
            yield (epoch, indices), samples.fetch(indices, epoch)

    @cached_property
    def _on_device(self) -> Samples:
        """The samples in the device's memory."""
        return self.samples.on(self.pipeline.device)

    def _whole(self, update: int) -> int:
        """Number of samples in the batch of update number `update`, over all processes."""
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
        """The partners of this process's samples; None where nothing is mixed."""
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


BatchKey = TypeVar("BatchKey")
Fetched = Generator[tuple[BatchKey, Content], None, None]


def copied_ahead(fetched: Fetched[BatchKey], device: torch.device) -> Fetched[BatchKey]:
    """Batches with their tensors on `device`; unchanged unless that is a GPU.

    What: each batch is copied from page-locked memory on a separate stream, one batch ahead of the one given back.
    Use when: batches are in the host's memory, or come from workers. Costs: the device's memory of one more batch.
    Does not combine with: fetching in the training process, where a batch fetched ahead would draw from the generators
    that a checkpoint keeps. Source: https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html.
    """
    return _on_gpu(fetched, device) if device.type == "cuda" else fetched


def _on_gpu(fetched: Fetched[BatchKey], device: torch.device) -> Fetched[BatchKey]:
    copy_stream = torch.cuda.Stream(device)

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        pinned = tensor if tensor.is_cuda or tensor.is_pinned() else tensor.pin_memory()
        return pinned.to(device, non_blocking=True)

    def copies() -> Iterator[tuple[BatchKey, Content, torch.cuda.Event]]:
        for place, content in fetched:
            with torch.cuda.stream(copy_stream):
                on_device = map_tensors(content, copied)
                arrived = copy_stream.record_event()
            yield place, on_device, arrived

    in_use: deque[torch.cuda.Event] = deque()
    with closing(fetched):
        coming = copies()
        ahead = next(coming, None)
        while ahead is not None:
            (place, content, arrived), ahead = ahead, next(coming, None)
            torch.cuda.current_stream(device).wait_event(arrived)
            # The allocator may reuse the memory for another copy only after the computation on it.
            for tensor in tensors_of(content):
                tensor.record_stream(torch.cuda.current_stream(device))
            yield place, content
            in_use.append(torch.cuda.current_stream(device).record_event())
            if len(in_use) > _QUEUED:
                in_use.popleft().synchronize()


_QUEUED = 4
"""Updates that the host may be ahead of a GPU: each holds its batch there, and a captured one is a single launch, of
which a GPU queues about a thousand."""

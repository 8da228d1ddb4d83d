"""Streams: samples read one after the other, by one reader, from the beginning of every epoch.

What: on resume a stream is read again up to the batch (*stream*), or positioned by its own state, which is kept with
each checkpoint (*seekable*). Use when: samples have no index, such as data from a network. Costs: a stream without a
state is replayed on resume; each of several processes reads all of it and takes its share.
Does not combine with: loader workers beyond one, a holdout, `sampling`, batch="auto".
Source: the state protocol is the one of torchdata's stateful data sets, https://github.com/meta-pytorch/data.
"""

from __future__ import annotations

import copy
import json
import mmap
import os
import struct
import weakref
from collections.abc import Callable, Iterator, Sized
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stoker.data.files.source import StreamSource
from stoker.errors import BadJob, RunFailed
from stoker.jobs.code_digest import name_of
from stoker.loading.fields import Content
from stoker.loading.order import (
    Indices,
    KeyedPermutation,
    Order,
    RandomStream,
    SequentialOrder,
    key_of,
    seed_generators,
)
from stoker.loading.samples import BadSample, ItemSamples, RearrangedSamples, Samples, digest_of_items
from stoker.records import DataClass
from stoker.records.codec import JSON

_HASHED_ITEMS = 16
_AT_HAND = 64
_CONTAINERS = (dict, set, frozenset, str, bytes)
_PLACE = struct.Struct("q")
_reached = mmap.mmap(-1, _PLACE.size)
"""The place of the last sample that was read of a stream; shared with forked workers, without a file."""


def place_reached() -> int:
    """The place of the last sample that this process or a forked worker of it read of a stream: a sign of life."""
    (place,) = _PLACE.unpack(_reached[:])
    return int(place)


def is_stream(data: Any) -> bool:
    """Whether `data` can only be read one sample after the other."""
    if isinstance(data, StreamSource | torch.utils.data.IterableDataset | torch.utils.data.DataLoader):
        return True
    has_numbers = hasattr(data, "__getitem__") or hasattr(data, "arrays") or isinstance(data, _CONTAINERS)
    return hasattr(data, "__iter__") and not has_numbers


def as_stream(
    data: Any, *, what: str, collate: Callable[[list[Any]], Any] | None = None, seed: int = 0, length: int | None = None
) -> StreamSamples:
    """`data` as Samples that are read in order.

    Args:
        data: a stream by `is_stream`.
        what: names it in errors ("data", "valid", "test").
        collate: makes a batch of a list of samples.
        seed: fixes its random draws and its shuffling.
        length: samples to take if the stream's length is unknown.

    Raises:
        BadJob: it can be read only once, is a loader, or its length is unknown.
    """
    if isinstance(data, torch.utils.data.DataLoader):
        raise BadJob(
            f"{what} is a DataLoader, whose batches are made already",
            remedy="Give its dataset; batches, order and workers are Stoker's.",
        )
    if not isinstance(data, StreamSource):
        try:
            data = StreamSource(data)
        except BadJob as problem:
            raise BadJob(f"{what}: {problem.message}", remedy=problem.remedy) from None
    stated = data.length
    if stated is None and isinstance(data.source, Sized):
        with suppress(TypeError):  # raised by a `__len__` that has no length to give
            stated = len(data.source)
    taken = length if stated is None else stated
    if taken is None:
        raise BadJob(
            f"{what} is a stream that does not say how many samples it has, so that an epoch has no end",
            remedy=f"Give {what}=stoker.data.stream(…, length=…)"
            + (", or until=stoker.samples(…) or stoker.updates(…)." if what == "data" else "."),
        )
    if taken < 1:
        raise BadJob(f"{what} has no samples", remedy="Give at least one sample.")
    return StreamSamples(data, taken, collate, seed, is_stated=stated is not None)


class StreamSamples(Samples):
    """The samples of a stream: sample i is the one at place i of an epoch, after any shuffling of its blocks.

    Access in increasing order reads on; going back reads from the beginning, or from a state set by `seek`. Before a
    sample is read, the global generators are seeded from (seed, epoch, place).
    """

    is_in_memory = False

    def __init__(
        self,
        given: StreamSource,
        length: int,
        collate: Callable[[list[Any]], Any] | None,
        seed: int,
        *,
        is_stated: bool = True,
    ) -> None:
        self.given = given
        self.name = type(given.source).__name__
        self._length = length
        self._is_stated = is_stated
        self._items = ItemSamples(given.source, collate, seed)
        self._seed = seed
        self._initial = initial_state(given.source)
        self.data_class: DataClass = "seekable" if can_be_kept(self._initial) else "stream"
        self._reader: StreamReader | None = None
        self._sought: StreamPosition | None = None

    def __len__(self) -> int:
        """Samples in an epoch."""
        return self._length

    @property
    def has_state(self) -> bool:
        """Whether the source can be positioned by its own methods."""
        return self._initial is not None

    @property
    def num_at_hand(self) -> int:
        """Number of first samples that are cheap to fetch [samples]: later ones need reading up to them."""
        return min(len(self), _AT_HAND)

    def order(self, seed: int) -> Order:
        """The order of the stream."""
        return SequentialOrder(len(self))

    def fetch(self, indices: Indices, epoch: int) -> Content:
        """The samples at places `indices` [B] of an epoch, collated; fast if they follow the last ones."""
        return self._items.collate(self.items(indices, epoch), indices)

    def items(self, indices: Indices, epoch: int) -> list[Any]:
        """The samples at these places, each read once, in the order of the stream."""
        items = {}
        for place in sorted({int(index) for index in indices}):
            if self._reader is None or not self._reader.reaches(epoch, place):
                if self._reader is not None:
                    self._reader.close()
                self._reader = self._opened(epoch, place, self.given.buffer or 1)
            items[place] = self._reader.item(place)
        return [items[int(index)] for index in indices]

    def fingerprint(self) -> str:
        """Digest of the stream's type, its length if it has one, its blocks, and its first few samples."""
        first = self._opened(0, 0, block=1)
        items = [first.item(place) for place in range(min(_HASHED_ITEMS, len(self)))]
        first.close()
        length = len(self) if self._is_stated or self.given.buffer else "open"  # the last block ends with the epoch
        what = f"{name_of(type(self.given.source))}:{length}:{self.given.buffer}"
        return f"{digest_of_items(what, items)} (of the first {len(items)} items)"

    def prepare(self, content: Content) -> Content:
        """Nothing: items come prepared."""
        return content

    def seek(self, state: str) -> None:
        """Begin reading later places at `state`, a result of `state()`, and not where a reader is."""
        self._sought, self._reader = StreamPosition(**json.loads(state)), None

    def state(self) -> str | None:
        """The reader's position as JSON; None for a stream without a state, or before the first read."""
        if self.data_class != "seekable" or self._reader is None:
            return None
        return json.dumps(vars(self._reader.sought()))

    def _opened(self, epoch: int, place: int, block: int) -> StreamReader:
        start = self._sought
        if start is None or start.epoch != epoch or start.place > place:
            start = StreamPosition(epoch, 0, self._initial)
        return StreamReader(self.given.source, start, len(self), self._seed, block, goes_round=not self._is_stated)


class WithState(RearrangedSamples):
    """A stream's samples, fetched as pairs of a batch and the reader's state after it."""

    def __init__(self, stream: StreamSamples) -> None:
        super().__init__(stream, "with state")
        self.name = stream.name
        self.stream = stream

    def fetch(self, indices: Indices, epoch: int) -> Content:
        """The batch, and the state as text."""
        return self.stream.fetch(indices, epoch), self.stream.state()


class ReaderState:
    """The state of a stream after the last batch given out, for checkpoints."""

    def __init__(self) -> None:
        self.state: str | None = None

    def kept(self) -> dict[str, JSON]:
        """Its entry in a checkpoint."""
        return {} if self.state is None else {"reader": self.state}

    def begin(self, samples: Samples) -> Samples:
        """The samples to fetch from, positioned at the state; a seekable stream then returns its states too."""
        if not isinstance(samples, StreamSamples) or samples.data_class != "seekable":
            return samples
        if self.state is not None:
            samples.seek(self.state)
        return WithState(samples)

    def taken(self, samples: Samples, fetched: Content) -> Content:
        """The batch in `fetched`; keeps its state."""
        if isinstance(samples, WithState):
            content, self.state = fetched
            return content
        return fetched


_WRAPPED = ("_ex_iterable", "ex_iterable")
"""Attributes by which data sets of Hugging Face wrap each other."""
_INITIAL_STATES: dict[int, Any] = {}
"""The states of sources when they were first seen, by their ids; removed with the source."""
_FORGETFUL = "BufferShuffled"
"""Its state leaves out the samples in its buffer: reading on from it would skip them."""


@dataclass(frozen=True)
class StreamPosition:
    """The beginning of a stream's block: at `place` of `epoch`, its source in `state` (None: it has none).

    `round` counts how often a source without a known length ended before.
    """

    epoch: int
    place: int
    state: Any
    round: int = 0


class StreamReader:
    """One epoch of a source, block by block; usable only in the process that made it.

    `goes_round`: its length is unknown, and at its end it is read again, as another epoch of its own.
    """

    def __init__(
        self, source: Any, start: StreamPosition, length: int, seed: int, block: int, *, goes_round: bool = False
    ) -> None:
        self._goes_round, self._round, self._read_in_round = goes_round, start.round, start.place
        self._source, self._length, self._seed, self._block = source, length, seed, block
        self._epoch, self._process = start.epoch, os.getpid()
        self._begin = self._end = start.place
        self._held: list[Any] = []
        self._order = np.zeros(1, np.int64)
        self._start = self._before = start
        self._can_be_sought = can_be_kept(start.state)
        self._iterator = self._iterated(start)

    def reaches(self, epoch: int, place: int) -> bool:
        """Whether the sample at `place` is held or still to be read."""
        return (self._epoch, self._process) == (epoch, os.getpid()) and place >= self._begin

    def item(self, place: int) -> Any:
        """The sample at `place`, which it reaches.

        Raises:
            BadSample: reading raised, or the stream ended.
        """
        while place >= self._end:
            if self._block > 1 and self._can_be_sought:
                self._before = self._now()
            begin, size = self._end, min(self._block, self._length - self._end)
            self._held = [self._read(begin + offset) for offset in range(size)]
            self._begin, self._end = begin, begin + size
            if self._block > 1:
                key = key_of(RandomStream.ORDER, self._seed, self._epoch, begin)
                self._order = KeyedPermutation(size, key)(np.arange(size, dtype=np.int64))
        return self._held[self._order[place - self._begin]]

    def sought(self) -> StreamPosition:
        """The position to resume from: after the last sample, or before the last block if blocks are shuffled."""
        if self._block > 1 or not self._can_be_sought:
            return self._before
        return self._now()

    def close(self) -> None:
        """Close the source's iterator."""
        close = getattr(self._iterator, "close", None)
        if callable(close):
            close()

    def _iterated(self, start: StreamPosition) -> Iterator[Any]:
        if callable(getattr(self._source, "set_epoch", None)):
            self._source.set_epoch(start.epoch + start.round)
        if start.state is not None:
            self._source.load_state_dict(copy.deepcopy(start.state))
        seed_generators(key_of(RandomStream.ITEM, self._seed, start.epoch, start.place))
        return iter(self._source)

    def _now(self) -> StreamPosition:
        """The source's position; or the start of this pass, if its state is no longer JSON.

        A state with numbers for keys, which JSON turns into texts, would come back different.
        """
        state = self._source.state_dict()
        return StreamPosition(self._epoch, self._end, _plain(state), self._round) if can_be_kept(state) else self._start

    def _read(self, place: int) -> Any:
        seed_generators(key_of(RandomStream.ITEM, self._seed, self._epoch, place))
        name = type(self._source).__name__
        try:
            item = next(self._iterator)
            self._read_in_round += 1
            _reached[:] = _PLACE.pack(place)
            return item
        except StopIteration:
            if self._goes_round and self._read_in_round:
                self._round, self._read_in_round = self._round + 1, 0
                self.close()
                begin = StreamPosition(self._epoch, place, initial_state(self._source), self._round)
                self._iterator = self._iterated(begin)
                return self._read(place)
            raise BadSample(
                f"the stream {name} ended after {place:,} samples of epoch {self._epoch + 1}; {self._length:,} were to "
                "be read. Say how many it has with stoker.data.stream(…, length=…), or train for fewer"
            ) from None
        except RunFailed:  # the watchdog's verdict on a source that hangs
            raise
        except Exception as error:
            raise BadSample(f"sample {place} of the stream {name} raised {type(error).__name__}: {error}") from error


def initial_state(source: Any) -> Any:
    """The state of a source when it was first seen, from which every epoch begins; None where it has none.

    It is kept for later jobs with the same source, which may have been read from by then.
    """
    if id(source) in _INITIAL_STATES:
        return _INITIAL_STATES[id(source)]
    methods = (getattr(source, name, None) for name in ("state_dict", "load_state_dict"))
    if not all(map(callable, methods)) or _forgets(source):
        return None
    state = copy.deepcopy(source.state_dict())
    with suppress(TypeError):  # a source without weak references is not remembered
        weakref.finalize(source, _INITIAL_STATES.pop, id(source), None).atexit = False
        _INITIAL_STATES[id(source)] = state
    return state


def can_be_kept(state: Any) -> bool:
    """Whether a checkpoint can keep a state: it exists, and is JSON."""
    try:
        return state is not None and bool(_plain(state) == state)
    except (TypeError, ValueError, RuntimeError):  # a tensor, an array, a reference to itself
        return False


def _plain(state: Any) -> JSON:
    """A copy of `state` as JSON."""
    plain: JSON = json.loads(json.dumps(state))
    return plain


def _forgets(source: Any) -> bool:
    """Whether its state leaves out samples that were read already, such as in a buffer for shuffling."""
    inner, seen = source, set[int]()
    while inner is not None and id(inner) not in seen:
        seen.add(id(inner))
        if type(inner).__name__.startswith(_FORGETFUL):
            return True
        inner = next((getattr(inner, name) for name in _WRAPPED if getattr(inner, name, None) is not None), None)
    return False

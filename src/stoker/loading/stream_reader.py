"""Reading of a stream, from its beginning or from where its state puts it."""

from __future__ import annotations

import copy
import json
import os
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from stoker.loading.generators import seed_generators
from stoker.loading.keys import Stream, key_of
from stoker.loading.order import KeyedPermutation
from stoker.loading.samples import BadSample
from stoker.records.codec import JSON

_WRAPPED = ("_ex_iterable", "ex_iterable")
"""Where the data sets of Hugging Face keep what they read from."""
_INITIAL_STATES: dict[int, Any] = {}
"""The states that sources had when they were first seen, by their ids; gone with the source."""
_FORGETFUL = "BufferShuffled"
"""Its state leaves out the samples in its buffer: who goes on from it misses them."""


@dataclass(frozen=True)
class Sought:
    """Where a stream's block begins: at `place` of `epoch`, its source in `state` (None: it has none).

    `round` counts how often the source ended before, where its epoch has no end of its own.
    """

    epoch: int
    place: int
    state: Any
    round: int = 0


class Reader:
    """One epoch of a source, block by block; it is not used in another process than the one it was made in.

    `goes_round`: nobody knows how many samples it has, and where it ends it is read again, as another epoch of its own.
    """

    def __init__(
        self, source: Any, start: Sought, length: int, seed: int, block: int, *, goes_round: bool = False
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
        """Whether the sample at `place` is at hand or yet to come."""
        return (self._epoch, self._process) == (epoch, os.getpid()) and place >= self._begin

    def item(self, place: int) -> Any:
        """The sample at `place`, which it reaches.

        Raises:
            BadSample: reading raised, or the stream ended.
        """
        while place >= self._end:
            self._read_block()
        return self._held[self._order[place - self._begin]]

    def sought(self) -> Sought:
        """From where to read on for what comes after the block that was read last, or for the rest of that block."""
        if self._block > 1 or not self._can_be_sought:
            return self._before
        return self._now()

    def close(self) -> None:
        """Let go of what the source has opened."""
        close = getattr(self._iterator, "close", None)
        if callable(close):
            close()

    def _iterated(self, start: Sought) -> Iterator[Any]:
        if callable(getattr(self._source, "set_epoch", None)):
            self._source.set_epoch(start.epoch + start.round)
        if start.state is not None:
            self._source.load_state_dict(copy.deepcopy(start.state))
        seed_generators(key_of(Stream.ITEM, self._seed, start.epoch, start.place))
        return iter(self._source)

    def _read_block(self) -> None:
        if self._block > 1 and self._can_be_sought:
            self._before = self._now()
        begin, size = self._end, min(self._block, self._length - self._end)
        self._held = [self._read(begin + at) for at in range(size)]
        self._begin, self._end = begin, begin + size
        if self._block > 1:
            key = key_of(Stream.ORDER, self._seed, self._epoch, begin)
            self._order = KeyedPermutation(size, key)(np.arange(size, dtype=np.int64))

    def _now(self) -> Sought:
        """Where the source is; or where this pass began, if its state is no JSON any more.

        One with numbers for keys, of which JSON makes texts, would come back as another.
        """
        state = self._source.state_dict()
        return Sought(self._epoch, self._end, _plain(state), self._round) if can_be_kept(state) else self._start

    def _read(self, place: int) -> Any:
        seed_generators(key_of(Stream.ITEM, self._seed, self._epoch, place))
        name = type(self._source).__name__
        try:
            item = next(self._iterator)
            self._read_in_round += 1
            return item
        except StopIteration:
            if self._goes_round and self._read_in_round:
                self._round, self._read_in_round = self._round + 1, 0
                self.close()
                begin = Sought(self._epoch, place, initial_state(self._source), self._round)
                self._iterator = self._iterated(begin)
                return self._read(place)
            raise BadSample(
                f"the stream {name} ended after {place:,} samples of epoch {self._epoch + 1}; {self._length:,} were to "
                "be read. Say how many it has with stoker.data.stream(…, length=…), or train for fewer"
            ) from None
        except Exception as error:
            raise BadSample(f"sample {place} of the stream {name} raised {type(error).__name__}: {error}") from error


def initial_state(source: Any) -> Any:
    """The state of a source when it was first seen here, from which every epoch begins; None where it has none.

    Another job of the same source is made of it when it may have been read from.
    """
    if id(source) in _INITIAL_STATES:
        return _INITIAL_STATES[id(source)]
    methods = (getattr(source, name, None) for name in ("state_dict", "load_state_dict"))
    if not all(map(callable, methods)) or _forgets(source):
        return None
    state = copy.deepcopy(source.state_dict())
    with suppress(TypeError):  # what no weak reference can be made to is not remembered
        weakref.finalize(source, _INITIAL_STATES.pop, id(source), None).atexit = False
        _INITIAL_STATES[id(source)] = state
    return state


def can_be_kept(state: Any) -> bool:
    """Whether a checkpoint can keep a state: there is one, and it is JSON."""
    try:
        return state is not None and bool(_plain(state) == state)
    except (TypeError, ValueError, RuntimeError):  # a tensor, an array, what refers to itself
        return False


def _plain(state: Any) -> JSON:
    """A copy of `state` as JSON."""
    found: JSON = json.loads(json.dumps(state))
    return found


def _forgets(source: Any) -> bool:
    """Whether its state leaves out samples that were read already, such as those in a buffer for shuffling."""
    inner, seen = source, set[int]()
    while inner is not None and id(inner) not in seen:
        seen.add(id(inner))
        if type(inner).__name__.startswith(_FORGETFUL):
            return True
        inner = next((getattr(inner, name) for name in _WRAPPED if getattr(inner, name, None) is not None), None)
    return False

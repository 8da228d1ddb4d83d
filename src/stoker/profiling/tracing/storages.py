"""Storages on the traced device: when each is born and dies, what it is for, and whose it is."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from stoker.profiling.tracing.fake_device import Patches, storage_key
from stoker.profiling.tracing.operations import tensors_in
from stoker.profiling.tracing.widening import TensorUse
from stoker.records import Category, Occurrence, Operation


@dataclass(slots=True)
class Life:
    """One storage: bytes, its birth and death as indices of occurrences (-1: before), what it is, whose it is."""

    num_bytes: int
    born: int
    died: int | None = None
    category: Category | None = None
    owner: str = ""
    is_all: bool = False
    """Whether it holds the answer of `all`, which is taken to be yes."""


@dataclass(frozen=True)
class Loop:
    """A loop of which some steps were left out (`time_steps.py`).

    Its occurrences are start <= i < stop; `node` is the number of autograd's last node before it.
    """

    start: int
    stop: int
    node: int


@dataclass
class Recording:
    """What was seen of one update, in order; see `Trace`."""

    operations: list[Operation] = field(default_factory=list)
    occurrences: list[Occurrence] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    backward_starts: list[int] = field(default_factory=list)
    micro_batch_starts: list[int] = field(default_factory=list)
    """How many occurrences there were whenever samples were made ready for a pass."""
    uses: list[TensorUse] = field(default_factory=list)
    """Whose tensors each occurrence takes and gives."""
    nodes: list[int] = field(default_factory=list)
    """The number of autograd's node that each occurrence makes or, in a backward pass, belongs to; -1: to none."""
    loops: list[Loop] = field(default_factory=list)


class Storages:
    """The storages that live on `device`, and in `recording`, if there is one, their births and deaths."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.recording: Recording | None = None
        self._live: dict[int, Life] = {}
        self._watches: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._numbers: dict[int, int] = {}
        self._owners_elsewhere: dict[int, str] = {}

    def begin(self, recording: Recording) -> None:
        """Record from here on; what lives now was born before."""
        self.recording = recording
        for key, life in self._live.items():
            # Kept from update to update, and told to be nothing else: a cache.
            self._live[key] = replace(life, born=-1, died=None, category=life.category or "buffer")
            self._note_birth(key, self._live[key])

    def end(self) -> None:
        """Record no more; what lives now outlives the update."""
        self.recording = None
        self._numbers.clear()

    def hold(self, tensor: torch.Tensor, category: Category, owner: str = "") -> None:
        """Follow the storage of `tensor` from now on, and say what it is for and which module it belongs to."""
        life = self.follow(tensor)
        if life is not None:
            life.category, life.owner = category, owner
        else:
            self._owners_elsewhere[storage_key(tensor.untyped_storage())] = owner

    def follow(self, tensor: torch.Tensor) -> Life | None:
        """The life of the tensor's storage, which begins now if it was not known; None if it lies elsewhere."""
        storage = tensor.untyped_storage()
        life = self._live.get(storage_key(storage))
        if life is None and storage.nbytes() and tensor.device.type == self.device.type:
            return self._bear(storage)
        return life

    def is_new(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's storage lies on the device, has a size, and is not known yet."""
        if tensor.device.type != self.device.type:
            return False
        storage = tensor.untyped_storage()
        return storage_key(storage) not in self._live and storage.nbytes() > 0

    def life_of(self, tensor: torch.Tensor) -> Life | None:
        """The life of the tensor's storage, if it is known."""
        return self._live.get(storage_key(tensor.untyped_storage()))

    def owner(self, tensor: torch.Tensor) -> str:
        """Dotted name of the module that a tensor belongs to, wherever it lies; empty if none."""
        key = storage_key(tensor.untyped_storage())
        life = self._live.get(key)
        return self._owners_elsewhere.get(key, "") if life is None else life.owner

    def owner_of_first(self, values: Iterable[Any]) -> str:
        """The owner of the first tensor among `values` that has one."""
        return next(filter(None, map(self.owner, tensors_in(values))), "")

    def owners_of_results(self, args: tuple[Any, ...], count: int) -> list[str]:
        """Whose `count` results are, if no module is running: of a list, those of its elements, each in its place."""
        first = args[0] if args else None
        if isinstance(first, list | tuple) and len(first) == count:
            return [self.owner_of_first([one]) for one in first]
        if isinstance(first, list | tuple) and len({self.owner(one) for one in tensors_in(first)}) > 1:
            return [""] * count  # what is made of several modules' tensors together is nobody's
        return [self.owner_of_first(args)] * count

    @contextlib.contextmanager
    def following_resizes(self) -> Iterator[None]:
        """Within the block it is seen where a storage is resized by hand, as sharded parameters are."""
        resize = torch.UntypedStorage.resize_

        def resize_and_tell(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            self._resized(storage)

        with Patches() as patches:
            patches.put(torch.UntypedStorage, "resize_", resize_and_tell)
            yield

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """A storage that changes its size dies, and another is born in its place."""
        key = storage_key(storage)
        old = self._live.get(key)
        if old is None or old.num_bytes != storage.nbytes():
            self._bury(key)
            if storage.nbytes():
                life = self._bear(storage)
                life.category, life.owner = (None, "") if old is None else (old.category, old.owner)

    def _bear(self, storage: torch.UntypedStorage) -> Life:
        key = storage_key(storage)
        born = -1 if self.recording is None else len(self.recording.occurrences) - 1
        life = self._live[key] = Life(storage.nbytes(), born)
        self._watches[key] = weakref.ref(storage, lambda _watch: self._bury(key))
        if self.recording is not None:
            self._note_birth(key, life)
        return life

    def _note_birth(self, key: int, life: Life) -> None:
        assert self.recording is not None
        self.recording.lives.append(life)
        number = self._numbers[key] = len(self.recording.lives)
        self.recording.events.append(number)

    def _bury(self, key: int) -> None:
        life = self._live.pop(key, None)
        self._watches.pop(key, None)
        if self.recording is not None and life is not None:
            life.died = len(self.recording.occurrences) - 1
            self.recording.events.append(-self._numbers[key])

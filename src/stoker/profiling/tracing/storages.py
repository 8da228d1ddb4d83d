"""Storages on the traced device: when each is born and dies, what it is for, and whose it is.

Operations over lists of tensors, as a model with all its blocks executes them.

An optimiser, a clipped norm and an average take lists of all parameters, gradients or states. In the trace of a
shortened model the lists are short; here the tensors of the blocks left out are put in their places.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from stoker.profiling.tracing.fake_device import Patches, storage_key
from stoker.profiling.tracing.operations import tensors_in
from stoker.records import Category, Occurrence, Operation, TensorShape, Trace, Widened
from stoker.records.trace import NotPeriodic, sweeps_of


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
class TracedLoop:
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
    loops: list[TracedLoop] = field(default_factory=list)


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


_BYTES = {
    "fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
    "complex64": 8, "complex128": 16,
}  # fmt: skip


class TensorUse(NamedTuple):
    """Whose tensors an operation takes and gives, in the order of `Operation.inputs` and `outputs`.

    Owners are dotted names of modules, '' where there is none. `identities` tell inputs apart: equal ones are the same
    tensor, taken twice.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    identities: tuple[int, ...]


class Widening:
    """Finds what goes over several blocks at once, and widens it.

    Args:
        trace: of the shortened model.
        traced: how many blocks were traced.
        copies: of which of these there are how many more.
        block_of: the block that a module belongs to, by its name; None for those outside.
    """

    def __init__(
        self, trace: Trace, traced: int, copies: Mapping[int, int], block_of: Mapping[str, int | None]
    ) -> None:
        self._trace, self._traced, self._copies, self._block_of = trace, traced, copies, block_of
        self.widened: list[Widened] = []
        self.grown: dict[int, int] = {}
        self._stacked: dict[int, TensorShape] = {}

    def look_at(self, index: int, use: TensorUse) -> None:
        """Widen an occurrence that is no block's own, if its tensors are of several blocks.

        Raises:
            NotPeriodic: they are, or are of one in the middle, and it is not known what others would add.
        """
        blocks = self._blocks(use.inputs)
        if self._trace.occurrences[index].phase != "optimizer":
            if set(blocks) - {None, 0, self._traced - 1}:
                raise NotPeriodic(f"{self._operation(index).name} in no block is on tensors of one in the middle")
            return
        wide = self._on_stacked(index) if not set(blocks) - {None} else self._on_list(index, use, blocks)
        if wide is not None:
            self.widened.append(Widened(occurrence=index, operation=wide))

    def require_near(self, index: int, block: int, use: TensorUse) -> None:
        """Raise NotPeriodic if a block's occurrence takes tensors of blocks that are not its neighbours."""
        if any(other is not None and abs(other - block) > 1 for other in self._blocks(use.inputs)):
            raise NotPeriodic(f"{self._operation(index).name} of block {block} is on tensors of blocks further away")

    def _on_list(self, index: int, use: TensorUse, blocks: list[int | None]) -> Operation:
        operation = self._operation(index)
        if operation.flops or not operation.name.startswith(("_foreach_", "_fused_", "stack")):
            raise NotPeriodic(f"{operation.name} is on tensors of several blocks")
        inputs = tuple(operation.inputs[place] for place in self._repeated(blocks))
        if operation.name == "stack":
            outputs = self._stack(index, len(inputs))
        else:
            outputs = tuple(operation.outputs[place] for place in self._repeated(self._blocks(use.outputs)))
        read = dict(zip(use.identities, zip(blocks, operation.inputs, strict=True), strict=True))
        more_read = (_num_bytes([shape]) * self._copies.get(block, 0) for block, shape in read.values() if block)
        return dataclasses.replace(
            operation,
            inputs=inputs,
            outputs=outputs,
            bytes_read=operation.bytes_read + sum(more_read),
            bytes_written=operation.bytes_written + _num_bytes(outputs) - _num_bytes(operation.outputs),
        )

    def _stack(self, index: int, count: int) -> tuple[TensorShape, ...]:
        """The result of stacking `count` tensors; its storage grows with it."""
        operation = self._operation(index)
        (stacked,) = operation.outputs
        (storage,) = (i for i, storage in enumerate(self._trace.storages) if storage.born == index)
        if operation.attribute("dim", 0) != 0:
            raise NotPeriodic("tensors of several blocks are stacked, and not along the first dimension")
        wide = TensorShape(shape=(count, *stacked.shape[1:]), dtype=stacked.dtype)
        self.grown[storage], self._stacked[storage] = _num_bytes([wide]), stacked
        return (wide,)

    def _on_stacked(self, index: int) -> Operation | None:
        """An operation on what was stacked, as long as it lives: only its norm is known to grow with it."""
        operation = self._operation(index)
        for storage, stacked in self._stacked.items():
            died = self._trace.storages[storage].died
            if stacked in operation.inputs and (died is None or index <= died):
                if operation.name != "linalg_vector_norm":
                    raise NotPeriodic(f"{operation.name} is on a tensor whose size goes with the number of blocks")
                more = self.grown[storage] - _num_bytes([stacked])
                count = self.grown[storage] // (_num_bytes([stacked]) // stacked.shape[0])
                wide = TensorShape(shape=(count, *stacked.shape[1:]), dtype=stacked.dtype)
                return dataclasses.replace(operation, inputs=(wide,), bytes_read=operation.bytes_read + more)
        return None

    def _operation(self, index: int) -> Operation:
        return self._trace.operations[self._trace.occurrences[index].operation]

    def _blocks(self, owners: Sequence[str]) -> list[int | None]:
        return [self._block_of[owner] for owner in owners]

    def _repeated(self, blocks: Sequence[int | None]) -> list[int]:
        """Places in a list, those of the blocks that stand for others as often as there are such blocks."""
        runs = [(block, list(group)) for block, group in itertools.groupby(range(len(blocks)), key=blocks.__getitem__)]
        sweeps_of([block for block, _ in runs], self._traced)
        return [
            place
            for block, places in runs
            for place in places * (1 + self._copies.get(-1 if block is None else block, 0))
        ]


def _num_bytes(shapes: Iterable[TensorShape]) -> int:
    try:
        return sum(shape.numel * _BYTES[shape.dtype] for shape in shapes)
    except KeyError as unknown:
        raise NotPeriodic(f"the size of {unknown} is not known") from None

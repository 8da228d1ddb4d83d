"""Storages on the traced device: birth, death, category and owner; and list operations widened to omitted blocks."""

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
from stoker.profiling.tracing.recomputation import Call
from stoker.records import Category, Occurrence, Operation, TensorShape, Trace, Widened
from stoker.records.trace import NotPeriodic, sweeps_of


@dataclass(slots=True)
class Life:
    """One storage: its bytes, birth and death as indices of occurrences (-1: before), category and owner."""

    num_bytes: int
    born: int
    died: int | None = None
    category: Category | None = None
    owner: str = ""
    is_all: bool = False
    """Whether it holds the answer of `all`, which is assumed true."""


@dataclass(frozen=True)
class TracedLoop:
    """A loop with some steps left out (`repetition.CutLoops`).

    Its occurrences are start <= i < stop; `node` is the number of autograd's last node before it.
    """

    start: int
    stop: int
    node: int


@dataclass
class Recording:
    """The record of one update, in order; see `Trace`."""

    operations: list[Operation] = field(default_factory=list)
    occurrences: list[Occurrence] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    backward_starts: list[int] = field(default_factory=list)
    micro_batch_starts: list[int] = field(default_factory=list)
    """Number of occurrences before samples were made ready for each pass."""
    uses: list[TensorUse] = field(default_factory=list)
    """Owners of the tensors of each occurrence."""
    calls: list[Call] = field(default_factory=list)
    """What each occurrence reads and writes, on a GPU."""
    nodes: list[int] = field(default_factory=list)
    """Number of the autograd node that each occurrence makes or, in a backward pass, belongs to; -1 for none."""
    loops: list[TracedLoop] = field(default_factory=list)
    is_second: bool = False
    """Whether an update before it was recorded too, and made what is kept from update to update."""

    @property
    def is_steady(self) -> bool:
        """Whether the same storages live after the update as before it."""
        return all((life.born < 0) is (life.died is None) for life in self.lives)


class Storages:
    """The live storages on `device`, and their births and deaths in `recording`, if any."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.recording: Recording | None = None
        self._live: dict[int, Life] = {}
        self._watches: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._numbers: dict[int, int] = {}
        self._owners_elsewhere: dict[int, str] = {}

    def begin(self, recording: Recording) -> None:
        """Record from here on; storages alive now were born before."""
        self.recording = recording
        for key, life in self._live.items():
            # Kept from update to update without a category: a cache.
            self._live[key] = replace(life, born=-1, died=None, category=life.category or "buffer")
            self._note_birth(key, self._live[key])

    def end(self) -> None:
        """Stop recording; storages alive now outlive the update."""
        self.recording = None
        self._numbers.clear()

    def hold(self, tensor: torch.Tensor, category: Category, owner: str = "") -> None:
        """Follow the storage of `tensor` from now on, with its category and the module that owns it."""
        life = self.follow(tensor)
        if life is not None:
            life.category, life.owner = category, owner
        else:
            self._owners_elsewhere[storage_key(tensor.untyped_storage())] = owner

    def follow(self, tensor: torch.Tensor) -> Life | None:
        """The life of the tensor's storage, which begins now if it was not known; None on another device."""
        storage = tensor.untyped_storage()
        life = self._live.get(storage_key(storage))
        if life is None and storage.nbytes() and tensor.device.type == self.device.type:
            return self._bear(storage)
        return life

    def is_new(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's storage is on the device, not empty, and not known yet."""
        if tensor.device.type != self.device.type:
            return False
        storage = tensor.untyped_storage()
        return storage_key(storage) not in self._live and storage.nbytes() > 0

    def life_of(self, tensor: torch.Tensor) -> Life | None:
        """The life of the tensor's storage, if it is known."""
        return self._live.get(storage_key(tensor.untyped_storage()))

    def numbers(self, tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
        """Places in `Recording.lives` of the storages of tensors, without those of other devices."""
        keys = (storage_key(tensor.untyped_storage()) for tensor in tensors)
        return tuple(self._numbers[key] - 1 for key in keys if key in self._live and key in self._numbers)

    def owner(self, tensor: torch.Tensor) -> str:
        """Dotted name of the module that owns a tensor, on any device; empty if none."""
        key = storage_key(tensor.untyped_storage())
        life = self._live.get(key)
        return self._owners_elsewhere.get(key, "") if life is None else life.owner

    def owner_of_first(self, values: Iterable[Any]) -> str:
        """The owner of the first tensor among `values` that has one."""
        return next(filter(None, map(self.owner, tensors_in(values))), "")

    def owners_of_results(self, args: tuple[Any, ...], count: int) -> list[str]:
        """Owners of `count` results if no module is running: for a list, the owners of its elements."""
        first = args[0] if args else None
        if isinstance(first, list | tuple) and len(first) == count:
            return [self.owner_of_first([element]) for element in first]
        if isinstance(first, list | tuple) and len({self.owner(tensor) for tensor in tensors_in(first)}) > 1:
            return [""] * count  # a result of several modules' tensors has no owner
        return [self.owner_of_first(args)] * count

    @contextlib.contextmanager
    def following_resizes(self) -> Iterator[None]:
        """Within the block, follow storages resized by hand, such as those of sharded parameters."""
        resize = torch.UntypedStorage.resize_

        def resize_and_follow(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            key = storage_key(storage)
            old = self._live.get(key)
            if old is None or old.num_bytes != storage.nbytes():  # it dies, and another is born in its place
                self._bury(key)
                if storage.nbytes():
                    life = self._bear(storage)
                    life.category, life.owner = (None, "") if old is None else (old.category, old.owner)

        with Patches() as patches:
            patches.put(torch.UntypedStorage, "resize_", resize_and_follow)
            yield

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
    "fp64": 8,
    "fp32": 4,
    "fp16": 2,
    "bf16": 2,
    "fp8": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}


class TensorUse(NamedTuple):
    """Owners of an operation's tensors, in the order of `Operation.inputs` and `outputs`.

    Owners are dotted names of modules, or ''. Inputs with equal `identities` are the same tensor.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    identities: tuple[int, ...]


class Widening:
    """Finds operations over several blocks at once, and widens them to the blocks left out.

    An optimiser, a clipped norm and an average take lists of all parameters, gradients or states. In the trace of a
    shortened model the lists are short; here the tensors of the blocks left out are inserted.

    Args:
        trace: the trace of the shortened model.
        traced: number of traced blocks.
        copies: number of blocks left out for each traced block that stands for others.
        block_of: the block of a module, by its name; None outside of blocks.
    """

    def __init__(
        self, trace: Trace, traced: int, copies: Mapping[int, int], block_of: Mapping[str, int | None]
    ) -> None:
        self._trace, self._traced, self._copies, self._block_of = trace, traced, copies, block_of
        self.widened: list[Widened] = []
        self.grown: dict[int, int] = {}
        self._stacked: dict[int, TensorShape] = {}

    def look_at(self, index: int, use: TensorUse) -> None:
        """Widen an occurrence outside of blocks, if its tensors are of several blocks.

        Raises:
            NotPeriodic: they are, or are of one in the middle, and the effect of other blocks is unknown.
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
        """Raise NotPeriodic if a block's occurrence takes tensors of blocks that are not neighbours."""
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
        """An operation on a stacked tensor during its life: only its norm is known to grow with it."""
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
        """Places in a list, with the places of a block repeated for each block it stands for."""
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

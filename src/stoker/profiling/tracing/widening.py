"""Operations over lists of tensors, as a model with all its blocks executes them.

An optimiser, a clipped norm and an average take lists of all parameters, gradients or states. In the trace of a
shortened model the lists are short; here the tensors of the blocks left out are put in their places.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from stoker.records import Operation, TensorShape, Trace, Widened
from stoker.records.timeline import NotPeriodic, sweeps_of

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

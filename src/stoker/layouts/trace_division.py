"""Operations and bytes of a trace, changed as a layout divides them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal

from stoker.records import Occurrence, Operation, Storage, TensorShape, Trace

PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})
STATE = ("parameter", "optimizer state", "average")
"""Categories of storages that live from update to update."""

_ITEM_BYTES = {"fp64": 8, "int64": 8, "bf16": 2, "fp16": 2, "fp8": 1, "bool": 1, "uint8": 1}


def bytes_of(shape: TensorShape) -> int:
    """Size of a tensor [bytes]."""
    return shape.numel * _ITEM_BYTES.get(shape.dtype, 4)


_NEAR = 64
"""Equal operations stay one if not more than so many others are first executed between them."""


def with_operations(trace: Trace, change: Callable[[Occurrence, Operation], Operation]) -> Trace:
    """The trace with each occurrence's operation changed; equal operations that are near each other stay one."""
    operations: list[Operation] = []
    numbers: dict[tuple[int, str, int], int] = {}
    values: dict[tuple[object, ...], int] = {}
    known: dict[int, tuple[Operation, int]] = {}  # by identity: an operation, which stays alive, and its value's number
    last: dict[int, int] = {}
    occurrences = []
    for occurrence in trace.occurrences:
        key = occurrence.operation, occurrence.phase, occurrence.module
        if key not in numbers:
            changed = change(occurrence, trace.operations[occurrence.operation])
            if id(changed) not in known:
                value = (
                    changed.name,
                    changed.inputs,
                    changed.outputs,
                    changed.flops,
                    changed.bytes_read,
                    changed.bytes_written,
                    repr(changed.attributes),
                )  # may hold lists, without a hash
                known[id(changed)] = changed, values.setdefault(value, len(values))
            value_number = known[id(changed)][1]
            if last.get(value_number, -_NEAR - 1) < len(operations) - _NEAR:
                last[value_number] = len(operations)
                operations.append(changed)
            numbers[key] = last[value_number]
        number = numbers[key]
        occurrences.append(
            occurrence
            if number == occurrence.operation
            else Occurrence(
                operation=number,
                phase=occurrence.phase,
                part=occurrence.part,
                module=occurrence.module,
                source=occurrence.source,
            )
        )
    return dataclasses.replace(trace, operations=tuple(operations), occurrences=tuple(occurrences))


def resized(storage: Storage, num_bytes: int) -> Storage:
    """The storage with another size [bytes]."""
    return storage if num_bytes == storage.num_bytes else dataclasses.replace(storage, num_bytes=num_bytes)


def with_output_shares(trace: Trace, shares: Sequence[float]) -> tuple[Storage, ...]:
    """The storages of a trace, each of those that do not outlive an update with its occurrence's share of its bytes."""
    return tuple(
        resized(storage, math.ceil(storage.num_bytes * shares[storage.born]))
        if storage.category not in ("gradient", *STATE) and storage.born >= 0 and shares[storage.born] < 1
        else storage
        for storage in trace.storages
    )


def divided_product(operation: Operation, dim: Literal["m", "k", "n"], share: float) -> Operation:
    """The product [m, k] @ [k, n] over a share of one of its dimensions; with n also of a term that is added."""
    *more, a, b = operation.inputs
    out = operation.outputs[0]
    if dim == "m":
        a, out = with_dim(a, -2, share), with_dim(out, -2, share)
    elif dim == "k":
        a, b = with_dim(a, -1, share), with_dim(b, -2, share)
    else:
        b, out = with_dim(b, -1, share), with_dim(out, -1, share)
        more = [with_dim(one, -1, share) if one.shape else one for one in more]
    read, whole = (sum(map(bytes_of, each)) for each in ((*more, a, b), operation.inputs))
    return dataclasses.replace(
        operation,
        inputs=(*more, a, b),
        outputs=(out, *operation.outputs[1:]),
        flops=round(operation.flops * share),
        bytes_read=round(operation.bytes_read * read / max(1, whole)),
        bytes_written=round(operation.bytes_written * out.numel / max(1, operation.outputs[0].numel)),
    )


def in_rows(operation: Operation, share: float) -> Operation:
    """The operation over a share of the first dimension of every tensor."""
    return scaled(operation, share, lambda shape: with_dim(shape, 0, share) if shape.shape else shape)


def scaled(operation: Operation, share: float, narrowed: Callable[[TensorShape], TensorShape]) -> Operation:
    """The operation with a share of its FLOPs and bytes, and each tensor narrowed."""
    return dataclasses.replace(
        operation,
        inputs=tuple(map(narrowed, operation.inputs)),
        outputs=tuple(map(narrowed, operation.outputs)),
        flops=round(operation.flops * share),
        bytes_read=round(operation.bytes_read * share),
        bytes_written=round(operation.bytes_written * share),
    )


def with_dim(shape: TensorShape, dim: int, share: float) -> TensorShape:
    """The shape with a share of one dimension, at least 1."""
    sizes = list(shape.shape)
    sizes[dim] = max(1, math.ceil(sizes[dim] * share))
    return TensorShape(shape=tuple(sizes), dtype=shape.dtype)

"""Traces written by hand: storages with a birth and a death, and operations that may hide memory."""

from __future__ import annotations

from typing import Literal

from stoker.records.trace import Category, Occurrence, Operation, Phase, Storage, TensorShape, Trace, TraceSettings

NOTHING = Operation(name="relu", inputs=(), outputs=(), flops=0, bytes_read=0, bytes_written=0)
"""An operation that hides nothing."""


def storage(num_bytes: int, born: int, died: int | None, category: Category = "activation") -> Storage:
    """Memory that lives from one occurrence to another."""
    return Storage(num_bytes=num_bytes, category=category, born=born, died=died)


def shaped(*shape: int, dtype: str = "fp32") -> TensorShape:
    """A tensor's shape."""
    return TensorShape(shape=shape, dtype=dtype)


def operation(name: str, inputs: list[TensorShape], outputs: list[TensorShape], **attributes) -> Operation:
    """An operation by its shapes."""
    return Operation(
        name=name,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        flops=0,
        bytes_read=0,
        bytes_written=0,
        attributes=tuple(sorted(attributes.items())),
    )


def trace_of(
    storages: list[Storage],
    *,
    target: Literal["cpu", "cuda"] = "cuda",
    capability: str = "8.0",
    operations: list[Operation] | None = None,
    phases: list[Phase] | None = None,
    parts: int = 1,
) -> Trace:
    """A trace in which occurrence `i` executes `operations[i]`, births before deaths.

    Occurrences are as many as `operations`, or as storages need; they are in the forward pass unless said otherwise.
    """
    count = len(operations) if operations else 1 + max([0, *(max(s.born, s.died or 0) for s in storages)])
    operations = operations or [NOTHING] * count
    distinct = tuple(one for i, one in enumerate(operations) if one not in operations[:i])
    events = [i + 1 for i, s in enumerate(storages) if s.born < 0]
    for occurrence in range(count):
        events += [i + 1 for i, s in enumerate(storages) if s.born == occurrence]
        events += [-(i + 1) for i, s in enumerate(storages) if s.died == occurrence]
    return Trace(
        settings=TraceSettings(
            target=target, capability="" if target == "cpu" else capability, micro_batch=1, parts=parts
        ),
        operations=distinct,
        occurrences=tuple(
            Occurrence(
                operation=distinct.index(one), phase=phases[i] if phases else "forward", part=0, module=0, source=i % 2
            )
            for i, one in enumerate(operations)
        ),
        storages=tuple(storages),
        events=tuple(events),
        modules=("",),
        sources=("train_me.py:1", "train_me.py:2"),
    )

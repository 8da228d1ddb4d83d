"""Updates whose optimiser keeps its moments in fewer bits: their bytes and their time, from the trace of full moments.

Fewer bits change nothing of the passes, so that no such update is traced: a trace's moments become as large as they
are stored, and its fused step becomes the plain operations of `stepping/low_bit_states.py`. Moments of one dimension
stay full; a trace does not tell them from others of their size, of which a model has far more.
"""

from __future__ import annotations

import dataclasses
import math

from stoker.layouts.shards import shard_dim
from stoker.layouts.trace_division import resized
from stoker.records import Layout, Operation, OptimizerStates, Precision, Storage, Trace, TraceSettings
from stoker.records.plan import LEAST_STATES, STATES_BLOCK, VALUES_AT_ONCE
from stoker.records.profile import ModelParts

STEP = "low_bit_adam"
"""The name of the operation in the place of the fused step."""

_STORED_BYTES = {"bf16": 2.0, "8bit": 1 + 4 / STATES_BLOCK}
"""Bytes of a value of a moment, with its share of a scale."""
_FULL_ITEMS = 7
"""Numbers that a fused step reads (a weight, its gradient, its moments) and writes (all but the gradient)."""
_TRAFFIC_BYTES = {"bf16": (152, 120), "8bit": (116, 92)}
"""Bytes that the plain operations of an update read and write for a weight, one after the other: counted."""
_BETWEEN_BYTES = 32
"""Bytes for a weight, at most: both moments and up to six other numbers."""


def full_states(settings: TraceSettings) -> TraceSettings:
    """The settings of the trace that is made: of full moments."""
    return dataclasses.replace(settings, optimizer_states="full")


def with_states(trace: Trace, states: OptimizerStates) -> Trace:
    """The trace of an update of full moments, as one whose moments are kept in `states`."""
    settings = dataclasses.replace(trace.settings, optimizer_states=states)
    if states == "full":
        return dataclasses.replace(trace, settings=settings)
    item_bytes = _full_bytes(settings.precision)

    def stored(one: Storage) -> Storage:
        is_moment = one.category == "optimizer state" and one.born < 0 and one.num_bytes >= LEAST_STATES * item_bytes
        return resized(one, round(one.num_bytes * _STORED_BYTES[states] / item_bytes)) if is_moment else one

    def stepped(one: Operation) -> Operation:
        if not one.name.startswith("_fused_adam"):
            return one
        count = (one.bytes_read + one.bytes_written) / (_FULL_ITEMS * item_bytes)
        read, written = (round(count * each) for each in _TRAFFIC_BYTES[states])
        return dataclasses.replace(one, name=STEP, bytes_read=read, bytes_written=written)

    return dataclasses.replace(
        trace,
        settings=settings,
        storages=tuple(map(stored, trace.storages)),
        operations=tuple(map(stepped, trace.operations)),
    )


def between_bytes(operation: Operation, target: str) -> int:
    """Temporaries between the plain operations of an update [bytes], for its largest piece of a parameter."""
    largest = max((one.numel for one in operation.inputs), default=0)
    return _BETWEEN_BYTES * min(largest, VALUES_AT_ONCE[target])


def block_problem(parts: ModelParts, layout: Layout) -> str | None:
    """Why 8-bit states do not go with a layout, which cuts rows within a block of values; None if they do.

    A tensor group divides the rows of some matrices; of fused ones, shards within it divide the rows, and not the
    columns: since any may be fused, all are held to that.
    """
    for one in parts.parameters:
        rows = one.shape[0] // (layout.experts if one.division == 0 else 1) if one.shape else 0
        if layout.tensor == 1 and one.is_trained and shard_dim((rows, *one.shape[1:]), layout.shards):
            return f"8bit optimizer_states need whole rows, and {layout.shards} shards divide those of {one.name}"
        width = math.prod(one.shape[1:])
        if layout.tensor == 1 or not one.is_trained or len(one.shape) < 2 or width * one.shape[0] < LEAST_STATES:
            continue
        for count in (layout.tensor if one.division == 1 else 1, layout.shards):
            if count > 1 and (width % count or width // count % STATES_BLOCK):
                return (
                    f"8bit optimizer_states share a scale in blocks of {STATES_BLOCK} values of a row, and {count} "
                    f"processes would divide the {width} values of each row of {one.name}"
                )
    return None


def stored_share(states: OptimizerStates, precision: Precision) -> float:
    """The size of moments in `states` over that of full ones, which have their weights' dtype [1]."""
    return 1.0 if states == "full" else _STORED_BYTES[states] / _full_bytes(precision)


def _full_bytes(precision: Precision) -> int:
    return 8 if precision == "fp64" else 4

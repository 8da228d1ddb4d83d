"""Experts: processes that share a batch hold different experts of a mixture, and send tokens to each other.

Volumes are those of two all-to-alls of tokens x choices a layer forward, as many backward, and again where a layer is
recomputed (Lepikhin et al. 2020, arXiv:2006.16668). Routers are assumed to spread tokens evenly, so each process sends
and receives as many rows as its own tokens have choices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from stoker.layouts.base import DividedUpdate, LayoutAxis, Seconds, Traffic
from stoker.layouts.local_state import with_local_state
from stoker.layouts.rules import JobTraits
from stoker.layouts.shards import AXIS as SHARDS
from stoker.layouts.shards import gather_copies_s, gloo_copies, shard_dim
from stoker.layouts.trace_division import STATE, bytes_of, in_rows, with_dim, with_operations
from stoker.records import Layout, Occurrence, Operation, TensorShape, Trace
from stoker.records.profile import ModelParts, Parameter

_KEPT_ROWS = 3
"""Tensors of routed rows that a layer holds at its peak besides those of one process: sent, received, and weighted."""


class Experts(LayoutAxis):
    """See `stoker.layouts.base.LayoutAxis`."""

    name = "experts"
    explanation = "processes hold different experts of a mixture, shards of all else, and take parts of every batch"
    complexity = 3
    compiles = True
    exchanges_in_blocks = True

    def problem_with(self, layout: Layout, job: JobTraits) -> str | None:
        """As `LayoutAxis.problem_with`."""
        size = layout.experts
        if layout.replicas * layout.tensor * layout.stages > 1:
            return f"experts are divided with shards alone, not with other axes, as in {layout.in_words()}"
        if job.tensor_devices is not None and size > job.tensor_devices:
            return f"{size} processes that exchange tokens are more than the {job.tensor_devices} devices of a node"
        if job.has_penalty:
            return "experts do not go with Objective(penalty=…), which would add up parts of different meshes"
        if job.matrix_optimizer is not None:
            return f"{job.matrix_optimizer} needs whole matrices, and processes hold parts of them"
        return None

    def traffic(self, update: DividedUpdate) -> Sequence[Traffic]:
        """As `LayoutAxis.traffic`: routed tokens, and what is not of experts gathered over all processes."""
        layout, passes = update.layout, update.passes
        exchanged = [
            size for size, count in routed_rows(update.trace(), update.parts) for _ in range(2 * count + 2)
        ]  # to the experts and back, forward each time and backward once
        root, *blocks = _dense_groups(update.parts)
        gathered = [round(size * update.gathered_share) for size in (root, *blocks)]
        traffic = [
            Traffic(
                what="tokens sent to experts and back",
                collective="all-to-all",
                axis="experts",
                sizes=tuple(exchanged),
                times=passes,
            ),
            Traffic(
                what="parameters outside of experts gathered",
                collective="all-gather",
                axis="data",
                sizes=tuple(gathered),
                times=passes,
                overlaps="forward blocks",
            ),
            Traffic(
                what="their gradients summed and scattered",
                collective="reduce-scatter",
                axis="data",
                sizes=(*blocks[::-1], root),
                times=passes if layout.reshard else 1,
                overlaps="backward blocks",
            ),
        ]
        if layout.reshard and blocks:
            traffic.append(
                Traffic(
                    what="parameters outside of experts gathered again",
                    collective="all-gather",
                    axis="data",
                    sizes=tuple(gathered[:0:-1]),
                    times=passes,
                    overlaps="backward blocks",
                )
            )
        return tuple(traffic)

    def overhead_s(self, parts: ModelParts, layout: Layout, passes: int) -> float:
        """As `LayoutAxis.overhead_s`: that of `fully_shard`, where shards do not count it."""
        return SHARDS.overhead_s(parts, layout, passes) if layout.shards == 1 else 0.0

    def copies_s(self, traffic: Sequence[Traffic], layout: Layout, seconds: Seconds) -> float:
        """As `LayoutAxis.copies_s`: those of what is gathered that is not of experts."""
        return gather_copies_s(traffic, "data", layout.experts * layout.shards, seconds)

    def local_shape(self, one: Parameter, shape: tuple[int, ...], layout: Layout, rank: int | None) -> tuple[int, ...]:
        """As `LayoutAxis.local_shape`: experts by number; of all else rows, padded."""
        size = layout.experts
        if not shape:
            return shape
        if one.division == 0:
            return shape[0] // size, *shape[1:]
        dim = shard_dim(shape, size)
        return *shape[:dim], -(-shape[dim] // size), *shape[dim + 1 :]

    def trace_of(self, trace: Trace, parts: ModelParts, layout: Layout, rank: int) -> Trace:
        """As `LayoutAxis.trace_of`: as many rows go through fewer experts, and the optimiser works on a part.

        Compiled code ends at the experts.
        """
        size, num = layout.experts, _stacked(parts)
        are_divided = layout.reshard or trace.settings.parts == 1

        def of_fewer(shape: TensorShape) -> TensorShape:
            is_stacked = len(shape.shape) == 3 and shape.shape[0] == num
            return with_dim(shape, 0, 1 / size) if is_stacked else shape

        def local(one: Occurrence, operation: Operation) -> Operation:
            if one.phase == "optimizer":
                return in_rows(operation, 1 / size)
            if "grouped_mm" not in operation.name:
                return operation
            inputs, outputs = (tuple(map(of_fewer, shapes)) for shapes in (operation.inputs, operation.outputs))
            return dataclasses.replace(
                operation,
                inputs=inputs,
                outputs=outputs,
                bytes_read=sum(map(bytes_of, inputs)),
                bytes_written=sum(map(bytes_of, outputs)),
            )

        divided = with_local_state(trace, parts, layout, ("gradient", *STATE) if are_divided else STATE)
        return dataclasses.replace(with_operations(divided, local), exchanging=tuple(sorted(_modules(parts))))

    def message_bytes(self, parts: ModelParts, layout: Layout, *, is_on_cpu: bool, gathered_share: float = 1.0) -> int:
        """As `LayoutAxis.message_bytes`: what is gathered that is not of experts, and experts cast to a dtype."""
        size = layout.experts
        root, *blocks = _dense_groups(parts)
        if is_on_cpu:
            copies = gloo_copies(parts, layout)
            return round(copies * (gathered_share + 1) / 2 * (root + sum(blocks)))
        largest = max(blocks, default=0)
        gathered = root + (2 * largest if layout.reshard else sum(blocks))
        cast = sum(parameter.num_bytes for parameter in parts.parameters if parameter.division == 0) / size
        is_cast = layout.shards == 1 and gathered_share < 1
        dense = gathered_share * gathered + (gathered_share + 1) * max(largest, root)
        return round(dense + (gathered_share * cast if is_cast else 0))

    def waiting_bytes(self, trace: Trace, update: DividedUpdate, rank: int) -> int:
        """As `LayoutAxis.waiting_bytes`: the rows of the layer with the most, sent and received."""
        rows = {
            shape.numel for operation in trace.operations if operation.name == "topk" for shape in operation.outputs[1:]
        }
        sent = [
            bytes_of(operation.outputs[0])
            for operation in trace.operations
            if operation.name in ("index", "index_select") and len(operation.outputs[0].shape) == 2
            if operation.outputs[0].shape[0] in rows
        ]
        return _KEPT_ROWS * max(sent, default=0)


AXIS = Experts()


def routed_rows(trace: Trace, parts: ModelParts) -> list[tuple[int, int]]:
    """Of each module of experts the bytes of a micro-batch's routed rows, and how often its forward pass is made.

    Rows are as many as the last `topk` before it chose, as wide as the module's result.
    """
    names = _modules(parts)
    forward: dict[str, list[int]] = {}
    chosen: dict[str, int] = {}
    num_chosen = 0
    for occurrence in trace.occurrences:
        if occurrence.part:
            continue
        operation, module = trace.operations[occurrence.operation], trace.modules[occurrence.module]
        if occurrence.phase == "forward" and operation.name == "topk":
            num_chosen = operation.outputs[1].numel
        if module in names and occurrence.phase == "forward":
            chosen.setdefault(module, num_chosen)
            forward.setdefault(module, []).append(occurrence.operation)
    again = {  # in a backward pass, whole numbers are computed again only
        trace.modules[occurrence.module]
        for occurrence in trace.occurrences
        if occurrence.phase == "backward"
        and all(shape.dtype == "int64" for shape in trace.operations[occurrence.operation].outputs)
    }
    rows: list[tuple[int, int]] = []
    for module, operations in forward.items():
        results = [trace.operations[number].outputs[0] for number in operations]
        result = next(shape for shape in reversed(results) if len(shape.shape) == 2)
        rows.append((chosen[module] * bytes_of(result) // result.shape[0], 1 + (module in again)))
    return rows


def _modules(parts: ModelParts) -> set[str]:
    """Names of the modules of experts."""
    return {parameter.name.rpartition(".")[0] for parameter in parts.parameters if parameter.division == 0}


def _stacked(parts: ModelParts) -> int:
    """Number of experts of a module."""
    return next((parameter.shape[0] for parameter in parts.parameters if parameter.division == 0), 0)


def _dense_groups(parts: ModelParts) -> tuple[int, ...]:
    """Bytes of the parameters that are not of experts: outside of blocks, and in each block."""
    sizes = [0] * (1 + len(parts.blocks))
    for parameter in parts.parameters:
        if parameter.division is None:
            sizes[0 if parameter.block is None else parameter.block + 1] += parameter.num_bytes
    return tuple(sizes)

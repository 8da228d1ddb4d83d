"""Shards: processes hold parts of parameters, gradients and optimiser state, and of every batch (fully sharded).

Volumes are those of `fully_shard`, which gathers the parameters of a block before it is used, forward and, if they were
freed, backward, and sums and scatters its gradients after it (Zhao et al. 2023, arXiv:2304.11277, sections 3.2, 4.2).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from stoker.layouts.base import DividedUpdate, LayoutAxis, Seconds, Traffic
from stoker.layouts.local_state import local_bytes, with_local_state
from stoker.layouts.rules import JobTraits
from stoker.layouts.trace_division import STATE, in_rows, with_operations
from stoker.records import Layout, Occurrence, Operation, TensorShape, Trace
from stoker.records.profile import ModelParts, Parameter

_UPDATE_S, _GROUP_S, _KEPT_GROUP_S, _PARAMETER_S = 5e-4, 2.1e-3, 1.7e-3, 3e-5
"""Overhead of `fully_shard`: an update; in each pass each group, which frees its parameters or keeps them; and each
parameter in an update [s]."""
_GLOO_ONCE, _GLOO_TWICE = 6.0, 9.0
"""Peak memory of gloo's copies, in threads that keep the memory, in multiples of all gathered bytes: fitted on
`calibration` of `bench/many/forecast.py`, PyTorch 2.13. 6 if parameters stay gathered, 8 and 10 if blocks are gathered
twice."""


class Shards(LayoutAxis):
    """See `stoker.layouts.base.LayoutAxis`."""

    name = "shards"
    explanation = "processes hold parts of parameters, gradients and optimiser state, and take parts of every batch"
    complexity = 1
    compiles = True

    def variants(self, layout: Layout) -> Iterator[Layout]:
        """As `LayoutAxis.variants`: gathered parameters are freed after the forward pass, or kept."""
        for reshard in (True, False):
            yield dataclasses.replace(layout, reshard=reshard)

    def problem_with(self, layout: Layout, job: JobTraits) -> str | None:
        """As `LayoutAxis.problem_with`."""
        if job.matrix_optimizer is not None:
            return f"{job.matrix_optimizer} needs whole matrices, and shards hold parts of them"
        return None

    def traffic(self, update: DividedUpdate) -> Sequence[Traffic]:
        """As `LayoutAxis.traffic`: parameters gathered, and gradients summed and scattered, in each pass.

        Gradients are summed in the dtype of the masters; frozen parameters are gathered, and have none. Without
        `reshard` parameters stay gathered until the end of a pass, and gradients whole until the last pass of an
        update. Parameters outside of blocks are gathered once a pass, since they are used at both ends of it.
        """
        layout, parts, passes = update.layout, update.held, update.passes
        root, *blocks = sharding_groups(parts, layout)
        gathered = [round(size * update.gathered_share) for size in (root, *blocks)]
        gradients = tuple(size for size in sharding_groups(parts, layout, of_gradients=True) if size)
        used = 8 * sum(parameter.is_trained for parameter in parts.parameters)
        axis = _axis(layout)
        traffic = [
            Traffic(
                what="parameters gathered",
                collective="all-gather",
                axis=axis,
                sizes=tuple(gathered),
                times=passes,
                overlaps="forward blocks",
            ),
            Traffic(
                what="gradients summed and scattered",
                collective="reduce-scatter",
                axis=axis,
                sizes=gradients[::-1],
                times=passes if layout.reshard else 1,
                overlaps="backward blocks",
            ),
            Traffic(what="which parameters were used", collective="all-reduce", axis="data", sizes=(used,), stops=0),
        ]
        if layout.reshard and blocks:
            traffic.insert(
                1,
                Traffic(
                    what="parameters gathered again",
                    collective="all-gather",
                    axis=axis,
                    sizes=tuple(gathered[:0:-1]),
                    times=passes,
                    overlaps="backward blocks",
                ),
            )
        return tuple(traffic)

    def overhead_s(self, parts: ModelParts, layout: Layout, passes: int) -> float:
        """As `LayoutAxis.overhead_s`."""
        num_parameters = sum(parameter.is_trained for parameter in parts.parameters) / layout.stages
        groups = passes * (1 + len(parts.blocks)) / layout.stages
        seconds = _UPDATE_S + groups * (_GROUP_S if layout.reshard else _KEPT_GROUP_S)
        return seconds + num_parameters * _PARAMETER_S

    def copies_s(self, traffic: Sequence[Traffic], layout: Layout, seconds: Seconds) -> float:
        """As `LayoutAxis.copies_s`.

        On a GPU they run on the stream of the arithmetic, or take its bandwidth.
        """
        return gather_copies_s(traffic, _axis(layout), num_shards(layout), seconds)

    def local_shape(self, one: Parameter, shape: tuple[int, ...], layout: Layout, rank: int | None) -> tuple[int, ...]:
        """As `LayoutAxis.local_shape`: rows, as `torch.chunk` cuts them; the last shards may have fewer, or none."""
        if not shape:
            return shape
        dim = shard_dim(shape, num_shards(layout)) if layout.tensor == 1 else 0
        if dim:
            return *shape[:dim], -(-shape[dim] // layout.shards), *shape[dim + 1 :]
        rows = -(-shape[0] // layout.shards)
        if rank is not None:
            rows = min(rows, max(0, shape[0] - layout.coordinate(rank, "shards") * rows))
        return rows, *shape[1:]

    def trace_of(self, trace: Trace, parts: ModelParts, layout: Layout, rank: int) -> Trace:
        """As `LayoutAxis.trace_of`, with the optimiser's work on one shard, and there the sums of gradients."""
        share = 1 / num_shards(layout)
        # If parameters stay gathered, gradients of all passes but the last are added up whole.
        are_divided = layout.reshard or trace.settings.parts == 1
        shapes = {one.shape for one in parts.parameters if one.is_trained} if are_divided and layout.reshard else set()

        def local(one: Occurrence, operation: Operation) -> Operation:
            is_sum = (
                trace.settings.gathered_in is not None
                and one.phase == "backward"
                and operation.name in ("add", "add_")
                and operation.outputs[0].shape in shapes
                and all(tensor.shape == operation.outputs[0].shape for tensor in operation.inputs)
            )
            return in_rows(operation, share) if one.phase == "optimizer" or is_sum else operation

        state = with_local_state(trace, parts, layout, ("gradient", *STATE) if are_divided else STATE)
        return with_operations(state, local)

    def message_bytes(self, parts: ModelParts, layout: Layout, *, is_on_cpu: bool, gathered_share: float = 1.0) -> int:
        """As `LayoutAxis.message_bytes`.

        On a GPU two gathered blocks, the one in use and the next, with the buffer they came in, and the gradients of a
        block before and after they are reordered for their sum.
        """
        root, *blocks = sharding_groups(parts, layout)
        if is_on_cpu:
            copies = gloo_copies(parts, layout)
            return round(copies * (gathered_share + 1) / 2 * (root + sum(blocks)))  # half of them are of gradients
        largest = max(blocks, default=0)
        gathered = root + (2 * largest if layout.reshard else sum(blocks))
        largest_sum = max(sharding_groups(parts, layout, of_gradients=True))
        # Along another dimension than the first, a parameter is put together again, and its gradient split.
        num = num_shards(layout)
        cut = [
            parameter.num_bytes
            for parameter in parts.parameters
            if layout.tensor == 1 and shard_dim(parameter.shape, num)
        ]
        return round(gathered_share * (gathered + max(cut, default=0)) + (gathered_share + 1) * largest_sum)


AXIS = Shards()


def num_shards(layout: Layout) -> int:
    """Number of processes over which a copy's state is sharded [1]: those that divide tokens hold shards, too."""
    return layout.shards * layout.context


def _axis(layout: Layout) -> str:
    """The axis of these processes."""
    return "shards" if layout.context == 1 else "data"


def gloo_copies(parts: ModelParts, layout: Layout) -> float:
    """Peak memory of gloo's copies, in multiples of all gathered bytes."""
    return _GLOO_TWICE if layout.reshard and parts.blocks else _GLOO_ONCE


def gather_copies_s(traffic: Sequence[Traffic], axis: str, processes: int, seconds: Seconds) -> float:
    """What the gathers and scatters of an axis copy besides their messages, in an update [s].

    A gather copies a process's own part in and everything out, a scatter everything in; its result is used in place.
    Source: `foreach_all_gather`, `foreach_all_gather_copy_out` and `foreach_reduce` in
    torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py.
    """

    def copy_s(num_bytes: float) -> float:  # as the elementwise operation that takes as long
        shape = TensorShape(shape=(max(1, round(num_bytes / 4)),), dtype="fp32")
        num = shape.numel * 4
        return seconds(
            Operation(name="mul", inputs=(shape,), outputs=(shape,), flops=0, bytes_read=num, bytes_written=num)
        )

    shares = {"all-gather": (1 / processes, 1.0), "reduce-scatter": (1.0,)}
    return sum(
        one.times * copy_s(size * share)
        for one in traffic
        if one.axis == axis
        for size in one.sizes
        for share in shares.get(one.collective, ())
    )


def shard_dim(shape: Sequence[int], shards: int) -> int:
    """The dimension of a parameter that is sharded, outside of tensor groups.

    It is the first, unless that has fewer rows than there are shards, as stacked matrices of experts may, and another
    one divides: otherwise some processes would hold rows and others nothing. Matrices are always cut into rows.
    """
    if len(shape) < 3 or shape[0] >= shards:
        return 0
    return next((dim for dim, size in enumerate(shape) if dim and size % shards == 0), 0)


def sharding_groups(parts: ModelParts, layout: Layout, *, of_gradients: bool = False) -> tuple[int, ...]:
    """Bytes that each call gathers under `fully_shard`: the root, then each block.

    Every parameter is padded so that its first dimension divides, after the division by tensor parallel. Under expert
    parallel these groups are of experts alone: all else is gathered over all processes (`experts.py`).

    Args:
        parts: the model's.
        layout: of the processes.
        of_gradients: the bytes of gradients that each call sums, in the dtype of the masters: frozen parameters have
            none.
    """
    sizes = [0] * (1 + len(parts.blocks))
    for parameter in parts.parameters:
        if (of_gradients and not parameter.is_trained) or (layout.experts > 1 and parameter.division is None):
            continue
        sizes[0 if parameter.block is None else parameter.block + 1] += local_bytes(parameter, layout) * num_shards(
            layout
        )
    return tuple(sizes)

"""What layouts cost a process on a CPU besides arithmetic and messages: Python, hooks, DTensor's dispatch.

On a GPU the host runs ahead and most of this is hidden; it is left out there. Constants are what
`bench/many/overheads.py` found under PyTorch 2.13 on one x86-64 core, on models that forecasts are not held to.
"""

from __future__ import annotations

from collections.abc import Sequence

from stoker.planning.communication import Traffic
from stoker.planning.time import OperationTimes
from stoker.records import Layout, Operation, TensorShape
from stoker.records.model_parts import ModelParts

_REPLICATED_PASS_S, _REPLICATED_PARAMETER_S = 2.6e-4, 2.4e-5
"""Of DistributedDataParallel: a pass, and each parameter in an update [s]."""
_SHARDED_S, _SHARDED_GROUP_S, _KEPT_GROUP_S, _SHARDED_PARAMETER_S = 5e-4, 2.1e-3, 1.7e-3, 3e-5
"""Of `fully_shard`: an update; in each pass each group, which lets go of its parameters or keeps them; and each
parameter in an update [s]."""
_TENSOR_S, _TENSOR_LAYER_S, _SEQUENCE_LAYER_S = 3e-3, 4.5e-4, 7.9e-4
"""Of DTensor: an update, and in each pass a divided layer, without or with divided sequences [s]."""
_STAGE_S = 1.2e-3
"""Of a pipeline's schedule: an update [s]."""


def overhead_s(parts: ModelParts, layout: Layout, passes: int) -> float:
    """What a process of a layout takes beside arithmetic and messages in an update [s]."""
    num_parameters = sum(one.is_trained for one in parts.parameters) / layout.stages
    found = _STAGE_S if layout.stages > 1 else 0.0
    if layout.shards > 1:
        groups = passes * (1 + len(parts.blocks)) / layout.stages
        found += _SHARDED_S + groups * (_SHARDED_GROUP_S if layout.reshard else _KEPT_GROUP_S)
        found += num_parameters * _SHARDED_PARAMETER_S
    elif layout.replicas > 1:
        found += passes * _REPLICATED_PASS_S + num_parameters * _REPLICATED_PARAMETER_S
    if layout.tensor > 1:
        found += _TENSOR_S + passes * len(parts.divided) * (_SEQUENCE_LAYER_S if layout.sequence else _TENSOR_LAYER_S)
    return found


def shard_copies_s(traffic: Sequence[Traffic], shards: int, times: OperationTimes) -> float:
    """What `fully_shard` copies into and out of the tensors that it gathers and scatters, in an update [s].

    Of what is gathered a process's own part goes in and all of it comes out, of what is scattered all goes in; what
    comes out is used where it lies. Source: `foreach_all_gather`, `foreach_all_gather_copy_out` and `foreach_reduce` in
    torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py.
    """
    shares = {"all-gather": (1 / shards, 1.0), "reduce-scatter": (1.0,)}
    return sum(
        one.times * times.seconds(_copied(size * share))
        for one in traffic if one.axis == "shards"
        for size in one.sizes for share in shares[one.collective]
    )  # fmt: skip


def _copied(num_bytes: float) -> Operation:
    """A copy of so many bytes, as the elementwise operation that takes as long."""
    shape = TensorShape(shape=(max(1, round(num_bytes / 4)),), dtype="fp32")
    return Operation(name="mul", inputs=(shape,), outputs=(shape,), flops=0, bytes_read=shape.numel * 4,
                     bytes_written=shape.numel * 4)  # fmt: skip

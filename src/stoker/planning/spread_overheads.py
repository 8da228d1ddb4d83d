"""What layouts cost a process on a CPU besides arithmetic and messages: Python, hooks, DTensor's dispatch.

On a GPU the host runs ahead and most of this is hidden; it is left out there. Constants are judgements, of PyTorch 2.13
on one x86-64 core; `bench/many/overheads.py` measures them, on models that forecasts are not held to.
"""

from __future__ import annotations

from stoker.records import Layout
from stoker.records.model_parts import ModelParts

_REPLICATED_S, _REPLICATED_PARAMETER_S = 4e-4, 1.5e-5
"""Of DistributedDataParallel: an update, and each parameter of it [s]."""
_SHARDED_S, _SHARDED_GROUP_S, _SHARDED_PARAMETER_S = 1e-3, 6e-4, 1e-4
"""Of `fully_shard`: an update, each group in each pass, and each parameter's step of the optimiser as a DTensor [s]."""
_TENSOR_LAYER_S, _TENSOR_PARAMETER_S = 6e-4, 1e-4
"""Of DTensor: a divided layer in each pass, and each parameter in an update [s]."""
_STAGE_S = 5e-4
"""Of a pipeline's schedule: each micro-batch [s]."""


def overhead_s(parts: ModelParts, layout: Layout, passes: int) -> float:
    """What a process of a layout takes beside arithmetic and messages in an update [s]."""
    num_parameters = sum(one.is_trained for one in parts.parameters) / layout.stages
    found = 0.0
    if layout.shards > 1:
        groups = (1 + len(parts.blocks)) / layout.stages
        found += _SHARDED_S + passes * groups * _SHARDED_GROUP_S + num_parameters * _SHARDED_PARAMETER_S
    elif layout.replicas > 1:
        found += _REPLICATED_S + num_parameters * _REPLICATED_PARAMETER_S
    if layout.tensor > 1:
        layers = len(parts.divided) / layout.stages
        found += passes * layers * _TENSOR_LAYER_S + num_parameters * _TENSOR_PARAMETER_S
    if layout.stages > 1:
        found += passes * _STAGE_S
    return found

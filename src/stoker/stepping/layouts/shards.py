"""The execution of layouts of shards, see `stoker.stepping.layouts.sharded`."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from stoker.jobs import Job
from stoker.records import Plan
from stoker.stepping.layouts.base import LayoutExecution, StageParallelism, Strategy
from stoker.stepping.world import World


class ShardExecution(LayoutExecution):
    """See `stoker.stepping.layouts.base.LayoutExecution`."""

    def parallelize(self, plan: Plan, model: nn.Module, world: World, job: Job) -> Strategy:
        """As `LayoutExecution.parallelize`; over replicas too, if the layout has some."""
        from stoker.stepping.layouts.sharded import Sharded  # noqa: PLC0415 - FSDP2 takes long to import

        return Sharded(model, world, precision=plan.precision)

    def within_tensor_group(self, plan: Plan, model: nn.Module, world: World) -> Strategy:
        """As `LayoutExecution.within_tensor_group`."""
        from stoker.stepping.layouts.sharded import Sharded  # noqa: PLC0415 - as above
        from stoker.stepping.layouts.tensor_layers import shard_dim_within_tensor_group  # noqa: PLC0415 - as above

        return Sharded(model, world, precision=plan.precision, along=shard_dim_within_tensor_group)

    def of_stage(
        self, plan: Plan, model: nn.Module, world: World, job: Job, *, absent: Collection[str]
    ) -> StageParallelism:
        """As `LayoutExecution.of_stage`."""
        from stoker.stepping.layouts.sharded import ShardedStage  # noqa: PLC0415 - as above
        from stoker.stepping.layouts.tensor_layers import shard_dim_within_tensor_group  # noqa: PLC0415 - as above

        along = shard_dim_within_tensor_group if plan.layout.tensor > 1 else None
        return ShardedStage(model, world, precision=plan.precision, along=along)


EXECUTION = ShardExecution()

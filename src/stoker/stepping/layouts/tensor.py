"""The execution of layouts of a tensor group, see `stoker.stepping.layouts.tensor_parallel`."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from torch import nn

from stoker.jobs import Job
from stoker.records import Layout, Plan
from stoker.records.profile import Division, ModelParts
from stoker.stepping.layouts.base import LayoutExecution, PassOf, StageParallelism, Strategy
from stoker.stepping.layouts.tensor_plans import divided_dimensions, tensor_plan_problem
from stoker.stepping.world import World


class TensorExecution(LayoutExecution):
    """See `stoker.stepping.layouts.base.LayoutExecution`."""

    def parallelize(self, plan: Plan, model: nn.Module, world: World, job: Job) -> Strategy:
        """As `LayoutExecution.parallelize`; replicas or shards are within it."""
        from stoker.stepping.layouts.tensor_parallel import tensor_parallel  # noqa: PLC0415 - DTensor takes seconds

        return tensor_parallel(plan, model, world, job)

    def of_stage(
        self, plan: Plan, model: nn.Module, world: World, job: Job, *, absent: Collection[str]
    ) -> StageParallelism:
        """As `LayoutExecution.of_stage`; replicas or shards are within it."""
        from stoker.stepping.layouts.tensor_parallel import tensor_stage  # noqa: PLC0415 - as above

        return tensor_stage(plan, model, world, job, absent=absent)

    def model_problem(self, model: nn.Module, layout: Layout) -> str | None:
        """As `LayoutExecution.model_problem`."""
        return tensor_plan_problem(model, layout)

    def divided_parts(
        self, parts: ModelParts, model: nn.Module, layout: Layout, call: PassOf | None = None
    ) -> ModelParts:
        """As `LayoutExecution.divided_parts`: how each layer and each parameter is divided."""
        modules, dims = dict(model.named_modules()), divided_dimensions(model, layout.tensor)
        divided: dict[str, Division] = {}
        for name, dim in dims.items():
            if name.endswith(".weight"):
                layer = name.removesuffix(".weight")
                # A linear layer's outputs are in the first dimension of its weight.
                divided[layer] = "columns" if dim == 0 else "rows"
                if isinstance(modules[layer], nn.Embedding):
                    divided[layer] = "vocabulary"
        parameters = tuple(
            dataclasses.replace(parameter, division=dims.get(parameter.name)) for parameter in parts.parameters
        )
        return dataclasses.replace(parts, parameters=parameters, divided=divided)


EXECUTION = TensorExecution()

"""The execution of layouts of pipeline stages, see `stoker.stepping.layouts.pipeline`."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from stoker.errors import BadJob
from stoker.jobs import Job
from stoker.loading.fields import Content
from stoker.records import Layout, Plan
from stoker.records.profile import ModelParts
from stoker.stepping.layouts.base import LayoutExecution, PassOf, Strategy
from stoker.stepping.layouts.pipeline_cut import PipelineCut, cut_into_stages, stage_problem
from stoker.stepping.layouts.stage_flow import FollowedPass, StageFollower, outline_of
from stoker.stepping.world import World


class StageExecution(LayoutExecution):
    """See `stoker.stepping.layouts.base.LayoutExecution`."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[nn.Module, _KnownModel] = WeakKeyDictionary()

    def parallelize(self, plan: Plan, model: nn.Module, world: World, job: Job) -> Strategy:
        """As `LayoutExecution.parallelize`; what is within each stage is divided further."""
        from stoker.stepping.layouts.pipeline import pipeline  # noqa: PLC0415 - its parts take long to import

        return pipeline(plan, model, world, job)

    def model_problem(self, model: nn.Module, layout: Layout) -> str | None:
        """As `LayoutExecution.model_problem`."""
        return stage_problem(model, layout)

    def data_problem(self, job: Job, model: nn.Module, content: Content, layout: Layout) -> str | None:
        """As `LayoutExecution.data_problem`: stages need what others have and do not pass on."""
        try:
            known = self._known.setdefault(model, _KnownModel())
            known.passed(model, layout, functools.partial(_passed_through, job, content))
        except BadJob as error:
            return error.message
        return None

    def divided_parts(
        self, parts: ModelParts, model: nn.Module, layout: Layout, call: PassOf | None = None
    ) -> ModelParts:
        """As `LayoutExecution.divided_parts`: the blocks that stages consist of, the cuts, and what is passed on."""
        known = self._known.setdefault(model, _KnownModel())
        cut = known.cut(model, layout)
        passed = () if call is None else known.passed(model, layout, call)
        parts = parts.in_blocks(cut.blocks, tuple(span.start for span in cut.spans[1:])).with_tied(cut.tied)
        return dataclasses.replace(parts, passed=passed)


class _KnownModel:
    """What is known of a model: its cuts, a pass of it, and what stages pass on there, by their number."""

    def __init__(self) -> None:
        self._cuts: dict[tuple[int, int], PipelineCut] = {}
        self._followed: FollowedPass | None = None
        self._passed: dict[int, tuple[float, ...] | BadJob] = {}

    def cut(self, model: nn.Module, layout: Layout) -> PipelineCut:
        """As `cut_into_stages`."""
        key = layout.stages, layout.chunks
        if key not in self._cuts:
            self._cuts[key] = cut_into_stages(model, *key)
        return self._cuts[key]

    def passed(self, model: nn.Module, layout: Layout, call: PassOf) -> tuple[float, ...]:
        """What each stage but the last passes on, in sizes of the largest block's output in it.

        Raises:
            BadJob: as `FollowedPass.flow`.
        """
        if layout.num_stages not in self._passed:
            cut = self.cut(model, layout)
            if self._followed is None:
                self._followed = StageFollower(outline_of(model), cut.blocks).follow(call)
            try:
                flow = self._followed.flow(cut.first_blocks, cut.homes)
            except BadJob as error:
                self._passed[layout.num_stages] = error
            else:
                sizes = [
                    max((flow.num_bytes_of((cut.blocks[number], 0, 0)) for number in span), default=0)
                    for span in cut.spans
                ]
                self._passed[layout.num_stages] = tuple(
                    flow.num_bytes(stage) / sizes[stage] if sizes[stage] else 1.0 for stage in range(len(cut.spans) - 1)
                )
        result = self._passed[layout.num_stages]
        if isinstance(result, BadJob):
            raise result
        return result


def _passed_through(job: Job, content: Content, model: nn.Module) -> Any:
    return job.fields.call(model, content)


EXECUTION = StageExecution()

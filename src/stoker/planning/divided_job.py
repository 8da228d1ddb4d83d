"""A job's model as layouts divide it, and what its updates then need; the same wherever the processes are."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from torch import nn

from stoker.jobs import Job
from stoker.loading.fields import Content
from stoker.planning.model.layout_forecast import LayoutNeeds
from stoker.planning.model.run_forecast import Traces
from stoker.planning.resolved_job import ResolvedJob
from stoker.profiling.job_profile import model_parts
from stoker.records import Layout
from stoker.records.profile import ModelParts
from stoker.stepping.layouts import divided_parts


class DividedJob:
    """Parts and needs of a job under each layout, made once for all places of as many devices.

    Args:
        prepared: the job.
        traces: of updates of the whole model.
    """

    def __init__(self, prepared: ResolvedJob, traces: Traces) -> None:
        self._prepared, self._traces = prepared, traces
        self._parts: dict[Layout, ModelParts] = {}
        self._needs: dict[Layout, LayoutNeeds] = {}

    @functools.cached_property
    def contents(self) -> tuple[Content, ...]:
        """Of each set of data a batch of one sample, as the model is given it; that of the training set first."""
        data = self._prepared.data
        sets = [data.train, *data.held_out.values(), *([] if data.test is None else [data.test])]
        return tuple(each.prepare(each.fetch(np.zeros(1, dtype=np.int64), 0)) for each in sets)

    def parts(self, layout: Layout) -> ModelParts:
        """The model's parameters and blocks, as a layout divides them."""
        dividing = Layout(
            stages=layout.stages,
            chunks=layout.chunks,
            tensor=layout.tensor,
            experts=layout.experts,
            added=layout.added,
        )
        if dividing not in self._parts:
            prepared = self._prepared
            call = functools.partial(_passed_through, prepared.job, self.contents)
            self._parts[dividing] = divided_parts(self._whole_parts, prepared.model, dividing, call)
        return self._parts[dividing]

    @functools.cached_property
    def _whole_parts(self) -> ModelParts:
        return model_parts(self._prepared.model)

    def needs(self, layout: Layout) -> LayoutNeeds:
        """Memory and operations of updates under a layout; those of another number of processes are forgotten."""
        if layout not in self._needs:
            if any(known.world_size != layout.world_size for known in self._needs):
                self._needs.clear()
            is_local_sgd = self._prepared.job.sync is not None
            self._needs[layout] = LayoutNeeds(layout, self.parts(layout), self._traces, is_local_sgd=is_local_sgd)
        return self._needs[layout]


def _passed_through(job: Job, contents: Sequence[Content], model: nn.Module) -> object:
    """The output of a pass of the training set's batch."""
    return job.fields.call(model, contents[0])

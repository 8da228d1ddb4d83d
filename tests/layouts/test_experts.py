"""What experts over several processes cost: messages by a trace, state to the byte, and which layouts there are."""

from __future__ import annotations

import dataclasses
import functools

import pytest

from stoker.layouts.base import DividedUpdate
from stoker.layouts.experts import AXIS, routed_rows
from stoker.layouts.local_state import local_bytes
from stoker.layouts.rules import JobTraits, layout_problem
from stoker.layouts.shards import sharding_groups
from stoker.loading.datasets import datasets_of
from stoker.planning.model.search_space import layouts_of
from stoker.profiling.job_profile import model_parts
from stoker.profiling.tracing.update import trace_update
from stoker.records import Layout, Trace
from stoker.records.profile import ModelParts
from stoker.stepping.layouts import divided_parts
from stoker.stepping.model import meta_model
from tests.profiling.tracing.jobs import BATCH, SEPARABLE, settings
from tests.stepping.layouts.conformance import experts_job
from tests.stepping.models import TOKENS

TWO = Layout(experts=2)


@functools.cache
def parts() -> ModelParts:
    """Parameters of two layers of four experts."""
    model = meta_model(experts_job())
    return divided_parts(model_parts(model), model, TWO)


@functools.cache
def traced(checkpointed: int = 0) -> Trace:
    """An update in one process."""
    job = experts_job()
    return trace_update(job, datasets_of(job), SEPARABLE, settings(checkpointed_blocks=checkpointed))


@pytest.mark.parametrize(("checkpointed", "forward"), [(0, 1), (2, 2)])
def test_tokens_go_to_experts_and_back_in_each_pass(checkpointed: int, forward: int) -> None:
    """Two rows of 8 features for each token, twice forward and twice backward; a recomputed layer sends again."""
    size = 2 * BATCH * TOKENS * 8 * 4
    assert routed_rows(traced(checkpointed), parts()) == [(size, forward)] * 2


def test_experts_are_held_by_number_and_all_else_in_rows() -> None:
    """Half of each; gathered are only parameters outside of experts."""
    for one in parts().parameters:
        assert local_bytes(one, TWO, 0) == one.num_bytes // 2
    four = Layout(experts=2, shards=2)
    expert = next(one for one in parts().parameters if one.name == "1.experts.up_EDF")
    assert local_bytes(expert, four, 0) == expert.num_bytes // 4
    dense = sum(one.num_bytes for one in parts().parameters if "experts" not in one.name)
    whole = AXIS.message_bytes(parts(), TWO, is_on_cpu=False)
    assert whole < 4 * dense < sum(one.num_bytes for one in parts().parameters) * 4


def test_with_shards_each_parameter_is_gathered_once() -> None:
    """Over the shards those of a process's experts, over all processes all others."""
    layout = Layout(experts=2, shards=2)
    experts = sum(one.num_bytes for one in parts().parameters if "experts" in one.name)
    assert sum(sharding_groups(parts(), layout)) == experts // 2
    dense = sum(one.num_bytes for one in parts().parameters if "experts" not in one.name)
    update = DividedUpdate(layout=layout, parts=parts(), held=parts(), passes=1, trace=traced)
    gathered = next(one for one in AXIS.traffic(update) if "gathered" in one.what)
    assert sum(gathered.sizes) == dense


def test_compiled_code_ends_at_the_experts() -> None:
    """Their names go with the trace of a process; that of the whole model has none."""
    assert AXIS.trace_of(traced(), parts(), TWO, 0).exchanging == ("1.experts", "2.experts")
    assert traced().exchanging == ()


def test_layouts_of_experts_have_shards_or_none() -> None:
    """Within a machine; other axes are refused with the reason."""
    found = {layout for layout in layouts_of(8) if layout.experts > 1}
    traits = JobTraits()
    legal = {layout for layout in found if layout_problem(layout, traits) is None}
    assert Layout(experts=8) in legal
    assert Layout(experts=4, shards=2) in legal
    assert all(layout.replicas * layout.tensor * layout.stages == 1 for layout in legal)
    assert "with shards alone" in (layout_problem(dataclasses.replace(TWO, tensor=2), traits) or "")
    assert "penalty" in (layout_problem(TWO, JobTraits(has_penalty=True)) or "")
    assert "16 processes that exchange tokens" in (layout_problem(Layout(experts=16), traits) or "")


@pytest.mark.parametrize(
    ("layout", "count", "after"), [(TWO, 4, Layout(experts=2, shards=2)), (TWO, 3, Layout(shards=3))]
)
def test_another_number_of_processes_divides_experts_as_far_as_it_can(
    layout: Layout, count: int, after: Layout
) -> None:
    """More of them are shards; three processes cannot hold halves, and are shards alone."""
    assert layout.resized(count) == after

"""The program that is planned under layouts on GPUs: its precision where a model allows it, and compiling."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from stoker.devices import planned_devices
from stoker.errors import BadJob
from stoker.planning.multi_device import LayoutCandidates
from stoker.planning.planner import Planner
from stoker.planning.resolved_job import resolve_job
from stoker.records import Layout, Plan
from tests.flow.builders import blobs_job
from tests.stepping.layouts.conformance import experts_job

pytestmark = pytest.mark.usefixtures("place")


def candidates(on: str = "2xh100", **changes: Any) -> LayoutCandidates:
    """Those of a small job."""
    (place,) = planned_devices(on, ())
    return LayoutCandidates(Planner(resolve_job(blobs_job(**changes)), is_all_elsewhere=True), place)


class Mixes(nn.Module):
    """Multiplies its activations by an fp32 matrix of its own, which autocast casts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 2)
        self.register_buffer("turn", torch.eye(8))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(inputs) @ self.turn)


@pytest.mark.slow
def test_a_model_that_mixes_dtypes_is_sharded_in_another_precision() -> None:
    """Replicas may keep bf16 by autocast; that shards do not is said with the line."""
    found = candidates(model=Mixes)
    _, rejected = found.ranked()
    assert "bf16" not in found._fast_dtypes(Layout(shards=2))
    assert "bf16" in found._fast_dtypes(Layout(replicas=2))
    (reason,) = [one.reason for one in rejected if "mixes it with another dtype" in one.reason]
    assert "self.first(inputs) @ self.turn" in reason


@pytest.mark.slow
def test_a_model_in_one_dtype_is_sharded_in_bf16() -> None:
    """Images or features in fp32 are cast on their way in."""
    found = candidates()
    assert "bf16" in found._fast_dtypes(Layout(shards=2))
    _, rejected = found.ranked()
    assert not any("another dtype" in one.reason for one in rejected)


@pytest.mark.parametrize(
    ("layout", "may"),
    [
        (Layout(replicas=2), True),
        (Layout(shards=2), True),
        (Layout(experts=2), True),
        (Layout(tensor=2), False),
        (Layout(stages=2), False),
    ],
)
def test_compiling_is_considered_where_a_layout_allows_it(layout: Layout, *, may: bool) -> None:
    """Replicas, shards and experts on GPUs."""
    assert candidates()._may_compile(layout) is may


def test_a_compiled_plan_is_chosen_where_the_whole_run_is_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its forecast, compile time included."""
    found = candidates()
    forecasts, layout = found.forecasts(Layout(replicas=2)), Layout(replicas=2)
    forecast = forecasts.forecast
    for factor, is_compiled in ((1e-6, True), (2.0, False)):

        def of(plan: Plan, factor: float = factor) -> Any:
            found = forecast(plan)
            return dataclasses.replace(found, total_s=found.total_s.scaled(factor if plan.compile else 1.0))

        monkeypatch.setattr(forecasts, "forecast", of)
        assert found.best(layout).plan.compile is is_compiled


def with_experts() -> LayoutCandidates:
    """Layouts of a mixture of experts on two GPUs."""
    (place,) = planned_devices("2xh100", ())
    return LayoutCandidates(Planner(resolve_job(experts_job()), is_all_elsewhere=True), place)


def test_a_pinned_plan_that_cannot_be_compiled_is_refused_before_the_run() -> None:
    """With what goes with the layout."""
    plan = Plan(device="cuda", micro_batch=8, layout=Layout(experts=2), compile=True, checkpointed_blocks=2)
    with pytest.raises(BadJob, match="blocks are compiled in parts"):
        with_experts().given(dataclasses.replace(plan, checkpointing="selective"))


@pytest.mark.slow
def test_compiled_experts_take_less_time_and_save_no_more_memory_than_shards() -> None:
    """Of one trace: kernels are fused within the parts of a block, and what is made between the parts is kept."""
    found = with_experts()
    plain = Plan(device="cuda", micro_batch=8, precision="bf16", optimizer_implementation="fused")
    compiled = dataclasses.replace(plain, compile=True)
    experts, shards = (found.forecasts(layout) for layout in (Layout(experts=2), Layout(shards=2)))
    assert experts.spread(compiled).compute_s < experts.spread(plain).compute_s
    saved, usual = (each.needed_bytes(plain) - each.needed_bytes(compiled) for each in (experts, shards))
    assert 0 <= saved <= usual

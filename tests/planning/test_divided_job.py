"""What layouts divide a model into, and what its updates then need: worked out once for several places."""

from __future__ import annotations

import pytest

from stoker.devices import planned_devices
from stoker.planning.model.layout_forecast import LayoutNeeds
from stoker.planning.multi_device import LayoutCandidates
from stoker.planning.planner import Planner
from stoker.planning.resolved_job import resolve_job
from stoker.records import Layout, Plan, Trace, TraceSettings
from tests.flow.builders import blobs_job

pytestmark = pytest.mark.usefixtures("place")

PLAN = Plan(device="cuda:0", micro_batch=2, precision="bf16")


def test_places_of_as_many_devices_divide_a_trace_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second place has times of its own, and the same traces; its forecasts are as without the first."""
    divided: list[int] = []
    divide = LayoutNeeds._rank_trace

    def noted(needs: LayoutNeeds, settings: TraceSettings, rank: int) -> Trace:
        divided.append(rank)
        return divide(needs, settings, rank)

    monkeypatch.setattr(LayoutNeeds, "_rank_trace", noted)
    planner, layout = Planner(resolve_job(blobs_job()), is_all_elsewhere=True), Layout(shards=2)
    first, second = (LayoutCandidates(planner, place) for place in planned_devices("2xh100,2xb200", ()))
    found = [places.forecasts(layout).forecast(PLAN) for places in (first, second)]
    assert divided == [0]
    alone = LayoutCandidates(Planner(resolve_job(blobs_job()), is_all_elsewhere=True), second.place)
    assert found[1] == alone.forecasts(layout).forecast(PLAN) != found[0]


def test_what_another_number_of_devices_needed_is_forgotten() -> None:
    """Large models have too many traces to keep those of every number."""
    divided = Planner(resolve_job(blobs_job()), is_all_elsewhere=True).divided_job
    of_two = divided.needs(Layout(shards=2))
    assert divided.needs(Layout(replicas=2)) is not of_two
    assert divided.needs(Layout(shards=2)) is of_two
    divided.needs(Layout(shards=4))
    assert divided.needs(Layout(shards=2)) is not of_two

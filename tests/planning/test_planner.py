"""In which order plans are tried, with a search and trials that are made up."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from stoker.devices import attached_cpu, planned_devices
from stoker.devices.hardware import MTBF_H, PREEMPTED_S
from stoker.errors import DoesNotFit
from stoker.planning import planner
from stoker.planning.resolved_job import resolve_job
from stoker.records import Device, Plan
from tests.flow.builders import blobs_job

pytestmark = pytest.mark.usefixtures("place")

FIRST = Plan(device="cpu", micro_batch=32)
OTHER, NEIGHBOUR = (dataclasses.replace(FIRST, micro_batch=size) for size in (16, 8))


class Script:
    """A search that asks for two plans, doubts the first, and then asks for one more."""

    candidates = ()

    def __init__(self, *_: object) -> None:
        self._asked: Iterator[Plan | None] = iter((FIRST, OTHER, None, NEIGHBOUR, None))

    def next_plan(self) -> Plan | None:
        return next(self._asked)

    def in_doubt(self) -> tuple[Plan, ...]:
        return (FIRST,)

    def known_gradient_error(self, _plan: Plan) -> float:
        return 0.0

    def reject(self, *_: object, **__: object) -> None: ...


def test_after_what_was_in_doubt_the_search_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A burst of other work in the first trial had made its neighbours look slow as well."""
    tried: list[Plan] = []

    def trial(_job: object, plan: Plan, *_: object, **__: object) -> None:
        tried.append(plan)
        raise DoesNotFit("a made-up reason")

    monkeypatch.setattr("stoker.planning.planner.PlanSearch", Script)
    monkeypatch.setattr("stoker.planning.planner.try_plan", trial)
    [place] = planned_devices("cpu", (attached_cpu(),))
    planner.Planner(resolve_job(blobs_job())).confirmed(place, FIRST)  # a plan that is given is not ranked
    assert tried == [FIRST, OTHER, FIRST, NEIGHBOUR]


@pytest.mark.parametrize("capability", ["8.9", "7.0", ""])
def test_a_gpu_that_the_catalogue_lacks_is_planned_by_trials(capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be forecast for it, whatever its driver reports; its plans are tried, and the reason is said."""
    tried: list[Plan] = []

    def trial(_job: object, plan: Plan, *_: object, **__: object) -> None:
        tried.append(plan)
        raise DoesNotFit("a made-up reason")

    monkeypatch.setattr("stoker.planning.planner.try_plan", trial)
    gpu = Device(
        name="cuda:0",
        kind="cuda",
        model="NVIDIA X",
        cores=0,
        memory_bytes=12 * 2**30,
        fast_dtypes=("fp32", "bf16"),
        compute_capability=capability,
    )
    [place] = planned_devices("cuda:0", (gpu,))
    search, problem = planner.Planner(resolve_job(blobs_job())).confirmed(place)
    assert tried[0].device == "cuda:0"
    assert len(search.rejected) == len(tried)
    assert "NVIDIA X" in problem or "capability" in problem


def test_machines_that_are_taken_away_fail_with_all_their_devices() -> None:
    """A spot machine of eight taken away each hour: one device fails in 8 h by that; what is here is not taken away."""
    spot = planner.Planner(resolve_job(blobs_job()), preempted_s=3600.0)
    (single,), (machine,) = planned_devices("h100", ()), planned_devices("16xh100", ())
    own_h = MTBF_H["cuda"]
    assert spot.profile_at(single).device_mtbf_h == pytest.approx(1 / (1 / own_h + 1))
    assert spot.profile_at(machine).device_mtbf_h == pytest.approx(1 / (1 / own_h + 1 / 8))
    (here,) = planned_devices("cpu", (attached_cpu(),))
    assert spot.profile_at(here).device_mtbf_h is None
    assert spot.profile_at(machine).machine_devices == 8
    taken_s, steady_s = (
        spot.profile_at(machine).restart_s,
        planner.Planner(resolve_job(blobs_job())).profile_at(machine),
    )
    assert taken_s == pytest.approx(PREEMPTED_S, rel=0.01)
    assert steady_s.restart_s is None


def test_what_is_taken_away_costs_the_price_of_spot_and_a_cluster_that_of_machines_with_a_network() -> None:
    """Eight H100 on demand are the cheapest offer's; 64 are not the marketplace's; a spot price is below both."""
    steady = planner.Planner(resolve_job(blobs_job()))
    spot = planner.Planner(resolve_job(blobs_job()), preempted_s=3600.0)
    (eight,), (many,) = planned_devices("8xh100", ()), planned_devices("64xh100", ())
    prices = [one.price_at(place) for one in (steady, spot) for place in (eight, many)]
    assert [price.market for price in prices] == ["on demand", "on demand", "spot", "spot"]
    each = [price.usd_per_hour / count for price, count in zip(prices, (8, 64, 8, 64), strict=True)]
    assert each[2] < each[0] < each[1]
    assert prices[1].most_devices is None
    (unrented,) = planned_devices("16xrtx-4090", ())
    assert steady.price_at(unrented) is None
    (here,) = planned_devices("cpu", (attached_cpu(),))
    assert steady.price_at(here) is None

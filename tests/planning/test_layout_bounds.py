"""Layouts that are left out by their state, or put in order by an estimate, before anything is traced for them."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from stoker.devices import planned_devices
from stoker.errors import DoesNotFit
from stoker.jobs import AdamW
from stoker.planning.model.search_space import precisions
from stoker.planning.multi_device import LayoutCandidates, _Found, on_many, without_layout
from stoker.planning.planner import Planner
from stoker.planning.resolved_job import resolve_job
from stoker.records import Device, Layout, Plan, Precision
from stoker.zoo import GPT
from tests.flow.builders import blobs_job
from tests.stepping.models import VOCAB, make_job

pytestmark = pytest.mark.usefixtures("place")


def candidates(on: str, memory: float | None = None, network: str | None = None) -> LayoutCandidates:
    """Those of a small job."""
    (place,) = planned_devices(on, (), network=network)
    return LayoutCandidates(Planner(resolve_job(blobs_job()), is_all_elsewhere=True), place.limited_to(memory))


def test_what_has_no_room_for_its_state_is_left_out_with_the_numbers() -> None:
    """On devices of 6 kB neither replicas nor shards have room, on real ones both have."""
    for layout in (Layout(replicas=16), Layout(shards=16)):
        assert candidates("16xh100")._lacks(layout) is None
    reason = candidates("16xh100", memory=6e3)._lacks(Layout(replicas=16))
    assert reason is not None
    assert "of each device" in reason
    assert "NVIDIA H100" in reason


@pytest.mark.slow
def test_planning_leaves_nothing_in_memory() -> None:
    """What was planned over several devices is freed with its last user: a notebook may plan for days."""
    planned = candidates("4xh100")
    planned.ranked()
    left = [weakref.ref(planned), weakref.ref(planned.forecasts(Layout(shards=4))), weakref.ref(planned.planner)]
    del planned
    gc.collect()
    assert [one() for one in left] == [None, None, None]


@pytest.mark.parametrize(
    ("favourite", "searched"),
    [("bf16", {"bf16", "fp32"}), ("tf32", {"bf16", "tf32", "fp32"}), ("fp32", {"bf16", "tf32", "fp32"})],
)
def test_a_precision_that_did_not_fit_under_the_first_layout_is_searched_again(
    favourite: Precision, searched: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas of bf16 hold casts and their weights, shards do not; what is slower than the first plan has lost."""
    devices: list[Device] = []

    def rank(_local: object, device: Device, *_: object, **__: object) -> None:
        devices.append(device)
        raise DoesNotFit("a made-up reason")

    monkeypatch.setattr("stoker.planning.multi_device.rank", rank)
    eight = candidates("8xh100")
    eight._favourite = Plan(device="cuda:0", micro_batch=1, precision=favourite)
    with pytest.raises(DoesNotFit, match="made-up"):
        eight.best(Layout(shards=8))
    assert set(precisions(devices[0])) == searched


@pytest.mark.slow
def test_stages_are_interleaved_where_that_is_forecast_to_be_faster() -> None:
    """With few micro-batches in four stages: the forecast has less of a bubble, and more messages."""
    tokens = torch.zeros(64, 512, dtype=torch.int64)
    job = make_job(
        lambda: GPT(layers=8, width=1024, heads=8, context=512, vocab=VOCAB),
        data=(tokens, tokens),
        loss="token_cross_entropy",
        optimizer=AdamW(lr=1e-3),
        batch=16,
    )
    (place,) = planned_devices("4xh100", ())
    planned, found = LayoutCandidates(Planner(resolve_job(job), is_all_elsewhere=True), place), _Found([], [], [])
    planned._consider(Layout(stages=4), found)
    plain, *others = found.candidates
    assert [one.plan.layout for one in others][:1] == [Layout(stages=4, chunks=2)]
    spreads = [planned.forecasts(one.plan.layout).spread(without_layout(one.plan)) for one in (plain, others[0])]
    assert others[0].forecast.step_s.value < plain.forecast.step_s.value
    assert spreads[1].bubble_s < 0.6 * spreads[0].bubble_s
    sent = [one.forecast.communication_bytes for one in (plain, others[0])]
    assert sent[1] > 1.5 * sent[0]


@pytest.mark.slow
def test_several_gpus_that_the_catalogue_lacks_are_planned_by_the_most_similar_one() -> None:
    """Nothing is tried on several, so that their layouts need figures; the plan says whose they are."""
    gpus = [
        Device(
            name=f"cuda:{index}",
            kind="cuda",
            index=index,
            model="NVIDIA X",
            cores=0,
            memory_bytes=12 * 2**30,
            fast_dtypes=("fp32", "tf32", "bf16"),
            compute_capability="8.9",
        )
        for index in range(2)
    ]
    (place,) = planned_devices("2xcuda", gpus)
    decision = on_many(Planner(resolve_job(blobs_job())), place)
    assert decision.chosen.plan.layout.world_size == 2
    assert "NVIDIA X is not in the catalogue: planned by the figures of NVIDIA GeForce RTX 4070" in " ".join(
        decision.explanation
    )


def test_a_slow_network_puts_groups_within_a_machine_first() -> None:
    """Where machines hardly reach each other, shards of eight come before shards over two machines."""
    slow = candidates("16xh100", network="1x1gbit")
    estimates = {shards: slow._estimate_s(Layout(replicas=16 // shards, shards=shards)) for shards in (8, 2)}
    over_machines = slow._estimate_s(Layout(shards=16))
    assert estimates[8] < over_machines


def test_products_with_room_for_the_best_plan_come_before_those_that_have_to_save_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is kept gathered sends less, and comes first by estimate: not where its place costs recomputation."""
    over = candidates("16xh100")
    add_like, planned_in_full = over._add_like, list[Layout]()

    def has_room(favourite: Plan, layout: Layout, found: object) -> bool:
        return layout.reshard and add_like(favourite, layout, found)  # type: ignore[arg-type]

    consider = over._consider

    def planned(layout: Layout, found: object) -> None:
        planned_in_full.append(layout)
        consider(layout, found)  # type: ignore[arg-type]

    monkeypatch.setattr(over, "_add_like", has_room)
    monkeypatch.setattr(over, "_consider", planned)
    ranked, _ = over.ranked()
    products = [one.plan.layout for one in ranked if len(one.plan.layout.divided) > 1]
    assert len(products) == 3
    assert all(one.reshard for one in products)
    assert all(len(one.divided) == 1 for one in planned_in_full)


@pytest.mark.parametrize(("share", "is_worthwhile"), [(0.75, True), (0.85, False)])
def test_the_model_is_divided_where_that_may_gain_more_than_forecasts_err(share: float, *, is_worthwhile: bool) -> None:
    """By estimate, where something fits that shares the batch alone; what shares it too is planned anyway."""
    over = candidates("16xh100")
    divided = Layout(shards=4, tensor=2, replicas=2)
    assert over._may_gain(divided, over._estimate_s(divided) / share) is is_worthwhile
    assert over._may_gain(divided, None)
    assert over._may_gain(Layout(replicas=2, shards=8), 0.0)

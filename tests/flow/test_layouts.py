"""`stoker.plan` for several devices, from end to end: layouts compared, and what cannot be spread."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

import stoker
from stoker.devices import Place, attached_devices, cheapest, planned_devices
from stoker.errors import BadJob
from stoker.jobs import SGD, AdamW, Job
from stoker.loading.batches import BatchSource
from stoker.loading.datasets import datasets_of
from stoker.planning.decision import decide
from stoker.planning.multi_device import LayoutCandidates, _in_order, links_between
from stoker.planning.planner import Planner
from stoker.planning.resolved_job import resolve_job
from stoker.records import Candidate, Coupling, Layout, Plan, Position
from stoker.stepping.distributed_tensors import local
from stoker.stepping.step import Step
from stoker.stepping.world import World
from stoker.testing.ranks import on_ranks
from stoker.zoo import GPT
from tests.planning.trials import forecast_of
from tests.stepping.models import make_job, texts

SEPARABLE = Coupling(kind="separable", group=None, causes=(), evidence="")


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache in which these tests leave each other what they traced."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _one_cache(traces: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_CACHE", str(traces))


def gpt_job(**changes: object) -> Job:
    """A GPT of two blocks with a head of an odd number of rows."""
    given = {"data": texts(40), "loss": "token_cross_entropy", "optimizer": AdamW(lr=1e-3), "clip_norm": 1.0}
    return make_job(lambda: GPT(layers=2, width=16, heads=2, context=8, vocab=13), **{**given, **changes})


def lbfgs(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.LBFGS:
    """Passes within a step, which several devices cannot share: here one, since each is traced."""
    return torch.optim.LBFGS(parameters, max_iter=1)


def two_on_this_cpu() -> Place:
    """Two processes, which compute in fp32."""
    (place,) = planned_devices("2xcpu", attached_devices())
    return dataclasses.replace(place, device=dataclasses.replace(place.device, fast_dtypes=("fp32",)))


@pytest.mark.slow
def test_layouts_for_gpus_elsewhere_are_compared_without_running_anything() -> None:
    """All that two can do, the best first; prices and energy are those of both; links are reported."""
    found = stoker.plan(gpt_job(), on="2xt4")  # which computes in fp32 alone: few traces
    layouts = [one.plan.layout for one in found.candidates]
    assert {Layout(replicas=2), Layout(shards=2), Layout(tensor=2), Layout(stages=2)} <= set(layouts)
    assert found.device == found.chosen.device == "2xt4"
    each, price = cheapest("t4"), found.chosen.price
    assert each is not None
    assert price is not None
    assert price.usd_per_hour == pytest.approx(2 * each.usd_per_hour)
    for candidate in found.candidates:
        forecast = candidate.forecast
        assert forecast.exposed_s is not None
        assert forecast.communication_bytes
        assert forecast.exposed_s.value < forecast.step_s.value
        assert 14 * 2**30 < candidate.memory_bytes < 16 * 2**30
    times = [candidate.forecast.total_s.value for candidate in found.candidates]
    assert times[1:] == sorted(times[1:])
    assert any("PCI Express is assumed, 16 GB/s each way" in line for line in found.explanation)
    assert all("x the time" in one.reason for one in found.rejected[: len(layouts) - 1])


@pytest.mark.slow
def test_the_plan_for_processes_here_can_be_run() -> None:
    """Each on its share of the cores, on the CPU; the coupling is found once."""
    place = two_on_this_cpu()
    decision, coupling = decide(resolve_job(gpt_job()), place)
    plan = decision.chosen.plan
    assert plan.layout.world_size == 2
    assert (plan.device, plan.threads, plan.captured, plan.loader) == ("cpu", place.cores_each, False, "memory")
    assert coupling.kind == "separable"
    assert decision.chosen.is_here
    assert decision.chosen.memory_bytes == place.memory_bytes_each
    assert any("stoker doctor --on" in line for line in decision.explanation)


def test_a_plan_that_was_given_is_taken() -> None:
    """With its forecast; one for another number of processes, or that is not legal, is refused with both numbers."""
    (place,) = planned_devices("2xcpu", attached_devices())
    prepared = resolve_job(gpt_job())
    given = Plan(device="cpu", micro_batch=4, layout=Layout(shards=2))
    decision, _ = decide(prepared, place, given)
    assert decision.chosen.plan == given
    with pytest.raises(BadJob, match=r"4 processes \(4 replicas\), but --on 2xcpu means 2"):
        decide(prepared, place, dataclasses.replace(given, layout=Layout(replicas=4)))
    with pytest.raises(BadJob, match="3 stages need 3 blocks at least, but GPT has 2"):
        decide(
            prepared,
            planned_devices("3xcpu", attached_devices())[0],
            dataclasses.replace(given, layout=Layout(stages=3)),
        )
    with pytest.raises(BadJob, match="the plan is for cuda:0, but the job is to run on cpu"):
        decide(prepared, place, dataclasses.replace(given, device="cuda:0"))


@pytest.mark.parametrize(
    ("changes", "on", "says"),
    [
        ({"batch": 2}, "4xh100", "4 processes cannot take parts of a batch of 2 samples: at most 2 can"),
        ({"optimizer": torch.optim.LBFGS}, "2xh100", "LBFGS computes the loss again within its step"),
        ({"loss": stoker.Objective("token_cross_entropy", scope="batch")}, "2xh100", "groups of 16 by the loss"),
    ],
)
def test_what_cannot_be_spread_says_why(changes: dict[str, object], on: str, says: str) -> None:
    """The number, and what would do; tensor groups and stages are closed to a job of two samples on four as well."""
    job = gpt_job(**changes)
    places = planned_devices(on, attached_devices())
    problem = LayoutCandidates(Planner(resolve_job(job), is_all_elsewhere=True), places[0]).rules.problem_with(
        Layout(replicas=places[0].count)
    )
    assert problem is not None
    assert says in problem


def test_a_job_that_no_layout_takes_is_refused_once() -> None:
    """With the reasons."""
    job = gpt_job(optimizer=lbfgs)
    with pytest.raises(BadJob, match="2 devices cannot share this job"):
        stoker.plan(job, on="2xh100")


@pytest.mark.slow
def test_beside_one_device_several_that_cannot_share_a_job_are_left_out() -> None:
    """The one is planned for, and a line says why the others are not."""
    found = stoker.plan(gpt_job(optimizer=lbfgs), on="t4,2xt4")
    assert [one.device for one in found.candidates] == ["t4"]
    assert any(line.startswith("2xt4 is left out: 2 devices cannot share this job") for line in found.explanation)


def test_in_a_run_of_a_stated_time_the_layout_that_trains_on_more_samples_is_first() -> None:
    """All of them take that time."""
    slow, fast = (
        Candidate(
            device="2xt4",
            plan=Plan(device="cuda:0", micro_batch=4, layout=layout),
            memory_bytes=2**34,
            forecast=dataclasses.replace(forecast_of(Plan(device="cuda:0", micro_batch=4)), total_samples=count),
        )
        for layout, count in ((Layout(replicas=2), 10**6), (Layout(shards=2), 2 * 10**6))
    )
    assert _in_order([slow, fast]) == (fast, slow)


@pytest.mark.parametrize(("gain", "is_taken"), [(0.03, False), (0.1, True)])
@pytest.mark.parametrize("is_over_machines", [False, True])
def test_samples_are_divided_where_that_is_faster_by_more_than_forecasts_err(
    gain: float, is_taken: bool, is_over_machines: bool
) -> None:
    """By 3 % shards stay first, which would lose to other layouts then."""
    plan = Plan(device="cuda:0", micro_batch=4)
    shards, context, hybrid = (
        Candidate(
            device="8xh100",
            plan=dataclasses.replace(plan, layout=layout),
            memory_bytes=2**34,
            forecast=forecast_of(plan, total_s=total_s),
        )
        for layout, total_s in (
            (Layout(shards=8), 100.0),
            (Layout(context=8), 100.0 * (1 - gain)),
            (Layout(replicas=2, shards=4), 100.0 * (1 - gain)),
        )
    )
    first = _in_order([shards, context], is_over_machines=is_over_machines)[0]
    assert first == (context if is_taken else shards)
    assert _in_order([shards, hybrid], is_over_machines=is_over_machines)[0] == hybrid


@pytest.mark.parametrize(("gain", "is_taken"), [(0.16, False), (0.25, True)])
def test_over_machines_the_model_is_divided_where_that_is_faster_by_more_than_forecasts_err(
    gain: float, *, is_taken: bool
) -> None:
    """By 16 % shards stay first; within a machine, whose links are known, the fastest is."""
    plan = Plan(device="cuda:0", micro_batch=4)
    shards, divided = (
        Candidate(
            device="16xh100",
            plan=dataclasses.replace(plan, layout=layout),
            memory_bytes=2**34,
            forecast=forecast_of(plan, total_s=total_s),
        )
        for layout, total_s in (
            (Layout(shards=16), 100.0),
            (Layout(shards=4, tensor=2, stages=2), 100.0 * (1 - gain)),
        )
    )
    assert _in_order([shards, divided], is_over_machines=True)[0] == (divided if is_taken else shards)
    assert _in_order([divided, shards], is_over_machines=True)[0] == divided
    assert _in_order([shards, divided])[0] == divided


def test_over_machines_the_surer_of_two_layouts_is_first_if_it_is_no_slower() -> None:
    """Shards within machines depend less on the network; within one machine the simpler layout stays."""
    plan = Plan(device="cuda:0", micro_batch=4)
    forecast = forecast_of(plan)
    rates = [
        dataclasses.replace(forecast.samples_per_s, low=share * forecast.samples_per_s.value) for share in (0.7, 0.8)
    ]
    flat, hybrid = (
        Candidate(
            device="16xh100",
            plan=dataclasses.replace(plan, layout=layout),
            memory_bytes=2**34,
            forecast=dataclasses.replace(forecast, samples_per_s=rate),
        )
        for layout, rate in zip((Layout(shards=16), Layout(replicas=2, shards=8)), rates, strict=True)
    )
    assert _in_order([flat, hybrid]) == (flat, hybrid)
    assert _in_order([flat, hybrid], is_over_machines=True) == (hybrid, flat)
    assert _in_order([hybrid, flat], is_over_machines=True) == (hybrid, flat)


def test_links_of_what_is_not_here_cannot_be_measured() -> None:
    """One device has no links, and those elsewhere are out of reach."""
    assert links_between("here") == ()
    with pytest.raises(stoker.errors.NoDevice, match="8xh100 is not here"):
        links_between("8xh100")


def state_bytes(world: World, plan: Plan) -> tuple[int, int, int]:
    """Bytes of parameters as stored, gradients and optimiser state of this process, after an update."""
    job = gpt_job(optimizer=SGD(lr=0.1, momentum=0.9) if plan.micro_batch == 3 else AdamW(lr=1e-3))
    step = Step(job, plan, SEPARABLE, world=world)
    data = datasets_of(job)
    source = BatchSource(
        data.train,
        step.pipeline(data.train, augmented=True),
        data.extent(job),
        job.seed,
        plan,
        split=world.split(SEPARABLE),
    )
    batch, again = source.batches(Position(), 2)
    step.update(batch, 0, 0.0)
    step.gradients(again, 1)
    parameters = [p for group in step.optimizer.param_groups for p in group["params"]]
    storages = [local(p.detach()).untyped_storage() for p in parameters]
    stored = {one.data_ptr(): one.nbytes() for one in storages}
    gradients = sum(local(p.grad).nbytes for p in parameters if p.grad is not None)
    state = [v for s in step.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    return sum(stored.values()), gradients, sum(local(v).nbytes for v in state)


@pytest.mark.parametrize(
    ("layout", "micro_batch"),
    [pytest.param(Layout(replicas=2), 8, marks=pytest.mark.slow), (Layout(shards=2, reshard=False), 3)],
    ids=lambda value: value.in_words() if isinstance(value, Layout) else str(value),
)
def test_bytes_of_a_process_are_exact(layout: Layout, micro_batch: int) -> None:
    """Parameters with their padding, gradients and optimiser state, of each process, as they are after an update."""
    plan = Plan(device="cpu", micro_batch=micro_batch, layout=layout)
    found = on_ranks(layout, state_bytes, plan)
    job = gpt_job(optimizer=SGD(lr=0.1, momentum=0.9) if micro_batch == 3 else AdamW(lr=1e-3))
    forecasts = LayoutCandidates(Planner(resolve_job(job)), two_on_this_cpu()).forecasts(layout)
    for rank, measured in enumerate(found):
        state = forecasts.state(dataclasses.replace(plan, layout=Layout()), rank)
        assert (state.parameters, state.gradients, state.optimizer) == measured

"""`stoker.plan` from end to end: devices that are here and those that are not, limits, and jobs that cannot be had."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import stoker
from stoker.devices import Place, attached_cpu, planned_devices
from stoker.errors import BadJob, DoesNotFit, NoDevice
from stoker.jobs import load_job
from stoker.planning import decision, explanation, plan_ranking, planner
from stoker.planning.plan_ranking import least_demanding
from stoker.planning.resolved_job import resolve_job
from stoker.records import Candidate, Device, Estimate, Measurement, Plan
from stoker.units import parse_memory
from tests.flow.builders import blobs, blobs_job
from tests.flow.command import stoker_here

JOBS = Path(__file__).parent / "jobs"
EXAMPLES = Path(__file__).parents[2] / "examples"
GIB = 2**30


@pytest.fixture(autouse=True)
def _few_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each precision one plan is traced and ranked for what is here: no test depends on how many there are."""
    monkeypatch.setattr(plan_ranking, "LEAST_RANKING_S", 0.0)
    monkeypatch.setattr(plan_ranking, "RANKING_SHARE", 0.0)


@pytest.fixture
def nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial would be an error."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a trial was started")

    monkeypatch.setattr("stoker.planning.planner.try_plan", refuse)


def job_of(name: str, **settings: str) -> dict[str, object]:
    """The job of a file in `jobs`, as arguments of `stoker.plan`."""
    job, entry = load_job(JOBS / f"{name}.py", settings)
    return {"job": job, "entry": entry}


def few_devices(words: str, attached: Sequence[Device], *, network: str | None = None) -> tuple[Place, ...]:
    """As if the catalogue had two devices."""
    return planned_devices("l4,h100" if words == "all" else words, attached, network=network)


def wide_net() -> nn.Module:
    """A million weights, all of them in products of matrices, which are what a GPU is for."""
    return nn.Sequential(nn.Linear(6, 1000), nn.ReLU(), nn.Linear(1000, 1000), nn.ReLU(), nn.Linear(1000, 2))


def assert_is_forecast(candidate: Candidate) -> None:
    """Every estimate is there, in its unit, and what it says agrees with the others."""
    forecast, hours = candidate.forecast, candidate.forecast.total_s.value / 3600
    units = {"step_s": "s", "total_s": "s", "peak_bytes": "bytes", "energy_kwh": "kWh", "cost_usd": "USD"}
    for name, unit in units.items():
        estimate = getattr(forecast, name)
        assert isinstance(estimate, Estimate), name
        assert estimate.unit == unit
        assert 0 < estimate.low <= estimate.value <= estimate.high
    assert candidate.price is not None
    assert forecast.cost_usd is not None
    assert forecast.cost_usd.value == pytest.approx(hours * candidate.price.usd_per_hour)
    assert forecast.total_s.value >= forecast.step_s.value * forecast.total_updates
    assert forecast.reserved_bytes is not None
    assert forecast.peak_bytes.value <= forecast.reserved_bytes.value < candidate.memory_bytes


def test_devices_that_are_here_and_not_are_compared() -> None:
    """One candidate for each, the fastest first; what is here was tried and costs nothing, the others are forecast."""
    found = stoker.plan(blobs_job(), on="h100,l4,here")
    assert {one.device for one in found.candidates} == {"h100", "l4", "cpu"}
    times = [one.forecast.total_s.value for one in found.candidates]
    assert times == sorted(times)
    assert found.device == found.chosen.device == found.candidates[0].device
    by_name = {one.device: one for one in found.candidates}
    assert_is_forecast(by_name["h100"])
    assert_is_forecast(by_name["l4"])
    here = by_name["cpu"]
    assert here.is_here
    assert (here.price, here.forecast.cost_usd) == (None, None)
    assert here.forecast.total_s.basis == "measured here"
    assert all(rejection.reason for rejection in found.rejected)


@pytest.mark.usefixtures("nothing_is_run")
def test_nothing_is_run_for_a_device_that_is_not_here() -> None:
    """Not a single update; and it is said so."""
    found = stoker.plan(blobs_job(), on="h100")
    assert found.chosen.plan.device == "cuda:0"
    assert_is_forecast(found.chosen)
    assert any("nothing was run" in line for line in found.explanation)
    assert found.breakdown is not None
    assert found.breakdown.step_s
    assert sum(share.value for share in found.breakdown.peak_bytes) == pytest.approx(
        found.chosen.forecast.peak_bytes.value, rel=0.1
    )


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_is_run")
def test_the_whole_catalogue_is_compared() -> None:
    """Every device with a time model has a candidate; those with a price come first, by money."""
    found = stoker.plan(blobs_job(), on="all", objective="money")
    assert len(found.candidates) >= 25
    assert not any(one.is_here for one in found.candidates)
    costs = [one.forecast.cost_usd for one in found.candidates]
    known = [cost.value for cost in costs if cost is not None]
    assert known == sorted(known)
    assert all(cost is None for cost in costs[len(known) :])


@pytest.mark.usefixtures("nothing_is_run")
def test_of_devices_elsewhere_only_the_best_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the others' time and memory are made of is not forecast: a decision shows the best one's."""
    explained: list[str] = []

    def explain(chosen: Candidate, *arguments: Any) -> tuple[str, ...]:
        explained.append(chosen.device)
        return explanation.explain(chosen, *arguments)

    monkeypatch.setattr(decision, "explain", explain)
    found = stoker.plan(blobs_job(), on="h100,l4")
    assert len(found.candidates) == 2
    assert explained == [found.chosen.device]


@pytest.mark.usefixtures("nothing_is_run")
@pytest.mark.slow
def test_a_larger_model_gains_more_from_a_larger_device() -> None:
    """Where products are what takes the time, an H100 is far ahead of an L4."""
    job = blobs_job(model=wide_net, data=blobs(2**17), batch=2**17, valid=None, until=stoker.epochs(100))
    found = stoker.plan(job, on="l4,h100")
    first, second = found.candidates
    assert (first.device, second.device) == ("h100", "l4")
    assert second.forecast.total_s.value > 3 * first.forecast.total_s.value


@pytest.mark.usefixtures("nothing_is_run")
def test_a_deadline_that_nothing_keeps_names_the_nearest() -> None:
    """With what it would take there."""
    with pytest.raises(DoesNotFit, match=r"within 1 h; the nearest is (h100|l4) with .* and \$[\d,.]+: takes") as error:
        stoker.plan(**job_of("endless"), on="h100,l4", deadline="1h")  # type: ignore[arg-type]
    assert error.value.exit_code == 3
    assert "Raise that limit" in str(error.value.remedy)


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_is_run")
def test_what_breaks_a_limit_is_rejected_with_its_numbers() -> None:
    """A budget that only one of two devices keeps."""
    both = stoker.plan(**job_of("endless"), on="h100,l4", objective="money")  # type: ignore[arg-type]
    cheap, dear = (one.forecast.cost_usd.value for one in both.candidates if one.forecast.cost_usd is not None)
    found = stoker.plan(**job_of("endless"), on="h100,l4", max_cost=(cheap + dear) / 2)  # type: ignore[arg-type]
    assert [one.device for one in found.candidates] == [both.candidates[0].device]
    lost = [one.reason for one in found.rejected if one.device == both.candidates[1].device]
    assert len(lost) == 1
    assert lost[0].startswith("costs $")
    assert ", the limit is $" in lost[0]


def test_an_unknown_device_is_told_with_names_like_it() -> None:
    """Before anything is worked out of the job beyond its data."""
    with pytest.raises(NoDevice, match="no device named 'h10'") as error:
        stoker.plan(blobs_job(), on="here,h10")
    assert error.value.exit_code == 2
    assert "'h100'" in str(error.value.remedy)


UNTRACEABLE = {
    "untraceable": (r"`index` at untraceable\.py:\d+ has a result whose size depends on the data", "planned by trials"),
    "unknown_operation": (r"squash.* at unknown_operation\.py:\d+ cannot be traced", "register_fake"),
    "through_numpy": (r"at through_numpy\.py:\d+ cannot be traced: .*numpy", r"\.numpy\(\)"),
}


@pytest.mark.parametrize("name", UNTRACEABLE)
@pytest.mark.usefixtures("nothing_is_run")
def test_a_model_that_cannot_be_traced_is_refused_elsewhere(name: str) -> None:
    """Operation, line, and what would help."""
    says, hint = UNTRACEABLE[name]
    with pytest.raises(BadJob, match=says) as error:
        stoker.plan(**job_of(name), on="h100")  # type: ignore[arg-type]
    assert hint.replace("\\", "") in str(error.value.remedy)


@pytest.mark.parametrize("name", UNTRACEABLE)
def test_a_model_that_cannot_be_traced_is_planned_here_by_trials(name: str) -> None:
    """And the explanation says why there was no forecast."""
    found = stoker.plan(**job_of(name))  # type: ignore[arg-type]
    assert found.chosen.forecast.step_s.basis == "measured here"
    (why,) = [line for line in found.explanation if line.startswith("no forecast before the trials")]
    assert f"{name}.py:" in why


def test_a_limit_of_memory_goes_for_a_model_that_cannot_be_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its trials tell what it takes; where that is too much for all plans, that is the error, and not the tracing."""
    monkeypatch.setattr(planner, "TRIAL_S", 0.01)
    with pytest.raises(DoesNotFit, match=r"it took .* of memory when it was tried, and may take 95\.4 MiB") as error:
        stoker.plan(**job_of("untraceable"), on="cpu", memory="100MB")  # type: ignore[arg-type]
    assert str(error.value.remedy).startswith("Allow more memory (--memory). What it would need elsewhere is unknown: ")


@pytest.mark.usefixtures("nothing_is_run")
def test_a_branch_on_values_is_traced_one_way() -> None:
    """A loss or a change that is read decides nothing about shapes: no hint is wanted."""
    found = stoker.plan(**job_of("branches_on_values"), on="h100")  # type: ignore[arg-type]
    assert found.chosen.plan.micro_batch == 20


def test_a_model_that_names_the_cpu_is_refused_on_a_gpu() -> None:
    """A tensor made on the CPU in the forward pass would fail on every GPU; the line is named."""
    with pytest.raises(BadJob, match=r"names_its_device\.py:\d+"):
        stoker.plan(**job_of("names_its_device"), on="h100")  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_batch_that_fits_nowhere_is_told_with_the_groups_that_would() -> None:
    """The command ends with 3: what is needed, what is there, the largest GPU, and a change of the job that holds."""
    command = ("plan", JOBS / "huge_batch.py", "--on", "h100", "--set", "batch=1000000", "--set", "width=65536")
    ended = stoker_here(*command)
    assert (ended.code, ended.out) == (3, "")
    assert "a micro-batch of 1000000 (samples are coupled in groups of 1000000) needs about 489.2 GiB" in ended.err
    assert "has 79.6 GiB" in ended.err
    assert "No one GPU of the catalogue does it; the largest is" in ended.err
    change = re.search(r"with Job\(coupling_group=(\d+)\) it needs about ([\d.]+) GiB of h100", ended.err)
    assert change is not None
    assert float(change[2]) < 79.6
    changed = stoker_here(*command, "--set", f"coupling_group={change[1]}")
    assert changed.code == 0
    assert all(line.startswith("Working out what the job needs") for line in changed.err.splitlines()), changed.err


@pytest.mark.slow  # that the smallest is found, and looked for among few, is tested below
def test_a_model_that_fits_on_larger_devices_is_told_the_smallest() -> None:
    """Here, and on a device that is too small; weights of 37 GiB are made nowhere."""
    ended = stoker_here("plan", JOBS / "huge_model.py", "--set", "width=100000", "--on", "l4,t4")
    assert ended.code == 3
    for name in ("l4", "t4"):
        assert re.search(name + r": a micro-batch of 1, with optimiser .*on the host, needs about", ended.err)
    assert "The smallest GPU that does it is" in ended.err


def test_what_is_too_large_for_several_devices_is_told_to_take_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the largest one of the catalogue, for which the undivided model would be traced."""
    monkeypatch.setattr(decision, "_larger_device", None)
    ended = stoker_here("plan", JOBS / "huge_model.py", "--on", "t4,2xl4")
    assert ended.code == 3
    assert "2xl4: on 2xl4 under any layout: " in ended.err
    assert "Take more devices, or ones with more memory." in ended.err


def test_only_gpus_that_hold_the_weights_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of 37 GiB, 19 in bf16, on a GPU of 16 GiB need no trace."""
    looked_at, least = list[str](), decision._least

    def noted(planner_: planner.Planner, place: Place) -> Plan | None:
        looked_at.append(place.name)
        return least(planner_, place)

    monkeypatch.setattr(decision, "_least", noted)
    with pytest.raises(DoesNotFit, match="needs about") as caught:
        stoker.plan(**job_of("huge_model", width="100000"), on="t4")  # type: ignore[arg-type]
    assert "The smallest GPU that does it is" in (caught.value.remedy or "")
    small = {place.name for place in planned_devices("all", ()) if place.device.memory_bytes < 18 * GIB}
    assert small & set(looked_at) == {"t4"}


@pytest.mark.parametrize("verb", [stoker.plan, stoker.profile])
def test_a_users_generators_go_on_as_if_nothing_was_planned(verb: Callable[..., object]) -> None:
    """Each sample that is fetched seeds them: a split of the user's would be the same for every seed."""

    class Points(Dataset[tuple[torch.Tensor, int]]):
        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            return torch.randn(6), index % 2

    def drawn(seed: int) -> list[float]:
        torch.manual_seed(seed)
        random.seed(seed)
        return [float(torch.rand(())), random.random()]

    expected = [*drawn(1), float(torch.rand(())), random.random()]
    begun = drawn(1)
    verb(blobs_job(data=Points(), valid=None, test=None), on="h100")
    assert [*begun, float(torch.rand(())), random.random()] == expected


def test_a_given_plan_is_compared_on_the_devices_that_it_suits(nothing_is_run: None) -> None:
    """The others are named with the reason; a word that suits none is an error, said once."""
    found = stoker.plan(blobs_job(model=wide_net), on="t4,l4,2xl4", plan="precision=bf16")
    assert [one.device for one in found.candidates] == ["l4"]
    left_out = [line for line in found.explanation if "is left out" in line]
    assert left_out[0] == ("t4 is left out: the plan is not legal: t4 has no bf16; precision may be fp32")
    assert left_out[1] == "2xl4 is left out: the plan is for one process, but --on 2xl4 means 2"
    with pytest.raises(BadJob) as caught:
        stoker.plan(blobs_job(model=wide_net), on="t4,l4", plan="micro_bath=4")
    assert caught.value.message == "a plan has no 'micro_bath'"


def test_a_plan_for_fewer_devices_is_told_their_name_elsewhere(nothing_is_run: None) -> None:
    """`4xhere` would be this machine's processes."""
    with pytest.raises(BadJob, match=r"2 processes .* but --on 4xl4 means 4") as caught:
        stoker.plan(blobs_job(model=wide_net), on="4xl4", plan="shards=2")
    assert caught.value.remedy == "Use --on 2xl4, or another plan."


@pytest.mark.slow
def test_weights_that_fit_nowhere_are_told_in_one_sentence() -> None:
    """Of many devices only the largest is reported."""
    ended = stoker_here("plan", JOBS / "huge_model.py", "--on", "all")
    assert ended.code == 3
    assert "devices is large enough. The largest, " in ended.err
    assert ended.err.count("needs about") == 1


def test_a_device_that_is_too_small_beside_one_that_is_not_is_rejected() -> None:
    """With the plan that needs the least, and how much that is; a line says so without being asked."""
    found = stoker.plan(**job_of("huge_model", width="60000"), on="t4,b200")  # type: ignore[arg-type]
    (line,) = [one for one in found.explanation if one.startswith("it does not fit on t4: a micro-batch of 1")]
    assert "needs about" in line
    assert [one.device for one in found.candidates] == ["b200"]
    too_small = [one for one in found.rejected if one.device == "t4"]
    assert len(too_small) == 1
    assert "needs about" in too_small[0].reason
    assert too_small[0].plan.micro_batch == 1


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_is_run")
def test_the_8b_example_is_planned_where_it_cannot_be_run() -> None:
    """Eight billion weights under AdamW take 16 bytes each: an H200 with 139 GiB holds them, an H100 on its host."""
    job, entry = load_job(EXAMPLES / "llama8b.py", {})
    found = stoker.plan(job, on="h100,h200,b200", entry=entry)
    offloaded = {one.device: one.plan.is_offloaded for one in found.candidates}
    assert offloaded == {"b200": False, "h100": True, "h200": False}
    assert_is_forecast(found.chosen)
    state_bytes = 16 * 8.03e9
    peak = found.chosen.forecast.peak_bytes.value
    assert state_bytes < peak < 1.5 * state_bytes
    tokens, step_s = 32 * 2048, found.chosen.forecast.step_s.value
    flops = 6 * 8.03e9 * tokens
    assert flops / step_s < 2.3e15, "more than the device's dense bf16 rate"


def test_what_is_quick_here_is_told_to_be_enough() -> None:
    """A run of seconds: nothing to rent."""
    found = stoker.plan(blobs_job())
    assert found.advice.startswith("What is here is enough: done in ")


def test_what_takes_long_here_is_told_what_to_rent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred thousand epochs: the cheapest device that is much faster, and what it costs there."""
    monkeypatch.setattr(planner, "TRIAL_S", 0.05)
    monkeypatch.setattr(decision, "planned_devices", few_devices)
    job = blobs_job(model=wide_net, data=blobs(256), batch=256, valid=None, test=None, until=stoker.epochs(1_000_000))
    advice = stoker.plan(job).advice
    assert re.fullmatch(r"It runs here in .+; l4 at .+ takes .+ for \$[\d.,]+(, or h100 at .+)?\.", advice), advice


def test_nothing_is_tried_that_is_forecast_to_need_more_memory_than_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials are free here and all plans seem equal, so that every plan that was not ranked is asked for as well."""
    tried: list[Plan] = []

    def free(_job: stoker.Job, plan: Plan, *_: object, **__: object) -> Measurement:
        tried.append(plan)
        return Measurement(
            plan=plan,
            samples_per_update=2**14,
            update_s=(1.0,) * 3,
            evaluate_s_per_sample=0.0,
            peak_bytes=2**20,
            state_bytes=0,
            took_s=0.0,
            gradient_error=0.01,
        )

    monkeypatch.setattr("stoker.planning.planner.try_plan", free)
    monkeypatch.setattr(planner, "resident_bytes", lambda: 500 * 10**6)
    job = blobs_job(
        model=wide_net,
        data=blobs(2**14),
        batch=2**14,
        loss=stoker.Objective("cross_entropy", scope="batch"),
        valid=None,
    )
    known, [place] = planner.Planner(resolve_job(job)), planned_devices("cpu", (attached_cpu(),))
    forecasts, facts = known.forecasts(place), known.profile("cpu")
    least = least_demanding(facts, place.device, forecasts)
    assert least is not None
    limit = 1.2 * forecasts.needed_bytes(least)
    found = stoker.plan(job, on="cpu", memory=limit)
    assert tried
    assert all(forecasts.needed_bytes(plan) <= limit for plan in tried)
    assert any("it is forecast to need" in one.reason for one in found.rejected)


@pytest.mark.usefixtures("nothing_is_run")
def test_a_limit_that_nothing_keeps_is_told_as_one() -> None:
    """It is not what the device has; the first thing that would help is more of it, the next a device as it is."""
    with pytest.raises(
        DoesNotFit, match=r"l4: a micro-batch of 1 needs .*; of NVIDIA L4 95\.4 MiB may be used"
    ) as error:
        stoker.plan(blobs_job(), on="l4", memory="100MB")
    assert str(error.value.remedy).startswith("Allow more memory (--memory). The smallest GPU that does it is ")


@pytest.mark.slow  # plans of a model of many blocks
def test_a_limit_of_memory_is_kept_by_checkpointing_as_many_blocks_as_it_takes() -> None:
    """The less memory may be used, the more is computed twice, selectively at first; each plan keeps to its limit."""
    job = job_of("gpt_in_one_group")  # whose traces are kept from one call to the next
    ways = []
    for limit in ("1660MiB", "1360MiB"):
        chosen = stoker.plan(**job, on="l4", memory=limit).chosen
        assert chosen.forecast.reserved_bytes is not None
        assert chosen.forecast.reserved_bytes.value <= parse_memory(limit)
        ways.append((chosen.plan.checkpointed_blocks, chosen.plan.checkpointing))
    assert ways == [(4, "selective"), (3, "full")]

"""Forecasts of updates whose optimiser is on the host, and when the planner considers them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest

import stoker
from stoker.devices import planned_devices
from stoker.errors import BadJob, DoesNotFit
from stoker.loading.datasets import datasets_of
from stoker.planning.decision import plan as planned
from stoker.planning.model import optimizer_offload
from stoker.planning.model.host import LINK_SHARE, host_problem, link_rate
from stoker.planning.model.memory import forecast_memory
from stoker.planning.model.optimizer_offload import (
    HostWork,
    host_work,
    memory_rate,
    pinned_bytes,
    with_host,
    with_offload,
)
from stoker.planning.model.search_space import offloaded_settings, trace_settings
from stoker.planning.model.update_time import UpdateTime
from stoker.planning.pinned_plan import plan_of, problem_with, words_of
from stoker.planning.plan_ranking import rank
from stoker.profiling.tracing.update import trace_update
from stoker.records import Device, Estimate, Forecast, Hardware, Plan, Profile, Trace, TraceSettings
from stoker.records.plan import PINNED_BYTES, STAGED_BYTES
from tests.planning.trials import CPU, GPU, forecast_of, profile
from tests.stepping.driving import SEPARABLE
from tests.stepping.layouts.conformance import few_bits_job

SMALL = dataclasses.replace(GPU, model="a small GPU", memory_bytes=24 * 2**30)


@functools.cache
def traced(*, is_bf16: bool = False, parts: int = 1) -> Trace:
    """An update on the device."""
    job = few_bits_job(128)
    settings = TraceSettings(
        target="cuda",
        capability="8.0",
        micro_batch=2 // parts,
        parts=parts,
        precision="bf16" if is_bf16 else "fp32",
        gathered_in="bf16" if is_bf16 else None,
        optimizer_implementation="fused",
    )
    return trace_update(job, datasets_of(job), SEPARABLE, settings)


def held(trace: Trace, category: str) -> int:
    """Bytes of storages that live before an update."""
    return sum(one.num_bytes for one in trace.storages if one.category == category and one.born < 0)


@pytest.mark.parametrize("is_bf16", [False, True])
def test_the_device_holds_weights_alone_between_updates(is_bf16: bool) -> None:
    """In bf16 half of the masters, which the host holds, with two moments as large."""
    trace = traced(is_bf16=is_bf16)
    offloaded, work = with_offload(trace, "state"), host_work(trace)
    assert held(offloaded, "optimizer state") == 0
    assert held(offloaded, "parameter") == pytest.approx(work.weights)
    assert work.weights == work.masters / (2 if is_bf16 else 1)
    assert work.state == pytest.approx(2 * work.masters, rel=0.01)
    assert work.gradients == pytest.approx(work.weights)
    assert work.optimizer == pytest.approx(7 * work.masters, rel=0.01)
    assert work.kept_bytes == pytest.approx(2 * (work.masters + work.state) + work.buffers)
    # One piece of pinned memory, in fp32 with the masters, and gradients while they are in the masters' dtype.
    assert work.buffers == pytest.approx(PINNED_BYTES + STAGED_BYTES - (0 if is_bf16 else work.masters))


def test_pinned_memory_comes_in_pieces_of_a_power_of_two() -> None:
    """Small tensors share a piece of 256 MiB; one that its rest does not hold begins another; large ones round up."""
    assert pinned_bytes([100, 100]) == PINNED_BYTES
    assert pinned_bytes([PINNED_BYTES - 64, 65]) == 2 * PINNED_BYTES
    assert pinned_bytes([PINNED_BYTES // 2 + 64] * 4) == 4 * PINNED_BYTES
    assert pinned_bytes([PINNED_BYTES + 1, 64]) == 2 * PINNED_BYTES + PINNED_BYTES  # nothing is left of the first


def test_gradients_die_when_they_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The less may be on its way, the lower the peak; summed on the device they stay, on the host they go."""
    peaks = {}
    for most in (2**10, 2**28):
        monkeypatch.setattr(optimizer_offload, "IN_FLIGHT_BYTES", most)
        peaks[most] = forecast_memory(with_offload(traced(), "state")).allocated
    gradients = host_work(traced()).gradients
    assert 0.5 * gradients < peaks[2**28] - peaks[2**10] < gradients
    monkeypatch.setattr(optimizer_offload, "IN_FLIGHT_BYTES", 2**10)
    monkeypatch.setattr(optimizer_offload, "PIECE", 2**8)
    summed = {
        offload: forecast_memory(with_offload(traced(parts=2), offload)).allocated  # type: ignore[arg-type]
        for offload in ("state", "gradients")
    }
    assert summed["state"] - summed["gradients"] > 0.5 * gradients


def time_of(backward_s: float) -> UpdateTime:
    """An update of a second."""
    step = Estimate(value=1.0, low=0.9, high=1.1, unit="s", basis="datasheet")
    return UpdateTime(step_s=step, forward_s=0.3, compile_s=None, power_w=None, shares=(), backward_s=backward_s)


def machine(**known: Any) -> Hardware:
    """A GPU at a link of 10 GB/s, and memory of 100, sustained."""
    hardware = Hardware(device=SMALL, dense_flops={}, bandwidth_bytes_per_s=1e12, idle_w=20.0)
    printed = {
        "host_link_bytes_per_s": 10e9 / LINK_SHARE,
        "host_bandwidth_bytes_per_s": 100e9 / optimizer_offload.MEMORY_SHARE,
    }
    return dataclasses.replace(hardware, **printed | known)


WORK = HostWork(masters=4e9, state=8e9, gradients=2e9, weights=2e9, optimizer=28e9, sums=4e9, buffers=2e9)
"""A billion parameters, in bf16 on the device."""


def test_an_update_waits_for_what_overlaps_with_nothing() -> None:
    """Copies of 2 GB in 0.2 s, hidden by a longer backward pass; 40 GB of memory in 0.4 s, longer than the way back."""
    assert with_host(time_of(0.5), WORK, machine(), "state", 1).step_s.value == pytest.approx(1.4)
    assert with_host(time_of(0.05), WORK, machine(), "state", 1).step_s.value == pytest.approx(1.4 + 0.15)
    slow_link = machine(host_link_bytes_per_s=1e9 / LINK_SHARE)
    assert with_host(time_of(2.0), WORK, slow_link, "state", 1).step_s.value == pytest.approx(1.0 + 2.0)
    # Four micro-batches summed on the host: the first sends 0.2 s, the others bring 4 GB back as well, 0.6 s.
    sent = with_host(time_of(0.4), WORK, machine(), "gradients", 4)
    assert sent.step_s.value == pytest.approx(1.4 + 0.1 + 3 * 0.5)
    assert [share.value for share in sent.shares] == pytest.approx([1.6, 0.4])
    known = with_host(time_of(0.5), WORK, machine(host_memory_bytes=2**40), "state", 1)
    assumed = with_host(time_of(0.5), WORK, machine(), "state", 1)
    assert known.step_s.high < assumed.step_s.high


def test_the_hosts_memory_is_a_limit_where_it_is_known() -> None:
    """12 bytes a parameter twice, for checkpoints, and 2 of gradients."""
    needed = WORK.kept_bytes
    assert host_problem(needed, "it all", machine()) is None
    assert host_problem(needed, "it all", machine(host_memory_bytes=2**36)) is None
    problem = host_problem(needed, "it all", machine(host_memory_bytes=2**34))
    assert problem == "it all, need 24.2 GiB of the host's memory, and it has 16.0 GiB"
    unknown = dataclasses.replace(machine(), host_link_bytes_per_s=None, host_bandwidth_bytes_per_s=None)
    assert link_rate(unknown) == pytest.approx(0.85 * 15.75e9)
    assert memory_rate(unknown) == pytest.approx(0.6 * 89.6e9)


class Sixteen:
    """Forecasts of a model whose state takes most: 16 bytes a parameter on the device, offloaded 2 or 6, 4 in fp32."""

    def __init__(self, facts: Profile, device: Device) -> None:
        self.facts, self.device, self.asked = facts, device, list[Plan]()

    def needed_bytes(self, plan: Plan) -> float:
        """Weights, gradients, state."""
        is_summed = plan.micro_batch < self.facts.batch and plan.optimizer_offload == "state"
        each = {"none": 16.0}.get(plan.optimizer_offload, 2.0 if plan.precision == "bf16" else 4.0) + 4 * is_summed
        return each * self.facts.parameters + 1e7 * plan.micro_batch

    def probability_it_fits(self, plan: Plan) -> float:
        """0 or 1."""
        self.asked.append(plan)
        return float(self.needed_bytes(plan) <= self.device.memory_bytes)

    def fits(self, plan: Plan, probability: float) -> bool:
        """As `probability_it_fits`."""
        return self.probability_it_fits(plan) >= probability

    def forecast(self, plan: Plan) -> Forecast:
        """Sending every micro-batch takes longest."""
        pace = 1 / plan.micro_batch + {"none": 0.0, "state": 1.0, "gradients": 3.0}[plan.optimizer_offload]
        return forecast_of(plan, pace_s=pace, peak_bytes=self.needed_bytes(plan))


def ranked(parameters: float, **facts: Any) -> tuple[tuple[Any, ...], Sixteen]:
    """Candidates on a GPU of 24 GiB, and what was asked."""
    about = profile(parameters=int(parameters), parameter_bytes=int(4 * parameters), has_convolutions=False, **facts)
    forecasts = Sixteen(about, SMALL)
    return rank(about, SMALL, forecasts, name="it", is_here=False), forecasts


@pytest.mark.parametrize(("parameters", "offload"), [(1e9, "none"), (3e9, "state"), (7e9, "gradients")])
def test_it_is_taken_only_where_nothing_faster_fits(parameters: float, offload: str) -> None:
    """A billion parameters fit without, and it is not even looked at; 18 GB with sums on the device; 14 without."""
    candidates, forecasts = ranked(parameters)
    assert (candidates[0].plan.optimizer_offload, candidates[0].plan.precision) == (offload, "bf16")
    assert any(plan.is_offloaded for plan in forecasts.asked) is (offload != "none")
    assert not candidates[0].plan.compile


def test_what_does_not_fit_with_it_says_so() -> None:
    """16 billion parameters in bf16 take more than 24 GiB; a job that cannot offload needs 16 bytes each."""
    with pytest.raises(DoesNotFit, match=r"with optimiser and gradients on the host, needs about 29\.8 GiB"):
        ranked(16e9)
    with pytest.raises(DoesNotFit, match=r"needs about 47\.7 GiB"):
        ranked(3.2e9, offload_problem="it keeps its state")


def test_weights_that_cannot_be_bf16_alone_fit_nowhere(monkeypatch) -> None:
    """As those of several dtypes: that is no error of the job, which may fit elsewhere."""

    def refused(_: Sixteen, plan: Plan) -> float:
        if plan.is_offloaded:
            raise BadJob("weights of several dtypes")
        return 64 * 2.0**30

    monkeypatch.setattr(Sixteen, "needed_bytes", refused)
    with pytest.raises(DoesNotFit, match=r"needs about 64\.0 GiB"):
        ranked(3e9)


def test_with_one_micro_batch_both_kinds_of_offload_have_one_trace() -> None:
    """There is nothing to sum; with several they differ."""
    facts = profile(has_convolutions=False)
    plans = [Plan(device="cuda:0", micro_batch=facts.batch, optimizer_offload=one) for one in ("state", "gradients")]
    whole, other = (trace_settings(plan, facts, "8.9") for plan in plans)
    assert whole == other
    parts = [trace_settings(dataclasses.replace(plan, micro_batch=1), facts, "8.9") for plan in plans]
    assert parts[0] != parts[1]


def test_a_cpu_has_nowhere_to_offload_to() -> None:
    """Elsewhere it is considered in one precision: the fastest, but for fp16."""
    assert not list(offloaded_settings(profile(), CPU, "optimizer"))
    assert not list(offloaded_settings(profile(offload_problem="why not"), GPU, "optimizer"))
    old = dataclasses.replace(GPU, fast_dtypes=("fp32", "fp16"))
    for device, precision in ((GPU, "bf16"), (old, "fp32")):
        plans = list(offloaded_settings(profile(numerics=("fp16",)), device, "optimizer"))
        assert [(plan.optimizer_offload, plan.precision) for plan in plans] == [
            ("state", precision),
            ("gradients", precision),
        ]


def test_words_pin_it_and_what_cannot_be_is_refused() -> None:
    """With the choices, or the reason."""
    (place,) = planned_devices("rtx-4090", ())
    facts = profile(has_convolutions=False)
    plan = plan_of(words_of(("optimizer_offload=state micro_batch=4",)), place, facts)
    assert (plan.optimizer_offload, plan.optimizer_implementation) == ("state", "fused")
    assert trace_settings(plan, facts, "8.9").gathered_in == "bf16"
    assert problem_with(plan, facts, place.device, facts) is None
    reason = problem_with(plan, profile(offload_problem="it keeps its state"), place.device, facts)
    assert reason == "the plan has optimizer_offload, and it keeps its state"
    for words, why in {
        "optimizer_offload=weights": "optimizer_offload is one of none, state, gradients, not 'weights'",
        "optimizer_offload=state shards=2": "one process, and the layout is 2 shards",
        "optimizer_offload=state compile=true": "these are compiled",
    }.items():
        with pytest.raises(BadJob, match=why):
            plan_of(words_of((words,)), place, facts)
    with pytest.raises(BadJob, match="the plan's device is cpu"):
        plan_of(words_of(("optimizer_offload=state",)), planned_devices("xeon-8480", ())[0], facts)


def llama(layers: int) -> stoker.Job:
    """A Llama of so many blocks of 218 million parameters, and 262 million outside of them; 4,096 tokens an update."""
    train, _ = stoker.data.python_source(context=1024)
    return stoker.Job(
        model=lambda: stoker.zoo.Llama(layers=layers, context=1024, vocab=32000),
        data=train,
        loss="token_cross_entropy",
        optimizer=stoker.AdamW(lr=1e-4),
        batch=4,
        until=stoker.updates(100),
        clip_norm=1.0,
    )


@pytest.mark.slow
def test_one_gpu_of_24_gb_trains_7_billion_parameters_with_it_and_none_where_they_fit() -> None:
    """And the plan says in a sentence why."""
    large = planned(llama(31), on="rtx-4090")
    assert large.chosen.plan.is_offloaded
    assert large.chosen.plan.precision == "bf16"
    (line,) = [line for line in large.explanation if line.startswith("the optimiser is on the host")]
    assert "because nothing faster fits: with its state on the device an update needs" in line
    assert "of the host's memory, whose size is not known" in line
    assert not planned(llama(2), on="rtx-4090").chosen.plan.is_offloaded

"""Forecasts of updates whose blocks' inputs are on the host, and when the planner considers them."""

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
from stoker.planning.model.activation_offload import (
    WAITING,
    ActivationWork,
    InputCopy,
    activation_work,
    with_activations_offloaded,
    with_copies,
)
from stoker.planning.model.host import LINK_SHARE
from stoker.planning.model.memory import forecast_memory
from stoker.planning.model.search_space import OFFLOADED, offloaded_settings, saving_memory
from stoker.planning.model.update_time import UpdateTime
from stoker.planning.pinned_plan import plan_of, words_of
from stoker.planning.plan_ranking import least_demanding, rank
from stoker.profiling.job_profile import block_names
from stoker.profiling.tracing.update import trace_update
from stoker.records import Device, Estimate, Forecast, Hardware, Plan, Profile, Trace, TraceSettings
from stoker.records.plan import OutOfMemory
from tests.planning.trials import CPU, GPU, forecast_of, profile
from tests.stepping.driving import SEPARABLE
from tests.stepping.residual_stack import stack_job

SMALL = dataclasses.replace(GPU, model="a small GPU", memory_bytes=24 * 2**30)
INPUT_BYTES = 4096 * 64 * 4
"""What a block of `traced` passes on in a micro-batch [bytes]."""


@functools.cache
def traced(checkpointed: int = 6, parts: int = 1) -> Trace:
    """An update of six blocks."""
    job = stack_job(6, 4096 * parts)
    settings = TraceSettings(
        target="cuda",
        capability="8.0",
        micro_batch=4096,
        parts=parts,
        optimizer_implementation="fused",
        checkpointed_blocks=checkpointed,
    )
    return trace_update(job, datasets_of(job), SEPARABLE, settings)


BLOCKS = tuple(f"blocks.{number}" for number in range(6))


def test_blocks_are_known_by_name() -> None:
    """In their order."""
    assert block_names(stack_job(6).model()) == BLOCKS  # type: ignore[operator]


@pytest.mark.parametrize("checkpointed", [2, 4, 6])
def test_inputs_of_all_checkpointed_blocks_but_the_last_are_sent(checkpointed: int) -> None:
    """Of equal blocks equal ones, each with a sixth of the passes to hide in."""
    work = activation_work(traced(checkpointed), BLOCKS)
    assert [copy.num_bytes for copy in work.copies] == [INPUT_BYTES] * (checkpointed - 1)
    assert work.sent_bytes == (checkpointed - 1) * INPUT_BYTES
    assert [copy.forward_share for copy in work.copies] == pytest.approx([1 / 6] * (checkpointed - 1), rel=0.03)
    # Others compute four products backward; checkpointed ones the first of their two again, for what the second needs.
    each = 5 / (5 * checkpointed + 4 * (6 - checkpointed))
    assert [copy.backward_share for copy in work.copies] == pytest.approx([each] * (checkpointed - 1), rel=0.04)


def test_pinned_memory_is_a_power_of_two() -> None:
    """For each input, as PyTorch's allocator has it."""
    copies = tuple(InputCopy(sizes, 0.5, 0.5) for sizes in ((1000,), (1024, 1025)))
    assert ActivationWork(copies).kept_bytes == 1024 + 1024 + 2048


@pytest.mark.parametrize("parts", [1, 2])
def test_an_input_lives_twice(parts: int) -> None:
    """Until the next block begins, and from when that one is computed again: four fewer at the peak, of six blocks."""
    trace = traced(6, parts)
    offloaded = with_activations_offloaded(trace, BLOCKS)
    assert len(offloaded.storages) == len(trace.storages) + 5 * parts
    assert offloaded.settings.activation_offload
    lives: dict[int, int] = {}
    for event in offloaded.events:
        index = abs(event) - 1
        lives[index] = lives.get(index, 0) + (1 if event > 0 else -1)
        assert lives[index] in (0, 1), "each is born once, and dies after that"
    assert {index for index, count in lives.items() if count} == {
        index for index, storage in enumerate(offloaded.storages) if storage.died is None
    }
    # In the last block's part of the backward pass, its own input and the one before are there.
    saved = forecast_memory(trace).allocated - forecast_memory(offloaded).allocated
    assert 0.9 * 4 * INPUT_BYTES < saved <= 4 * INPUT_BYTES  # later there are gradients of more blocks


def test_without_checkpointed_blocks_or_names_nothing_is_sent() -> None:
    """Such plans are refused before; the forecast would be that of the plan without."""
    assert not activation_work(traced(6), ()).copies
    assert with_activations_offloaded(traced(6), ()).storages == traced(6).storages


def machine(**known: Any) -> Hardware:
    """A GPU at a sustained link of 10 GB/s."""
    hardware = Hardware(device=SMALL, dense_flops={}, bandwidth_bytes_per_s=1e12, idle_w=20.0)
    return dataclasses.replace(hardware, **{"host_link_bytes_per_s": 10e9 / LINK_SHARE} | known)


def test_an_update_waits_for_copies_that_take_longer_than_blocks() -> None:
    """Ten blocks of 0.1 s forward and 0.3 s backward in two micro-batches: 1 GB is hidden, of 2 GB a half forward."""
    step = Estimate(value=8.0, low=7.0, high=9.0, unit="s", basis="datasheet")
    power = Estimate(value=300.0, low=250.0, high=350.0, unit="W", basis="datasheet")
    time = UpdateTime(step_s=step, forward_s=2.0, compile_s=None, power_w=power, shares=(), backward_s=6.0)

    def of(num_bytes: float, **known: Any) -> UpdateTime:
        work = ActivationWork((InputCopy((int(num_bytes),), 0.1, 0.1),) * 9)
        return with_copies(time, work, machine(**known), 2)

    assert of(1e9).step_s.value == pytest.approx(8.0)
    assert not of(1e9).shares
    assert of(2e9).step_s.value == pytest.approx(8.0 + 2 * 9 * 0.1)
    assert of(4e9).step_s.value == pytest.approx(8.0 + 2 * 9 * (0.3 + 0.1))
    (share,) = of(2e9).shares
    assert (share.what, share.value) == (WAITING, pytest.approx(1.8))
    assert of(2e9).power_w.value == pytest.approx((300 * 8 + 20 * 1.8) / 9.8)  # type: ignore[union-attr]
    # What is hidden at the usual rate shows at the low end of the link's.
    assert of(1e9).step_s.high > step.high
    assert of(1e9).step_s.low == pytest.approx(step.low)
    assert of(1e9, host_memory_bytes=2**40).step_s.high < of(1e9).step_s.high


class Stream:
    """Forecasts of a model of a billion parameters that passes on 100 MB a sample and block."""

    def __init__(self, facts: Profile, device: Device) -> None:
        self.facts, self.device, self.asked = facts, device, list[Plan]()

    def needed_bytes(self, plan: Plan) -> float:
        """State, and inputs of blocks, or all that they keep."""
        kept = 2 if plan.activation_offload else self.facts.num_blocks
        each = 1e8 * kept * (1 if plan.checkpointed_blocks == self.facts.num_blocks else 20)
        return (4 if plan.is_offloaded else 16) * self.facts.parameters + each * plan.micro_batch

    def probability_it_fits(self, plan: Plan) -> float:
        """0 or 1."""
        self.asked.append(plan)
        return float(self.needed_bytes(plan) <= self.device.memory_bytes)

    def fits(self, plan: Plan, probability: float) -> bool:
        """As `probability_it_fits`."""
        return self.probability_it_fits(plan) >= probability

    def forecast(self, plan: Plan) -> Forecast:
        """The optimiser on the host takes longest."""
        pace = 1 / plan.micro_batch + 5 * plan.is_offloaded
        return forecast_of(plan, pace_s=pace, peak_bytes=self.needed_bytes(plan))


def ranked(parameters: float, blocks: int, **facts: Any) -> tuple[tuple[Any, ...], Stream]:
    """Candidates on a GPU of 24 GiB, and what was asked."""
    about = profile(
        parameters=int(parameters),
        parameter_bytes=int(4 * parameters),
        has_convolutions=False,
        num_blocks=blocks,
        **facts,
    )
    forecasts = Stream(about, SMALL)
    return rank(about, SMALL, forecasts, name="it", is_here=False), forecasts


@pytest.mark.parametrize(
    ("parameters", "blocks", "activations", "optimizer"),
    [(1e9, 60, False, False), (1e9, 120, True, False), (3e9, 60, False, True), (4e9, 120, True, True)],
)
def test_it_is_taken_where_nothing_else_fits_and_before_the_optimiser(
    parameters: float, blocks: int, activations: bool, optimizer: bool
) -> None:
    """16 GB of state and 6 of inputs fit; with 12 of inputs these go; of 48 GB of state that goes; or both."""
    candidates, forecasts = ranked(parameters, blocks)
    best = candidates[0].plan
    assert (best.activation_offload, best.is_offloaded) == (activations, optimizer)
    assert any(plan.activation_offload for plan in forecasts.asked) is (activations or optimizer)
    if activations:
        assert best.checkpointed_blocks == blocks
        assert "inputs of blocks on the host" in best.in_words()


def test_several_processes_keep_all_on_their_devices() -> None:
    """And the error has the least demanding of those plans."""
    with pytest.raises(DoesNotFit, match=r"all 120 blocks checkpointed needs about 26\.1 GiB"):
        ranked(1e9, 120, can_offload=False)
    with pytest.raises(DoesNotFit, match="with optimiser and inputs of blocks on the host, needs about"):
        ranked(8e9, 120)


def test_the_least_demanding_plan_offloads_what_saves_a_tenth() -> None:
    """Of large inputs these, where it can the optimiser, too; a few blocks are left where they are."""
    for blocks, problem, activations, optimizer in (
        (120, "it keeps its state", True, False),
        (120, None, True, True),
        (3, None, False, True),
        (2, None, False, True),
    ):
        about = profile(parameters=10**9, has_convolutions=False, num_blocks=blocks, offload_problem=problem)
        least = least_demanding(about, SMALL, Stream(about, SMALL))
        assert least is not None
        assert (least.activation_offload, least.is_offloaded) == (activations, optimizer), blocks


def test_what_is_considered_is_legal() -> None:
    """In one precision, with all blocks checkpointed; none on a CPU, or for models of few blocks."""
    facts = profile(num_blocks=12, numerics=("fp16", "8bit-states"))
    for what in OFFLOADED:
        assert not list(offloaded_settings(facts, CPU, what))
        plans = list(offloaded_settings(facts, GPU, what))
        assert {plan.precision for plan in plans} == {"bf16"}
        assert {plan.activation_offload for plan in plans} == {what != "optimizer"}
        assert {plan.is_offloaded for plan in plans} == {what != "activations"}
        for plan in plans:
            ways = list(saving_memory(plan, facts))
            assert ways
            assert {way.activation_offload for way in ways} == {plan.activation_offload}
    assert not list(offloaded_settings(profile(num_blocks=2), GPU, "activations"))


def test_words_pin_it_and_what_cannot_be_is_refused() -> None:
    """All blocks are checkpointed where their number is left out; else the reason says what would be legal."""
    (place,) = planned_devices("h100", ())
    facts = profile(has_convolutions=False, num_blocks=12)
    plan = plan_of(words_of(("activation_offload=true micro_batch=4",)), place, facts)
    assert (plan.activation_offload, plan.checkpointed_blocks) == (True, 12)
    plan = plan_of(words_of(("activation_offload=true checkpointed_blocks=5 optimizer_offload=state",)), place, facts)
    assert (plan.activation_offload, plan.checkpointed_blocks, plan.optimizer_offload) == (True, 5, "state")
    for words, why in {
        "activation_offload=some": "activation_offload is true or false, not 'some'",
        "activation_offload=true shards=2": "one process, and the layout is 2 shards",
        "activation_offload=true checkpointed_blocks=1": "checkpointed_blocks of 2 or more, and this plan has 1",
        "activation_offload=true checkpointing=selective": "checkpointing full",
        "activation_offload=true compile=true": "not compiled",
    }.items():
        with pytest.raises(BadJob, match=why):
            plan_of(words_of((words,)), place, facts)
    with pytest.raises(BadJob, match="the plan's device is cpu"):
        plan_of(words_of(("activation_offload=true",)), planned_devices("xeon-8480", ())[0], facts)


def test_a_plan_that_ran_out_of_memory_with_it_rules_out_the_one_without() -> None:
    """Not the other way round."""
    plain = Plan(device="cuda:0", micro_batch=4, checkpointed_blocks=12)
    offloaded = dataclasses.replace(plain, activation_offload=True)

    def failed(plan: Plan) -> OutOfMemory:
        return OutOfMemory(device_model="H200", torch_version="2", job="j", plan=plan, run="r", at="2026-01-01")

    assert failed(offloaded).rules_out(plain)
    assert not failed(plain).rules_out(offloaded)


def long_llama(context: int) -> stoker.Job:
    """A Llama of 32 blocks of width 1,024 on one sample of so many tokens."""
    train, _ = stoker.data.python_source(context=context)
    return stoker.Job(
        model=lambda: stoker.zoo.Llama(
            layers=32, width=1024, heads=8, kv_heads=8, hidden=1024, context=context, vocab=1024
        ),
        data=train,
        loss="token_cross_entropy",
        optimizer=stoker.AdamW(lr=1e-4),
        batch=1,
        until=stoker.updates(10),
    )


@pytest.mark.slow
def test_one_gpu_trains_on_longer_samples_with_it() -> None:
    """And the plan says in a sentence why; half the tokens fit without."""
    long = planned(long_llama(2**17), on="rtx-4090")
    assert long.chosen.plan.activation_offload
    assert not long.chosen.plan.is_offloaded
    (line,) = [line for line in long.explanation if line.startswith("inputs of 31 of 32 checkpointed blocks")]
    assert "are on the host because nothing faster fits: with all of them on the device an update needs" in line
    assert not planned(long_llama(2**15), on="rtx-4090").chosen.plan.uses_host_memory

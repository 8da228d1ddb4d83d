"""The legal plans of a job on a device."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.planning.model.search_space import (
    execution_settings,
    kernel_generation,
    precisions,
    saving_memory,
    trace_settings,
)
from stoker.records import Coupling, Plan
from tests.planning.trials import CPU, GPU, NORMS, OLD_CPU, profile

PLAN = Plan(device="cpu", micro_batch=64)


def test_the_first_settings_are_the_likeliest() -> None:
    """The device's fast precision, channels-last for convolutions, all cores, a fused optimiser."""
    first = next(execution_settings(profile(), CPU))
    assert first.in_words() == "bf16 · micro-batch 1 · channels-last · 4 threads · memory loader · fused optimiser"
    facts = profile(has_convolutions=False, is_in_memory=False, optimizer_implementations=("default",))
    other = next(execution_settings(facts, OLD_CPU))
    assert other.in_words() == "fp32 · micro-batch 1 · contiguous · 1 thread · inline loader · default optimiser"


def test_every_setting_of_a_cpu_is_there_once() -> None:
    """Two precisions, two formats, two implementations, three numbers of threads."""
    found = list(execution_settings(profile(), CPU))
    assert len(found) == len(set(found)) == 2 * 2 * 2 * 3
    assert {plan.threads for plan in found} == {4, 2, 1}


def test_a_gpu_is_fed_by_one_thread_and_offered_workers() -> None:
    """Its cores are not the host's; how many it has may be unknown, which is written as none."""
    for device in (GPU, dataclasses.replace(GPU, cores=0)):
        found = list(execution_settings(profile(is_in_memory=False), device))
        assert {plan.threads for plan in found} == {1}
        assert {plan.num_workers for plan in found} == {0, 4, 8}
        assert {plan.device for plan in found} == {"cuda:0"}
        assert {plan.optimizer_implementation for plan in found} == {"fused"}


def test_precisions_are_those_the_device_is_fast_in_and_fp32() -> None:
    """fp16 is none of them: it needs the job's consent."""
    assert precisions(dataclasses.replace(GPU, fast_dtypes=("fp32", "tf32", "bf16", "fp16"))) == (
        "bf16",
        "tf32",
        "fp32",
    )
    assert precisions(dataclasses.replace(GPU, fast_dtypes=("fp32", "fp16"))) == ("fp32",)


def test_models_in_float64_are_planned_in_it_alone() -> None:
    """Autocast and tf32 leave float64 as it is: a plan of bf16 would only be called so."""
    found = list(execution_settings(profile(is_double=True), GPU))
    assert {plan.precision for plan in found} == {"fp64"}
    assert found[0].in_words().startswith("fp64 · ")


@pytest.mark.parametrize(("blocks", "counts"), [(0, [0]), (1, [0, 1]), (12, [0, 3, 6, 9, 12])])
def test_memory_is_saved_in_steps_of_rising_cost(blocks: int, counts: list[int]) -> None:
    """Nothing, a quarter of the blocks and so on, all; on a CPU each under every malloc, the fastest first.

    On a GPU all blocks selectively come before any block in full.
    """
    ways = list(saving_memory(PLAN, profile(num_blocks=blocks)))
    assert [(way.checkpointed_blocks, way.malloc) for way in ways] == [
        (count, malloc) for count in counts for malloc in ("retained", "default", "mapped")
    ]
    on_gpu = list(saving_memory(dataclasses.replace(PLAN, device="cuda:0"), profile(num_blocks=blocks)))
    selective = [(blocks, "selective")] if blocks else []
    assert {way.malloc for way in on_gpu} == {"default"}
    assert [(way.checkpointed_blocks, way.checkpointing) for way in on_gpu] == [
        (0, "full"),
        *selective,
        *((count, "full") for count in counts if count),
    ]


def test_a_loss_in_chunks_comes_before_checkpointing_and_stays() -> None:
    """It computes nothing twice; where it is not worthwhile, it is not thought of; the trace is reported."""
    on_gpu = dataclasses.replace(PLAN, device="cuda:0")
    ways = list(saving_memory(on_gpu, profile(num_blocks=12, loss_chunks=8)))
    assert [(way.checkpointed_blocks, way.loss_chunks) for way in ways] == [
        (0, 1),
        (0, 8),
        (12, 8),
        (3, 8),
        (6, 8),
        (9, 8),
        (12, 8),
    ]
    many = saving_memory(on_gpu, profile(num_blocks=32, loss_chunks=8))
    assert [(way.checkpointed_blocks, way.loss_chunks) for way in many] == [(0, 1), (0, 8), (32, 8), (32, 8)]
    assert {way.loss_chunks for way in saving_memory(on_gpu, profile(num_blocks=12))} == {1}
    assert trace_settings(ways[1], profile(), "8.0").loss_chunks == 8


@given(st.integers(1, 512), st.sampled_from(["fp32", "tf32", "bf16"]))
def test_what_is_traced_follows_from_the_plan(size: int, precision: str) -> None:
    """Two micro-batches where an update has several; tf32 computes on the tensors of fp32."""
    plan = Plan(device="cuda:0", micro_batch=size, precision=precision)
    settings = trace_settings(
        plan, profile(coupling=Coupling(kind="separable", group=None, causes=(), evidence="")), "8.9"
    )
    assert (settings.target, settings.capability, settings.micro_batch) == ("cuda", "8.0", size)
    assert settings.parts == (1 if size == 512 else 2)
    assert settings.precision == ("bf16" if precision == "bf16" else "fp32")


def test_generations_are_ordered() -> None:
    """A device runs the kernels of its generation or of an earlier one."""
    capabilities = ["6.0", "7.0", "7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0"]
    assert all(float(kernel_generation(one)) <= float(one) for one in capabilities)
    assert len({kernel_generation(one) for one in capabilities}) == 5


def test_groups_are_never_cut() -> None:
    """Micro-batches come from the coupling, not from here."""
    assert all(NORMS.problem_with(size, 512) is None for size in NORMS.legal_micro_batches(512))


def test_plans_are_compiled_where_that_is_asked_for() -> None:
    """After all that are not."""
    plain = list(execution_settings(profile(), CPU))
    both = list(execution_settings(profile(), CPU, (False, True)))
    assert not any(plan.compile for plan in plain)
    assert both == [*plain, *(dataclasses.replace(plan, compile=True) for plan in plain)]

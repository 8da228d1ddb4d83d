from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import DoesNotFit
from stoker.planning.space import SHARE_OF_MEMORY, expected_bytes, first_plan, neighbours
from stoker.records import Coupling
from tests.planning.trials import CPU, GPU, NORMS, OLD_CPU, profile


def test_the_first_plan_is_the_likeliest() -> None:
    """The device's fast precision, the whole batch, channels-last for convolutions, all cores, a fused optimiser."""
    plan = first_plan(profile(), CPU)
    assert plan.in_words() == "bf16 · micro-batch 512 · channels-last · 4 threads · memory loader · fused optimiser"
    other = first_plan(
        profile(has_convolutions=False, is_in_memory=False, optimizer_implementations=("default",)), OLD_CPU
    )
    assert other.in_words() == "fp32 · micro-batch 512 · contiguous · 1 thread · inline loader · default optimiser"


def test_a_gpu_is_not_fed_by_as_many_threads_as_it_has_multiprocessors() -> None:
    """Its cores are not the host's; how many it has may be unknown, which is written as none."""
    for device in (GPU, dataclasses.replace(GPU, cores=0)):
        plan = first_plan(profile(is_in_memory=False), device)
        assert (plan.device, plan.threads) == ("cuda:0", 1)
        workers = [one.num_workers for one in neighbours(plan, profile(is_in_memory=False), device)]
        assert max(workers) <= 8


@given(st.floats(1e3, 1e9), st.sampled_from(["separable", "batch_norm"]))
def test_the_largest_micro_batch_that_fits_is_taken(saved: float, kind: str) -> None:
    """No larger legal one is expected to fit into the share of the memory."""
    group = None if kind == "separable" else 32
    facts = profile(
        saved_bytes_per_sample=saved, coupling=Coupling(kind=kind, group=group, causes=(), evidence="probed")
    )
    room = SHARE_OF_MEMORY * CPU.memory_bytes
    legal = facts.coupling.legal_micro_batches(facts.batch)
    if expected_bytes(facts, legal[-1]) > room:
        with pytest.raises(DoesNotFit):
            first_plan(facts, CPU)
        return
    chosen = first_plan(facts, CPU).micro_batch
    assert expected_bytes(facts, chosen) <= room
    assert all(expected_bytes(facts, size) > room for size in legal if size > chosen)


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"saved_bytes_per_sample": 2**34},
         "a micro-batch of 1 needs about 16.0 GiB; a CPU has 8.0 GiB, of which a plan may take 80%"),
        ({"saved_bytes_per_sample": 2**28, "coupling": NORMS},
         "a micro-batch of 64 (samples are coupled in groups of 64) needs about 16.0 GiB"),
        ({"parameter_bytes": 2**33}, "needs about 32.0 GiB"),
        ({"batch": 32, "coupling": dataclasses.replace(NORMS, kind="whole_group")},
         "a micro-batch of 64 (samples are coupled in groups of 64)"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told_in_numbers(facts: dict, text: str) -> None:
    """What is needed, what is there, what may be taken of it; and what changes the job and what does not."""
    with pytest.raises(DoesNotFit, match=re.escape(text)) as caught:
        first_plan(profile(**facts), CPU)
    assert caught.value.remedy == (
        "A smaller coupling_group or batch is a change of Job; a smaller model or a larger device will do."
    )


@pytest.mark.parametrize("device", [CPU, OLD_CPU, GPU])
@pytest.mark.parametrize("is_in_memory", [True, False])
def test_neighbours_differ_in_one_setting(device, is_in_memory: bool) -> None:
    """Loader and number of workers count as one; micro-batches are smaller ones."""
    facts = profile(is_in_memory=is_in_memory)
    plan = first_plan(facts, device)
    for other in neighbours(plan, facts, device):
        changed = {
            field.name for field in dataclasses.fields(plan) if getattr(plan, field.name) != getattr(other, field.name)
        }
        assert changed <= {"loader", "num_workers"} or len(changed) <= 1
        assert other.micro_batch <= plan.micro_batch
        assert is_in_memory == (other.loader == "memory")
        assert device.kind == "cuda" or max(other.threads, other.num_workers) <= device.cores

"""How many trials run at once: never more than have a core, never more than fit into memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import BadJob
from stoker.records import Device
from stoker.tuning.processes import by_cores, packed
from stoker.units import GIB


def cpu(cores: int, memory_gib: float = 16) -> Device:
    """A CPU."""
    return Device(
        name="cpu", kind="cpu", model="some", cores=cores, memory_bytes=int(memory_gib * GIB), fast_dtypes=("fp32",)
    )


def gpu(number: int, memory_gib: float = 80) -> Device:
    """A GPU."""
    memory_bytes = int(memory_gib * GIB)
    return Device(
        name=f"cuda:{number}",
        kind="cuda",
        index=number,
        model="some",
        cores=1,
        memory_bytes=memory_bytes,
        fast_dtypes=("fp32",),
    )


def test_one_trial_has_the_whole_machine() -> None:
    """Nothing is limited, so that its plan is the one that `stoker train` would make."""
    found = packed([cpu(4)], [0, 1, 2, 3], 1e9, 1)
    assert [(slot.on, slot.memory_bytes, slot.cpus) for slot in found.slots] == [("cpu", None, None)]


def test_trials_on_a_cpu_share_cores_and_memory() -> None:
    """Every core has one trial; each has its part of the memory."""
    found = packed([cpu(4)], range(8), 1 * GIB, None)
    assert [slot.cpus for slot in found.slots] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert {slot.memory_bytes for slot in found.slots} == {0.9 * 16 * GIB / 4}
    assert found.why == "4 trials at once: 4 cores; each is forecast to need at most 1.0 GiB of 16.0 GiB"


def test_memory_limits_what_cores_would_allow() -> None:
    """Two of 6 GiB fit into 16 GiB, though there are four cores; and it is said."""
    found = packed([cpu(4)], range(4), 6 * GIB, 4)
    assert len(found.slots) == 2
    assert found.why == "2 trials at once: each is forecast to need at most 6.0 GiB of 16.0 GiB"


def test_a_trial_that_fits_nowhere_is_still_tried_alone() -> None:
    """It is pruned as out of memory, with the planner's own words."""
    assert len(packed([cpu(4)], range(4), 99 * GIB, None).slots) == 1


def test_gpus_all_have_work_before_one_has_two() -> None:
    """Four trials of 30 GiB on two GPUs: two each, dealt out in turns."""
    found = packed([gpu(0), gpu(1)], range(8), 30 * GIB, None)
    assert [slot.on for slot in found.slots] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    assert all(30 * GIB < (slot.memory_bytes or 0) < 36 * GIB for slot in found.slots)


def test_a_gpu_with_one_trial_is_not_limited() -> None:
    """Asked for two on two GPUs, each has its own."""
    found = packed([gpu(0), gpu(1)], range(8), 30 * GIB, 2)
    assert [(slot.on, slot.memory_bytes) for slot in found.slots] == [("cuda:0", None), ("cuda:1", None)]


def test_trials_that_were_asked_for_share_all_of_a_gpu() -> None:
    """Five would fit, two were asked for: each has half, not a fifth."""
    found = packed([gpu(0)], range(8), 13 * GIB, 2)
    assert [slot.on for slot in found.slots] == ["cuda:0", "cuda:0"]
    assert all(35 * GIB < (slot.memory_bytes or 0) < 36 * GIB for slot in found.slots)


def test_a_gpu_of_unknown_memory_has_one_trial() -> None:
    """Nothing says how many would fit."""
    assert len(packed([gpu(0, 0)], range(8), 13 * GIB, None).slots) == 1


def test_without_a_forecast_each_gpu_has_one_trial() -> None:
    """What is not known is not risked."""
    found = packed([gpu(0), gpu(1)], range(8), None, None)
    assert [slot.on for slot in found.slots] == ["cuda:0", "cuda:1"]


@pytest.mark.parametrize("asked", [0, -1])
def test_a_number_below_one_is_refused(asked: int) -> None:
    """In words."""
    with pytest.raises(BadJob, match="wanted auto, or a number"):
        by_cores(cpu(4), range(4), asked)


@given(st.integers(1, 16), st.floats(0.1, 40), st.integers(1, 20))
def test_together_trials_never_need_more_than_there_is(cores: int, need_gib: float, asked: int) -> None:
    """On a CPU: at most a core each, and their forecasts fit together, unless there is one alone."""
    slots = packed([cpu(cores)], range(cores), need_gib * GIB, asked).slots
    assert 1 <= len(slots) <= min(cores, asked)
    if len(slots) > 1:
        assert len(slots) * need_gib <= 0.9 * 16
        assert sorted(number for slot in slots for number in slot.cpus or ()) == list(range(cores))

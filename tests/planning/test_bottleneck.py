"""The verdict on what bounds a run."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from stoker.planning.model.bottleneck import Remedy, RunTimes, UpdateBounds, find_bottleneck
from stoker.records import Bottleneck, Ceilings, Device, Plan, from_json, to_json

DEVICE = Device(name="cpu", kind="cpu", model="AMD EPYC", cores=2, memory_bytes=2**34, fast_dtypes=("fp32", "bf16"))
GPU = dataclasses.replace(DEVICE, name="cuda:0", kind="cuda", model="H100")
PLAN = Plan(device="cpu", micro_batch=64, threads=2)
CEILINGS = Ceilings(
    device=DEVICE,
    threads=2,
    gemm_flops={"fp32": 2e11, "bf16": 4e11},
    copy_bytes_per_s=5e10,
    fresh_copy_bytes_per_s=1e10,
    host_to_device_bytes_per_s=None,
    took_s=10.0,
    measured_at="2026-11-21T10:00:00+00:00",
    torch_version="2.13.0",
)
BOUNDS = UpdateBounds(
    seconds={"arithmetic": 0.06, "memory bandwidth": 0.03, "host launch": 0.01},
    flops={"bf16": 2e10},
    model_flops={"bf16": 2e10},
    num_bytes=2e9,
    num_operations=200,
    from_system_s=0.0,
    basis="calibrated",
)


def times(*, updates: int = 100, **split_s: float) -> RunTimes:
    """A run of `updates` updates of 64 samples."""
    busy = split_s.get("update", 0.0) + split_s.get("data", 0.0)
    return RunTimes(
        split_s=split_s, updates=updates, samples_per_update=64, samples_per_s=64 * updates / busy if busy else None
    )


def verdict(seen: RunTimes, *, plan: Plan = PLAN, device: Device = DEVICE, **given: Any) -> Bottleneck:
    """The verdict on a run under a measured device."""
    return find_bottleneck(seen, plan, device, **({"bounds": BOUNDS, "ceilings": CEILINGS} | given))


@pytest.mark.parametrize(
    ("split", "bound"),
    [
        ({"update": 10.0, "data": 0.1}, "arithmetic"),
        ({"update": 10.0, "data": 20.0}, "data"),
        ({"update": 10.0, "evaluation": 9.0}, "evaluation"),
        ({"update": 10.0, "checkpoint": 7.0}, "checkpoints"),
    ],
)
def test_the_largest_part_of_the_time_bounds_the_run(split: dict[str, float], bound: str) -> None:
    """The inside of updates counts part by part: 9 s of evaluations outweigh 6 s of arithmetic."""
    found = verdict(times(**split))
    assert found.bound_by == bound
    assert found.shares[0].what == bound
    assert sum(share.value for share in found.shares) == pytest.approx(sum(split.values()))


@pytest.mark.parametrize("bound", ["memory bandwidth", "host launch", "copies"])
def test_what_is_largest_inside_an_update_is_named(bound: Any) -> None:
    """As forecast for its operations, scaled to what updates took."""
    bounds = dataclasses.replace(BOUNDS, seconds={"arithmetic": 0.01, bound: 0.07})
    found = verdict(times(update=10.0), bounds=bounds)
    assert found.bound_by == bound
    assert found.shares[0].value == pytest.approx(10.0 * 7 / 8)
    assert "88 %" in found.sentence


def test_utilisation_is_against_what_was_measured() -> None:
    """2e10 FLOPs in 100 ms are half of 4e11 FLOP/s, 2e9 bytes two fifths of 5e10 bytes/s; the report can be kept."""
    found = verdict(times(update=10.0))
    assert found.mfu == pytest.approx(0.5)
    arithmetic, memory = found.achieved
    assert (arithmetic.value, arithmetic.ceiling, arithmetic.fraction) == (2e11, 4e11, 0.5)
    assert memory.fraction == pytest.approx(0.4)
    assert from_json(to_json(found), Bottleneck) == found


def test_waiting_for_data_lowers_the_utilisation() -> None:
    """It is of the time that training takes, not of the updates alone."""
    assert verdict(times(update=10.0, data=10.0)).mfu == pytest.approx(0.25)


def test_recomputation_is_no_use_of_the_device() -> None:
    """The MFU counts the model's FLOPs once; what was executed is reported as the rate."""
    bounds = dataclasses.replace(BOUNDS, flops={"bf16": 2.6e10})
    found = verdict(times(update=10.0), bounds=bounds)
    assert found.mfu == pytest.approx(0.5)
    assert found.achieved[0].value == pytest.approx(2.6e11)


def test_more_than_the_device_reaches_is_an_error_said_aloud() -> None:
    """No utilisation above 100 % is shown, nor the rates it came from."""
    slow = dataclasses.replace(CEILINGS, gemm_flops={"fp32": 1e11, "bf16": 1.5e11})
    found = verdict(times(update=10.0), ceilings=slow)
    assert found.mfu is None
    assert all(one.unit != "FLOP/s" for one in found.achieved)
    assert "133 %" in found.problems[0]
    assert "stoker doctor --fresh" in found.problems[0]


def test_without_ceilings_utilisation_is_unknown() -> None:
    """A datasheet's figures do not stand in for measured ones."""
    found = verdict(times(update=10.0), ceilings=None)
    assert found.mfu is None
    assert [one.ceiling for one in found.achieved] == [None, None]
    assert any("stoker doctor" in line for line in found.evidence)


def test_an_update_that_nobody_traced_is_unknown_inside() -> None:
    """The time outside of updates is still known: it bounds the run if it takes the most."""
    assert verdict(times(update=10.0, data=1.0), bounds="it cannot be traced").bound_by == "unknown"
    found = verdict(times(update=10.0, data=12.0), bounds="it cannot be traced")
    assert found.bound_by == "data"
    assert "it cannot be traced" in " ".join(found.evidence)


@pytest.mark.parametrize(("took_s", "bound"), [(29.0, "arithmetic"), (31.0, "unknown"), (3.0, "unknown")])
def test_a_forecast_that_is_far_off_explains_nothing(took_s: float, bound: str) -> None:
    """100 updates forecast at 10 s in all: up to three times as long the forecast says what they wait for."""
    found = verdict(times(update=took_s))
    assert found.bound_by == bound
    assert ("something else may have held the device" in found.sentence) == (took_s == 31.0)


def test_on_a_gpu_fetching_beside_its_work_is_no_waiting() -> None:
    """Host time for data counts only where the GPU cannot have been busy."""
    split = {"update": 2.0, "data": 9.0}
    assert verdict(times(**split), device=GPU).bound_by == "arithmetic"
    assert verdict(times(**split)).bound_by == "data"
    starved = verdict(times(update=10.0, data=30.0), device=GPU)
    assert {share.what: share.value for share in starved.shares}["data"] == pytest.approx(30.0)


def test_a_run_that_told_of_no_time_is_unknown() -> None:
    """There is nothing to divide by."""
    found = verdict(times(updates=0))
    assert (found.bound_by, found.mfu, found.gain) == ("unknown", None, None)


def test_the_advice_is_the_change_that_saves_most() -> None:
    """With its share of the training time; one of a smaller share is not reported."""
    small = Remedy(change="small.", saved_s=0.15, low_s=0.1, high_s=0.2, basis="roofline")
    large = Remedy(change="large.", saved_s=3.0, low_s=1.0, high_s=4.0, basis="calibrated")
    found = verdict(times(update=10.0), considered=[small, large])
    assert found.advice == "large."
    assert found.gain is not None
    assert (found.gain.value, found.gain.low, found.gain.high) == pytest.approx((0.3, 0.1, 0.4))
    alone = verdict(times(update=10.0), considered=[small])
    assert alone.gain is None
    assert "stoker plan JOB --on all" in alone.advice

"""The verdict that a run ends with."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import stoker
from stoker.devices import attached_devices, cache_key
from stoker.planning.model.bottleneck import LEAST_SHARE, UpdateBounds, find_bottleneck
from stoker.planning.resolved_job import resolve_job
from stoker.planning.run_bottleneck import FEWEST_UPDATES, bottleneck_of
from stoker.records import Bottleneck, Ceilings, Event, from_json
from stoker.store import cache_root, ceilings_cache
from stoker.store.run_files import BOTTLENECK
from tests.flow.builders import PLAN, Heard, blobs, blobs_job


class Slow(Dataset[Any]):
    """Points that take 2 ms each to fetch."""

    def __init__(self) -> None:
        self.inputs, self.targets = blobs(64)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        return self.inputs[index], self.targets[index]


def keep_ceilings(flops_per_s: float) -> None:
    """As `stoker doctor` leaves them."""
    (device,) = (one for one in attached_devices() if one.kind == "cpu")
    ceilings = Ceilings(
        device=device,
        threads=1,
        gemm_flops={"fp32": flops_per_s, "bf16": flops_per_s},
        copy_bytes_per_s=1e10,
        fresh_copy_bytes_per_s=5e9,
        host_to_device_bytes_per_s=None,
        took_s=1.0,
        measured_at="2026-11-21T00:00:00+00:00",
        torch_version=torch.__version__,
    )
    ceilings_cache(cache_root()).write(ceilings, cache_key(device, torch.__version__))


def test_slow_samples_bound_a_run() -> None:
    """The verdict is in the event, in the run's directory and in the report; the advice has its gain."""
    heard = Heard()
    job = stoker.Job(
        model=lambda: torch.nn.Linear(6, 2),
        data=Slow(),
        loss="cross_entropy",
        optimizer=stoker.SGD(lr=0.1),
        batch=16,
        until=stoker.epochs(2),
    )
    plan = stoker.records.Plan(device="cpu", micro_batch=16, loader="inline")
    run = stoker.train(job, plan=plan, sink=heard)
    found = run.directory.read(BOTTLENECK)
    assert found is not None
    assert found.bound_by == "data"
    assert from_json(heard.of("finished")[0]["bottleneck"], Bottleneck) == found
    assert found.gain is not None
    assert found.gain.value > LEAST_SHARE
    assert "Data bound this run" in run.report_path.read_text()
    assert run.directory.read_report().bottleneck == found


class SlowAtFirst(Slow):
    """Points of which the first that training reads takes half a second, as a file that is opened."""

    is_open = True

    def __getitem__(self, index: int) -> Any:
        if not self.is_open:
            time.sleep(0.5)
        self.is_open = True
        return self.inputs[index], self.targets[index]


def test_what_is_waited_for_once_bounds_no_run() -> None:
    """The first update does not count, and with fewer than five others there is no verdict."""

    def trained(updates: int) -> stoker.Run:
        job = stoker.Job(
            model=lambda: torch.nn.Linear(6, 2),
            data=SlowAtFirst(),
            loss="cross_entropy",
            optimizer=stoker.SGD(lr=0.1),
            batch=16,
            until=stoker.updates(updates),
        )

        def heard(event: Event) -> None:
            if event.kind == "started":
                job.data.is_open = False

        plan = stoker.records.Plan(device="cpu", micro_batch=16, loader="inline")
        return stoker.train(job, plan=plan, sink=heard)

    found = trained(FEWEST_UPDATES + 1).directory.read(BOTTLENECK)
    assert found is not None
    assert sum(share.value for share in found.shares) < 0.5
    assert trained(FEWEST_UPDATES).directory.read(BOTTLENECK) is None


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Runs are traced however short they are; what the verdict was asked with."""
    asked: dict[str, Any] = {}
    find = find_bottleneck

    def spy(*args: Any, **given: Any) -> Bottleneck:
        asked.update(given)
        return find(*args, **given)

    monkeypatch.setattr("stoker.planning.run_bottleneck.find_bottleneck", spy)
    monkeypatch.setattr("stoker.planning.run_bottleneck.WORTH_TRACING_S", 0.0)
    return asked


def test_the_verdict_knows_what_updates_do(traced: dict[str, Any]) -> None:
    """FLOPs are those of the trace: 16 points through 6 x 8 and 8 x 2, forward, and backward without the first input.

    Of so small a model most of an update is the host's: four times the batch is forecast to save more than twice.
    """
    run = stoker.train(blobs_job(data=blobs(400)), plan=PLAN, sink=Heard())
    assert run.directory.read(BOTTLENECK) is not None
    assert sum(traced["bounds"].model_flops.values()) == 2 * 16 * (6 * 8 * 2 + 8 * 2 * 3)
    assert traced["bounds"].total_s > 0
    twice, four_times = traced["considered"]
    assert twice.changes_job
    assert "Job(batch=64)" in four_times.change
    assert 0 < twice.saved_s < four_times.saved_s


def test_a_machine_with_other_memory_than_when_the_run_began_is_told_of_all_the_same(traced: dict[str, Any]) -> None:
    """It differs from boot to boot, and a run may have been continued after one."""
    report = stoker.train(blobs_job(), plan=PLAN, sink=Heard()).directory.read_report()
    assert report.device is not None
    before = dataclasses.replace(report.device, memory_bytes=report.device.memory_bytes - 2**20)
    assert bottleneck_of(resolve_job(blobs_job()), dataclasses.replace(report, device=before)) is not None
    assert isinstance(traced["bounds"], UpdateBounds)


def test_utilisation_above_what_was_measured_is_told_aloud(traced: dict[str, Any]) -> None:
    """A run cannot do more than the device: one that seems to is warned of, and shows no MFU."""
    keep_ceilings(1.0)
    heard = Heard()
    found = stoker.train(blobs_job(), plan=PLAN, sink=heard).directory.read(BOTTLENECK)
    assert found is not None
    assert found.mfu is None
    assert any("That cannot be" in fields["message"] for fields in heard.of("warned"))
    assert traced["ceilings"].gemm_flops["fp32"] == 1.0


def test_a_given_plan_is_not_traced_for_a_short_run() -> None:
    """Seconds of tracing would be a large part of it; the verdict says why it does not know."""
    found = stoker.train(blobs_job(), plan=PLAN, sink=Heard()).directory.read(BOTTLENECK)
    assert found is not None
    assert "unknown" in {share.what for share in found.shares}
    assert "was not traced" in found.sentence + " ".join(found.evidence)


def test_a_verdict_that_fails_costs_the_run_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is warned of, and the run is finished."""

    def broken(*args: object, **given: object) -> None:
        raise ZeroDivisionError("float division by zero")

    monkeypatch.setattr("stoker.planning.run_bottleneck.find_bottleneck", broken)
    heard = Heard()
    run = stoker.train(blobs_job(), plan=PLAN, sink=heard)
    assert run.status == "finished"
    assert heard.of("finished")[0]["bottleneck"] is None
    assert "what held the run back" in heard.of("warned")[0]["message"]

"""`stoker train --profile`: the same run, with files about where its time and memory go."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stoker
from stoker.profiling import torch_profile
from stoker.records import Plan
from stoker.store import cache_root, calibration_log
from stoker.store.run_files import KERNELS
from tests.flow.builders import PLAN, Heard, Stopping, assert_equal_weights, blobs, blobs_job


class Wide(nn.Module):
    """A layer wide enough to be seen in a table."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(6, 512), nn.Dropout(0.2), nn.Linear(512, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(torch.relu(self.first(inputs))))


@pytest.fixture(autouse=True)
def _as_many_updates_as_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is slow today profiles no fewer updates."""
    monkeypatch.setattr(torch_profile, "_LONGEST_S", float("inf"))


@pytest.mark.parametrize(
    ("plan", "changes"),
    [
        pytest.param(PLAN, {}, marks=pytest.mark.slow),
        (dataclasses.replace(PLAN, micro_batch=8), {"clip_norm": 0.5}),
        pytest.param(dataclasses.replace(PLAN, captured=True), {}, marks=pytest.mark.slow),
        pytest.param(
            PLAN,
            {"optimizer": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["whole batches", "accumulated", "captured", "closure"],
)
def test_a_profiled_run_learns_the_same_bit_for_bit(plan: Plan, changes: dict[str, Any]) -> None:
    """Weights and metrics are those of the run without a profile, dropout, accumulation and clipping included."""
    job = blobs_job(model=Wide, **changes)
    plain = stoker.train(job, plan=plan, sink=Heard())
    profiled = stoker.train(job, plan=plan, new=True, profile=True, sink=Heard())
    assert_equal_weights(plain, profiled)
    assert profiled.metrics == plain.metrics
    assert not plain.directory.profile_path.exists()


@pytest.mark.slow
def test_a_profile_leaves_a_trace_a_table_and_a_timeline() -> None:
    """The trace opens as JSON under a name that TensorBoard looks for; updates 6 to 10 of 15 are in it, by part."""
    heard = Heard()
    run = stoker.train(blobs_job(model=Wide), plan=PLAN, profile=True, sink=heard)
    table = run.directory.read(KERNELS)
    assert table is not None
    assert (table.first_update, table.updates) == (5, 5)
    assert heard.of("finished")[0]["profile"] == {"folder": str(run.directory.profile_path), "files": table.files}
    assert heard.of("warned") == []
    trace = run.directory.profile_path / table.files["trace"]
    assert trace.name.endswith(".pt.trace.json")
    names = [event.get("name") for event in json.loads(trace.read_bytes())["traceEvents"]]
    assert [names.count(part) for part in ("data", "gradient", "forward", "backward", "update")] == [5, 5, 5, 5, 10]
    products = [kernel for kernel in table.kernels if kernel.operation in ("addmm", "mm")]
    assert {kernel.phase for kernel in products} == {"forward", "backward", "other"}  # of the evaluation
    assert all(kernel.where.startswith(Path(__file__).name) for kernel in products)
    lines = (run.directory.profile_path / table.files["kernels"]).read_text().splitlines()
    assert len(lines) == len(table.kernels) + 1
    assert table.peak_bytes >= 2 * 16 * 512 * 4
    assert "total_bytes" in (run.directory.profile_path / table.files["memory"]).read_text()
    assert "What updates are made of" in run.report_path.read_text()
    # Writing and reading the trace is no waiting for data, and the run is no measure of the forecast.
    assert sum(fields["split_s"].get("profiling", 0.0) for fields in heard.of("progress")) > 0
    assert calibration_log(cache_root()).read() == ()


@pytest.mark.parametrize(("updates", "first", "kept"), [(1, 0, 1), (7, 5, 2)])
def test_a_short_run_is_profiled_as_far_as_it_goes(updates: int, first: int, kept: int) -> None:
    """At least its last update."""
    job = blobs_job(until=stoker.updates(updates))
    table = stoker.train(job, plan=PLAN, profile=True, sink=Heard()).directory.read(KERNELS)
    assert table is not None
    assert (table.first_update, table.updates) == (first, kept)


def test_a_run_stopped_before_its_profile_is_whole_leaves_none_and_goes_on() -> None:
    """The profiler is stopped with it; continued without a profile, the run ends as ever."""
    job = blobs_job(data=blobs(100), until=stoker.epochs(3))
    stopped = stoker.train(job, plan=PLAN, profile=True, sink=Stopping(80))
    assert stopped.status == "unfinished"
    assert stopped.directory.read(KERNELS) is None
    assert_equal_weights(stoker.train(job, sink=Heard()), stoker.train(job, plan=PLAN, new=True, sink=Heard()))


def test_a_trace_that_cannot_be_read_costs_the_run_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is reported, and training goes on."""

    def broken(events: object) -> None:
        raise KeyError("tid")

    monkeypatch.setattr("stoker.profiling.torch_profile.operation_calls", broken)
    heard = Heard()
    run = stoker.train(blobs_job(), plan=PLAN, profile=True, sink=heard)
    assert run.status == "finished"
    assert "there is no profile: KeyError" in heard.of("warned")[0]["message"]
    assert heard.of("finished")[0]["profile"] is None

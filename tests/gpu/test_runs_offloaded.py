"""Whole runs with their optimiser on the host, on a GPU or a simulated one: memory as forecast, stopped, resumed."""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stoker
from stoker.devices import planned_devices
from stoker.devices.cpu import attached_cpu
from stoker.errors import BadJob, DoesNotFit, RunFailed, StokerError
from stoker.planning.model.memory import WORKSPACE
from stoker.planning.planner import Planner
from stoker.planning.resolved_job import resolve_job
from stoker.records import Plan
from stoker.stepping.step import Step
from stoker.testing.simulated_gpu import is_simulated, simulate_gpus
from stoker.units import MIB
from stoker.zoo import Llama
from tests.flow.builders import Stopping
from tests.gpu.allocated import allocated_by_others
from tests.stepping.driving import SEPARABLE, largest_difference, train

pytestmark = pytest.mark.gpu

ON_GPU = Plan(
    device="cuda:0",
    micro_batch=16,
    loader="device",
    optimizer_implementation="fused",
    checkpointed_blocks=2,
    optimizer_offload="state",
)


def llama_job(width: int = 256, **changes: Any) -> stoker.Job:
    """Two blocks whose weights are most of the memory, on random tokens: two epochs of three updates."""
    tokens = torch.randint(96, (64, 9), generator=torch.Generator().manual_seed(0))
    settings: dict[str, Any] = {
        "model": lambda: Llama(layers=2, width=width, heads=4, kv_heads=2, hidden=4 * width, context=8, vocab=96),
        "data": (tokens[:, :-1].clone(), tokens[:, 1:].clone()),
        "loss": "token_cross_entropy",
        "optimizer": stoker.AdamW(lr=1e-3),
        "clip_norm": 1.0,
        "batch": 16,
        "until": stoker.epochs(2),
        "valid": stoker.holdout(0.25),
    }
    return stoker.Job(**(settings | changes))


def planner_of(job: stoker.Job) -> Planner:
    """The planner of a job."""
    return Planner(resolve_job(job))


VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp32, summed on the device": {"micro_batch": 2},
    "fp32, summed on the host": {"micro_batch": 2, "optimizer_offload": "gradients"},
    "bf16": {"precision": "bf16"},
    "bf16, summed on the device": {"precision": "bf16", "micro_batch": 2},
    "bf16, summed on the host": {"precision": "bf16", "micro_batch": 2, "optimizer_offload": "gradients"},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_device_s_memory_is_as_forecast(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak of live tensors, to 5 %, where little may be on its way; most of it are weights and gradients."""
    few = MIB
    for module in ("stoker.stepping.optimizer_offload", "stoker.planning.model.optimizer_offload"):
        monkeypatch.setattr(f"{module}.IN_FLIGHT_BYTES", few)
        monkeypatch.setattr(f"{module}.PIECE", 2**16)
    job, plan = llama_job(batch=4), dataclasses.replace(ON_GPU, **{"micro_batch": 4} | VARIANTS[name])
    shares = planner_of(job).forecasts(planned_devices("h100", ())[0]).breakdown(plan).peak_bytes
    expected = sum(share.value for share in shares if not (is_simulated() and share.what == WORKSPACE))
    before = allocated_by_others()
    step = Step(job, plan, SEPARABLE)
    train(job, step, 1)
    torch.cuda.reset_peak_memory_stats(0)
    train(job, step, 2, begin=1)
    measured = torch.cuda.max_memory_allocated(0) - before
    assert expected == pytest.approx(measured, rel=0.05), [(s.what, s.where, s.value / MIB) for s in shares]


@pytest.mark.skipif(not is_simulated(), reason="takes memory away from a GPU")
def test_what_does_not_fit_with_its_state_fits_with_that_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of 30 MiB of weights on a GPU of 80 MiB, which a plain update of it exceeds."""
    monkeypatch.setattr("stoker.stepping.optimizer_offload.IN_FLIGHT_BYTES", 4 * MIB)
    job, found = llama_job(512), list[Any]()
    plain = dataclasses.replace(ON_GPU, optimizer_offload="none")
    gc.collect()
    try:
        simulate_gpus(torch.cuda.device_count(), memory_bytes=torch.cuda.memory_allocated(0) + 80 * MIB)
        with pytest.raises(StokerError, match="memory"):
            stoker.train(job, plan=plain, run_dir=tmp_path / "plain", sink=found.append)
        run = stoker.train(job, plan=ON_GPU, run_dir=tmp_path / "offloaded", sink=found.append)
    finally:
        simulate_gpus(torch.cuda.device_count())
    assert run.status == "finished"


def test_a_stopped_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """In bf16, of which the checkpoint has the masters."""
    plan, options = dataclasses.replace(ON_GPU, precision="bf16"), {"run_dir": tmp_path / "stopped"}
    straight = stoker.train(llama_job(), plan=plan, run_dir=tmp_path / "straight", sink=lambda _event: None)
    assert stoker.train(llama_job(), plan=plan, sink=Stopping(48), **options).status == "unfinished"
    run = stoker.train(llama_job(), plan=plan, sink=lambda _event: None, **options)
    assert run.status == "finished"
    for name, weight in run.weights().items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, straight.weights()[name])


@pytest.mark.parametrize("first", ["state", "none"])
def test_a_checkpoint_goes_on_with_and_without_it(first: Any, tmp_path: Path) -> None:
    """A run keeps its plan; two forks of it, under one plan and the other, end at the same weights to rounding."""
    plans = {offload: dataclasses.replace(ON_GPU, optimizer_offload=offload) for offload in ("state", "none")}
    stopped = stoker.train(llama_job(), plan=plans[first], run_dir=tmp_path / "stopped", sink=Stopping(48))
    assert stopped.status == "unfinished"
    weights = []
    for offload, plan in plans.items():
        options: dict[str, Any] = {"plan": plan, "run_dir": tmp_path / offload, "fork": tmp_path / "stopped"}
        weights.append(stoker.train(llama_job(), sink=lambda _event: None, **options).weights())
    assert largest_difference(*weights) < 1e-3


def test_more_than_the_host_holds_is_refused_with_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is made on a machine of 1 GiB."""
    small = dataclasses.replace(attached_cpu(), memory_bytes=2**30)
    monkeypatch.setattr("stoker.planning.planner.attached_cpu", lambda: small)
    with pytest.raises(DoesNotFit, match=r"need [23]\.\d GiB of the host's memory, and it has 1\.0 GiB"):
        stoker.train(llama_job(), plan=ON_GPU, run_dir=tmp_path / "run", sink=lambda _event: None)


def test_a_run_that_overflows_in_bf16_is_rolled_back_to_fp32(tmp_path: Path) -> None:
    """From the masters in its last checkpoint, with fp32 weights on the device; here it overflows again."""
    job = llama_job(optimizer=stoker.SGD(lr=1e25), clip_norm=None, on_non_finite="roll_back")
    with pytest.raises(RunFailed, match="this was in fp32 already"):
        stoker.train(
            job,
            plan=dataclasses.replace(ON_GPU, precision="bf16"),
            run_dir=tmp_path / "run",
            sink=lambda _event: None,
        )


def test_a_loop_of_ones_own_has_its_optimiser_on_the_device() -> None:
    """Such a plan is refused."""
    model = nn.Linear(6, 2)
    with pytest.raises(BadJob, match="the optimiser is your loop's own"):
        stoker.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=ON_GPU)

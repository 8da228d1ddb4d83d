"""Whole runs with their optimiser on the host: memory as forecast, stopped and gone on with, on a GPU or a simulated one."""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path
from typing import Any

import pytest
import torch

import stoker
from stoker.devices import attached_devices, planned_devices
from stoker.errors import DoesNotFit, StokerError
from stoker.planning.decision import on_one
from stoker.planning.model.memory import WORKSPACE
from stoker.planning.planner import Planner
from stoker.planning.resolved_job import resolve_job
from stoker.records import Plan
from stoker.stepping.step import Step
from stoker.testing.simulated_gpu import is_simulated, simulate_gpus
from stoker.units import MIB
from stoker.zoo import Llama
from tests.flow.builders import Stopping
from tests.stepping.driving import SEPARABLE, train

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
    tokens = torch.randint(96, (48, 9), generator=torch.Generator().manual_seed(0))
    settings: dict[str, Any] = {
        "model": lambda: Llama(layers=2, width=width, heads=4, kv_heads=2, hidden=4 * width, context=8, vocab=96),
        "data": (tokens[:, :-1].clone(), tokens[:, 1:].clone()),
        "loss": "token_cross_entropy",
        "optimizer": stoker.AdamW(lr=1e-3),
        "clip_norm": 1.0,
        "batch": 16,
        "until": stoker.epochs(2),
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
    gc.collect()
    before = torch.cuda.memory_allocated(0)
    step = Step(job, plan, SEPARABLE)
    train(job, step, 1)
    torch.cuda.reset_peak_memory_stats(0)
    train(job, step, 2, begin=1)
    measured = torch.cuda.max_memory_allocated(0) - before
    assert expected == pytest.approx(measured, rel=0.05), [(s.what, s.where, s.value / MIB) for s in shares]


@pytest.mark.skipif(not is_simulated(), reason="takes memory away from a GPU")
def test_what_does_not_fit_with_its_state_fits_with_that_on_the_host(tmp_path: Path) -> None:
    """A model of 30 MiB of weights on a GPU of 80 MiB, which a plain update of it exceeds."""
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


@pytest.mark.parametrize("then", ["state", "none"])
def test_a_stopped_run_goes_on_with_or_without_it(then: Any, tmp_path: Path) -> None:
    """Under the same plan bit for bit; under one without, and from such a one, to rounding. Weights are kept in fp32."""
    plan = dataclasses.replace(ON_GPU, precision="bf16" if then == "state" else "fp32")
    straight = stoker.train(llama_job(), plan=plan, run_dir=tmp_path / "straight", sink=lambda _event: None)
    first, second = (plan, dataclasses.replace(plan, optimizer_offload=then))
    if then == "none":
        first, second = second, first
    stopped = stoker.train(llama_job(), plan=first, run_dir=tmp_path / "stopped", sink=Stopping(48))
    assert stopped.status == "unfinished"
    run = stoker.train(llama_job(), plan=second, run_dir=tmp_path / "stopped", sink=lambda _event: None)
    assert run.status == "finished"
    for name, weight in run.weights().items():
        assert weight.dtype == torch.float32
        expected = straight.weights()[name]
        assert torch.equal(weight, expected) if then == "state" else torch.allclose(weight, expected, atol=1e-5)


def test_more_than_the_host_holds_is_refused_with_numbers() -> None:
    """Pinned, it does not fit; unpinned, it is not considered."""
    place = planned_devices("cuda:0", attached_devices())[0]
    planner = planner_of(llama_job())
    forecasts = planner.forecasts(place)
    hardware = dataclasses.replace(forecasts.hardware, host_memory_bytes=2**30)
    forecasts._hardware = hardware  # noqa: SLF001 - a machine of little memory
    assert "of the host's memory, and it has 1.0 GiB" in (forecasts.host_problem(ON_GPU) or "")
    assert forecasts.probability_it_fits(ON_GPU) == 0
    assert not forecasts.fits(ON_GPU, 0.9)

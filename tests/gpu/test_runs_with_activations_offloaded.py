"""Whole runs with blocks' inputs on the host, on a GPU or a simulated one: memory as forecast, stopped, resumed."""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path
from typing import Any

import pytest
import torch

import stoker
from stoker.devices import planned_devices
from stoker.devices.cpu import attached_cpu
from stoker.errors import DoesNotFit, StokerError
from stoker.planning.planner import Planner
from stoker.planning.resolved_job import resolve_job
from stoker.records import Plan
from stoker.stepping.step import Step
from stoker.testing.simulated_gpu import is_simulated, simulate_gpus
from stoker.units import MIB
from tests.flow.builders import Stopping
from tests.gpu.allocated import allocated_by_others
from tests.stepping.driving import SEPARABLE, train
from tests.stepping.residual_stack import ResidualStack, stack_job

pytestmark = pytest.mark.gpu

ON_GPU = Plan(
    device="cuda:0",
    micro_batch=2048,
    loader="device",
    optimizer_implementation="fused",
    checkpointed_blocks=8,
    activation_offload=True,
)

VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "micro-batches": {"micro_batch": 1024},
    "bf16": {"precision": "bf16", "micro_batch": 1024},
    "six blocks of eight": {"micro_batch": 1024, "checkpointed_blocks": 6},
    "with the optimiser": {"optimizer_offload": "state"},
}


@pytest.fixture
def simulated_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a simulated GPU kernels take no memory of their own."""
    if is_simulated():
        monkeypatch.setattr("stoker.planning.model.memory.hidden_blocks", lambda *_, **__: ())
        monkeypatch.setattr("stoker.planning.model.memory.cublas_workspace_bytes", lambda _: 0)


@pytest.mark.usefixtures("simulated_kernels")
@pytest.mark.parametrize("name", VARIANTS)
def test_the_device_s_memory_is_as_forecast(name: str) -> None:
    """The peak of live tensors, to 5 %, and what is saved of it, to 10 %: a third in fp32."""
    job, peaks = stack_job(), list[tuple[float, float]]()
    for is_offloaded in (False, True):
        plan = dataclasses.replace(ON_GPU, **VARIANTS[name] | {"activation_offload": is_offloaded})
        forecasts = Planner(resolve_job(job)).forecasts(planned_devices("h100", ())[0])
        expected = forecasts.forecast(plan).peak_bytes.value
        before = allocated_by_others()
        step = Step(job, plan, SEPARABLE)
        train(job, step, 1)
        torch.cuda.reset_peak_memory_stats(0)
        train(job, step, 1, begin=1)
        measured = torch.cuda.max_memory_allocated(0) - before
        del step
        assert expected == pytest.approx(measured, rel=0.05)
        peaks.append((expected, measured))
    saved = [plain - offloaded for plain, offloaded in zip(*peaks, strict=True)]
    assert saved[0] == pytest.approx(saved[1], rel=0.1)
    workspaces = 0 if is_simulated() else 64 * MIB  # most of what so small a model takes
    assert saved[1] > 0.05 * (peaks[0][1] - workspaces)


@pytest.mark.skipif(not is_simulated(), reason="takes memory away from a GPU")
def test_what_does_not_fit_with_inputs_of_blocks_fits_with_those_on_the_host(tmp_path: Path) -> None:
    """Of 16 blocks 15 inputs of half a MiB."""
    job, found = stack_job(16), list[Any]()
    plan = dataclasses.replace(ON_GPU, checkpointed_blocks=16)
    plain = dataclasses.replace(plan, activation_offload=False)
    gc.collect()
    try:
        simulate_gpus(torch.cuda.device_count(), memory_bytes=torch.cuda.memory_allocated(0) + 12 * MIB)
        with pytest.raises(StokerError, match="memory"):
            stoker.train(job, plan=plain, run_dir=tmp_path / "plain", sink=found.append)
        run = stoker.train(job, plan=plan, run_dir=tmp_path / "offloaded", sink=found.append)
    finally:
        simulate_gpus(torch.cuda.device_count())
    assert run.status == "finished"


def test_a_stopped_run_goes_on_bit_for_bit_and_as_one_without(tmp_path: Path) -> None:
    """Weights are those of a run that was not stopped, under either plan."""
    quiet: dict[str, Any] = {"sink": lambda _event: None}
    weights = []
    for is_offloaded in (False, True):
        plan = dataclasses.replace(ON_GPU, activation_offload=is_offloaded)
        run = stoker.train(stack_job(), plan=plan, run_dir=tmp_path / f"straight {is_offloaded}", **quiet)
        weights.append(run.weights())
    options = {"run_dir": tmp_path / "stopped"}
    assert stoker.train(stack_job(), plan=ON_GPU, sink=Stopping(2048), **options).status == "unfinished"
    resumed = stoker.train(stack_job(), plan=ON_GPU, **options, **quiet)
    assert resumed.status == "finished"
    for name, weight in resumed.weights().items():
        assert torch.equal(weight, weights[0][name])
        assert torch.equal(weight, weights[1][name])


def test_more_than_the_host_holds_is_refused_with_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is made on a machine of 1 GiB."""
    small = dataclasses.replace(attached_cpu(), memory_bytes=2**30)
    monkeypatch.setattr("stoker.planning.planner.attached_cpu", lambda: small)
    with pytest.raises(DoesNotFit, match=r"inputs of blocks, need 2\.8 GiB of the host's memory, and it has 1\.0 GiB"):
        stoker.train(stack_job(), plan=ON_GPU, run_dir=tmp_path / "run", sink=lambda _event: None)


def test_a_loop_of_ones_own_has_it_too() -> None:
    """Under `stoker.prepare` gradients are those of the model as it was."""
    torch.manual_seed(0)
    model = ResidualStack(4, 64)
    plain = ResidualStack(4, 64)
    plain.load_state_dict(model.state_dict())
    plain.to("cuda:0")
    plan = dataclasses.replace(ON_GPU, checkpointed_blocks=4)
    stoker.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=plan)
    inputs = torch.randn(256, 16, device="cuda:0")
    for each in (model, plain):
        each(inputs).square().mean().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]

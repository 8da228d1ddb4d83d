"""What measures a GPU, real or simulated: rates, links, memory, a profile of kernels, moments of streams."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import nn

import stoker
from stoker.devices import attached_devices
from stoker.profiling.benchmark_calls import Call
from stoker.profiling.ceilings import measure_ceilings, stopwatch_for
from stoker.profiling.links import measure_links
from stoker.profiling.micro_benchmark import measure_operations
from stoker.profiling.plan_trial import try_plan
from stoker.records import Plan
from stoker.stepping.step_failures import free_bytes, reachable_bytes
from stoker.testing.simulated_gpu import is_simulated
from stoker.training.rank_times import StreamTimestamps
from tests.flow.builders import blobs_job
from tests.training.builders import SEPARABLE, datasets_of

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda:0")
ON_GPU = Plan(device="cuda:0", micro_batch=16, loader="memory")


def test_rates_of_products_and_copies() -> None:
    """Of each dtype that the GPU has, and of copies from the host."""
    found = measure_ceilings(attached_devices()[0], budget_s=0.2)
    assert {"fp32", "tf32", "bf16"} <= found.gemm_flops.keys()
    assert found.host_to_device_bytes_per_s is not None
    assert found.host_to_device_bytes_per_s > 0


def test_operations_and_the_time_to_start_them() -> None:
    """An operation in place among them, whose operands may not overlap; the host's time is that of a GPU's tensors."""
    aten = torch.ops.aten
    calls = [
        Call(aten.mm.default, lambda pool: ((pool.random(256, 512), pool.random(512, 256)), {})),
        Call(aten.add_.Tensor, lambda pool: ((pool.scratch(1024, 64), pool.random(1024, 64)), {})),
    ]
    found = measure_operations(attached_devices()[0], budget_s=1e6, calls=calls)
    assert [timing.operation.name for timing in found.timings] == ["mm", "add_"]
    assert all(timing.seconds > 0 for timing in found.timings)
    assert found.launch_s == found.host_s["forward"] > 0
    assert min(found.host_s["backward"], found.host_s["optimizer"], found.host_s["update"]) >= 0


@pytest.mark.skipif(is_simulated(), reason="a simulated GPU has no clock of its own")
def test_a_slow_host_does_not_make_operations_slow() -> None:
    """Those that are started late are timed as those that are queued."""
    watch = stopwatch_for(attached_devices()[0], time.perf_counter)
    tensor = torch.ones(2**24, device=GPU)

    def late() -> None:
        time.sleep(2e-4)
        tensor.add_(1.0)

    watch.seconds(late)
    soon = watch.seconds(lambda: tensor.add_(1.0), calls=20)
    assert watch.seconds(late, calls=20) < 2 * soon + 2e-5


@pytest.mark.skipif(torch.cuda.device_count() < 2 or is_simulated(), reason="needs two GPUs, of a GPU's speed")
def test_links_of_two_gpus() -> None:
    """By a process on each."""
    found = measure_links(attached_devices()[0], 2)
    assert found.name == "NCCL, this machine"
    assert {cost.collective for cost in found.costs} >= {"all-reduce", "all-gather"}


def test_a_trial_measures_the_peak_on_the_gpu() -> None:
    """At least weights, gradients and moments."""
    job = blobs_job()
    trial = try_plan(job, ON_GPU, SEPARABLE, datasets_of(job), budget_s=0.1)
    assert trial.peak_bytes > trial.state_bytes
    assert len(trial.update_s) >= 2


def test_free_and_reachable_memory() -> None:
    """What PyTorch holds unused counts as reachable."""
    held = torch.ones(2**20, device=GPU)
    free, reachable = free_bytes(GPU), reachable_bytes(GPU)
    assert free is not None
    assert reachable is not None
    assert reachable >= free + held.nbytes


def test_moments_of_a_stream_are_on_the_hosts_clock() -> None:
    """In the order in which they were taken; events are used again."""
    moments = StreamTimestamps(GPU)
    for _ in range(2):
        first, second, third = moments.seconds([moments.now(), moments.now(), moments.now()])
        assert first <= second <= third


def test_a_profile_of_a_run_names_kernels(tmp_path: Path) -> None:
    """And its report is written."""
    run = stoker.train(blobs_job(until=stoker.epochs(6)), plan=ON_GPU, run_dir=tmp_path / "run", profile=True,
                       sink=lambda _event: None)  # fmt: skip
    assert run.status == "finished"
    assert any((tmp_path / "run" / "profile").iterdir())


def test_a_loop_of_your_own_under_a_plan() -> None:
    """The model goes to the GPU, and updates are as on a CPU."""
    found = []
    for plan in (ON_GPU, Plan(device="cpu", micro_batch=16)):
        torch.manual_seed(0)
        model = nn.Linear(6, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loop = stoker.prepare(model, optimizer, plan=plan)
        for _ in range(3):
            inputs, targets = loop.to_device((torch.ones(16, 6), torch.zeros(16, dtype=torch.long)))
            with loop.autocast():
                loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert next(model.parameters()).device.type == torch.device(plan.device).type
        found.append(model.weight.detach().cpu())
    torch.testing.assert_close(*found)

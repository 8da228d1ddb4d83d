"""What measures a GPU, real or simulated: rates, links, exact products, memory, a profile, moments of streams."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import stoker
from stoker.devices import attached_devices
from stoker.errors import NoDevice
from stoker.pool.hardware_proof import LocalDevice, prove_hardware
from stoker.profiling.benchmark_calls import Call, OperandPool, ShapeLimits, prepare_call
from stoker.profiling.benchmark_compute import attention_calls
from stoker.profiling.ceilings import measure_ceilings, stopwatch_for
from stoker.profiling.integer_product import ProductHolder
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


def test_a_gpu_that_is_not_attached_is_not_measured() -> None:
    """The error says how many are; PyTorch's own would come amid the measurement."""
    count = torch.cuda.device_count()
    absent = dataclasses.replace(attached_devices()[0], index=count)
    with pytest.raises(NoDevice, match=f"cannot use cuda:{count} .*; it sees {count} CUDA devices"):
        measure_ceilings(absent, budget_s=0.2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_links_of_two_gpus() -> None:
    """By a process on each, which waits for its GPU: a large message takes longer than a small one."""
    found = measure_links(attached_devices()[0], 2)
    assert (found.name, found.world_size) == ("NCCL, this machine", 2)
    assert {cost.collective for cost in found.costs} == {
        "all-reduce",
        "all-gather",
        "reduce-scatter",
        "all-to-all",
        "point-to-point",
    }
    for cost in found.costs:
        (smallest, shortest_s), (largest, longest_s) = cost.measured[0], cost.measured[-1]
        assert largest > 1000 * smallest
        assert longest_s > shortest_s > 0
    assert 0 <= found.overlap <= 1
    assert (found.slowdown, found.waits) == ({}, ())  # of processes that share a CPU


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_links_of_more_gpus_than_there_are_cannot_be_measured() -> None:
    """What can is in the remedy."""
    count = torch.cuda.device_count()
    with pytest.raises(NoDevice, match=f"between {count + 1} GPUs cannot be measured: {count} are attached") as caught:
        measure_links(attached_devices()[0], count + 1)
    assert f"--on {count}xhere" in str(caught.value.remedy)


def test_integer_products_are_the_same_on_every_device() -> None:
    """Bit for bit, in fp32 whatever the order of summation: what a proof of hardware relies on."""
    holders = ProductHolder("cuda:0"), ProductHolder("cpu")
    assert all(holder.multiply(7, 300, 4096) > 0 for holder in holders)
    digests = [holder.row_digests(11) for holder in holders]
    assert digests[0] == digests[1]
    assert digests[0] != holders[0].row_digests(12)
    assert holders[0].rows([0, 299]) == holders[1].rows([0, 299])


def test_a_gpu_proves_that_it_is_there() -> None:
    """A process of its own multiplies on it, and NumPy finds the rows it asks for."""
    with LocalDevice() as device:
        proof = prove_hardware(device, memory_bytes=3 << 20, device="cuda:0")
    assert proof.is_passed, proof.why


def test_a_product_larger_than_the_gpu_is_an_answer() -> None:
    """A sentence, and the process goes on: it answers about a product that fits as one on a CPU does."""
    program = [sys.executable, "-m", "stoker.profiling.integer_product"]
    large = {"ask": "multiply", "seed": 1, "n": 1 << 25, "k": 8}
    questions = [
        {"ask": "multiply", "seed": 3, "n": 200, "k": 50},
        {"ask": "salt", "salt": 4},
        {"ask": "rows", "rows": [7]},
    ]
    answers = {}
    for device in ("cuda:0", "cpu"):
        lines = [json.dumps(question | {"device": device}) for question in [large, *questions]]
        ended = subprocess.run(program, input="\n".join(lines), capture_output=True, text=True, check=True)
        refused, *answers[device] = map(json.loads, ended.stdout.splitlines())
        assert "problem" in refused
        assert answers[device][0].pop("product_s") > 0
    assert answers["cuda:0"] == answers["cpu"]
    assert len(answers["cpu"]) == len(questions)


def test_attention_is_timed_by_the_flash_kernel_of_16_bits() -> None:
    """Forward and backward; there is none of fp32. A simulated GPU has no such kernel to run."""
    limits = ShapeLimits(1e9, 2**20)
    assert attention_calls(torch.float32, limits, 2, "cuda") == []
    calls = attention_calls(torch.bfloat16, limits, 2, "cuda")
    forward = torch.ops.aten._scaled_dot_product_flash_attention
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
    assert [call.function for call in calls] == 2 * [forward.default, backward.default]
    pool = OperandPool("cuda:0", 2**22)
    for call in [] if is_simulated() else calls:
        _, ((query, *_), _), result = prepare_call(call, pool)
        assert isinstance(result, tuple)
        assert result[0].shape == query.shape


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
    run = stoker.train(
        blobs_job(until=stoker.epochs(6)), plan=ON_GPU, run_dir=tmp_path / "run", profile=True, sink=lambda _event: None
    )
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

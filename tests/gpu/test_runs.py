"""Whole runs on a GPU, real or simulated: what a CPU learns is learned there, under every kind of plan."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stoker
from stoker.records import Plan
from stoker.testing.simulated_gpu import is_simulated, simulate_gpus
from stoker.zoo import GPT
from tests.flow.builders import Stopping, blobs_job

pytestmark = pytest.mark.gpu

ON_CPU = Plan(device="cpu", micro_batch=16)
ON_GPU = Plan(device="cuda:0", micro_batch=16, loader="memory")


def gpt_job(**changes: Any) -> stoker.Job:
    """A GPT of three blocks on random tokens: two epochs of four updates."""
    tokens = torch.randint(12, (64, 9), generator=torch.Generator().manual_seed(0))
    settings: dict[str, Any] = {
        "model": lambda: GPT(layers=3, width=32, heads=4, context=8, vocab=12),
        "data": (tokens[:, :-1].clone(), tokens[:, 1:].clone()), "loss": "token_cross_entropy",
        "optimizer": stoker.AdamW(lr=1e-3), "clip_norm": 1.0, "batch": 16, "until": stoker.epochs(2),
        "valid": stoker.holdout(0.25),
    }  # fmt: skip
    return stoker.Job(**(settings | changes))


def cnn_job(**changes: Any) -> stoker.Job:
    """A small network with batch norm, on images."""
    images = torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    settings: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(),
                                       nn.Linear(8 * 36, 2)),
        "data": (images, (images.mean((1, 2, 3)) > 0).long()), "loss": "cross_entropy",
        "optimizer": stoker.SGD(lr=0.05, momentum=0.9), "batch": 16, "until": stoker.epochs(2),
    }  # fmt: skip
    return stoker.Job(**(settings | changes))


def weights(job: stoker.Job, plan: Plan, folder: Path, **options: Any) -> torch.Tensor:
    """The weights after a run under a plan, in one vector."""
    run = stoker.train(
        job,
        plan=plan,
        on=plan.device,
        run_dir=folder / plan.device.replace(":", ""),
        sink=lambda _event: None,
        **options,
    )
    assert run.status == "finished"
    return torch.cat([tensor.flatten().float() for _, tensor in sorted(run.weights().items())])


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Norm of the difference over the norm."""
    return float((one - other).norm() / other.norm())


PLANS: dict[str, dict[str, Any]] = {
    "fp32": {}, "micro-batches": {"micro_batch": 4}, "checkpointed": {"checkpointed_blocks": 3},
    "loss in chunks": {"loss_chunks": 2}, "fused": {"optimizer_implementation": "fused"},
    "foreach": {"optimizer_implementation": "foreach"}, "captured": {"captured": True},
    "on the device": {"loader": "device"},
    "tf32": {"precision": "tf32"}, "bf16": {"precision": "bf16"}, "fp16": {"precision": "fp16"},
    "bf16 checkpointed": {"precision": "bf16", "checkpointed_blocks": 3, "micro_batch": 8},
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_a_gpu_learns_what_a_cpu_does(name: str, tmp_path: Path) -> None:
    """To rounding, under each kind of plan."""
    job = gpt_job(numerics=["fp16"])
    plan = dataclasses.replace(ON_GPU, **PLANS[name])
    limit = {"bf16": 1e-2, "fp16": 3e-3, "tf32": 3e-3}.get(plan.precision, 1e-4)
    assert distance(weights(job, plan, tmp_path), weights(job, ON_CPU, tmp_path)) < limit


@pytest.mark.parametrize("memory_format", ["contiguous", "channels_last"])
def test_batch_norm_and_convolutions(memory_format: str, tmp_path: Path) -> None:
    """Statistics are those of a CPU's run; dropout, which draws, is not compared."""
    plan = dataclasses.replace(ON_GPU, memory_format=memory_format)
    assert distance(weights(cnn_job(), plan, tmp_path), weights(cnn_job(), ON_CPU, tmp_path)) < 1e-4


@pytest.mark.parametrize("loader", ["inline", "workers"])
def test_items_reach_the_gpu_ahead(loader: str, tmp_path: Path) -> None:
    """Fetched one by one, here or by workers, and copied from pinned memory."""
    inputs, targets = blobs_job().data
    job = blobs_job(data=list(zip(inputs, targets.tolist(), strict=True)), model=lambda: nn.Linear(6, 2))
    plan = dataclasses.replace(ON_GPU, loader=loader, num_workers=1 if loader == "workers" else 0)
    on_cpu = dataclasses.replace(ON_CPU, loader="inline")
    assert distance(weights(job, plan, tmp_path), weights(job, on_cpu, tmp_path)) < 1e-5


def test_a_stopped_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """Dropout draws from the device's generator, which evaluation leaves as it was."""
    expected = weights(blobs_job(), ON_GPU, tmp_path / "straight")
    options: dict[str, Any] = {"plan": ON_GPU, "run_dir": tmp_path / "stopped"}
    assert stoker.train(blobs_job(), sink=Stopping(80), **options).status == "unfinished"
    run = stoker.train(blobs_job(), sink=lambda _event: None, **options)
    assert torch.equal(torch.cat([t.flatten() for _, t in sorted(run.weights().items())]), expected)


def test_a_run_is_planned_on_the_gpu_that_is_here(tmp_path: Path) -> None:
    """Plans are traced, tried and measured there, and the run takes its memory."""
    torch.cuda.init()
    torch.cuda.reset_peak_memory_stats(0)
    before = torch.cuda.max_memory_allocated(0)
    run = stoker.train(gpt_job(), on="cuda:0", run_dir=tmp_path / "run", sink=lambda _event: None)
    assert run.status == "finished"
    assert torch.cuda.max_memory_allocated(0) > before


def test_progress_has_the_memory_that_the_run_is_judged_by(tmp_path: Path) -> None:
    """What PyTorch allocated on the device, which holds weights and optimiser's state at least; not the process's."""
    found: list[Any] = []
    run = stoker.train(gpt_job(), plan=ON_GPU, run_dir=tmp_path / "run", sink=found.append)
    told = [event.fields["allocated_bytes"] for event in found if event.kind == "progress"]
    state = 3 * sum(tensor.numel() * tensor.element_size() for tensor in run.weights().values())
    assert told
    assert all(state < num_bytes <= found[-1].fields["peak_bytes"] for num_bytes in told)


@pytest.mark.skipif(not is_simulated(), reason="takes memory away from a GPU")
def test_an_update_that_runs_out_of_memory_is_made_in_smaller_pieces(tmp_path: Path) -> None:
    """And what is learned stays the same; the memory that progress has is no longer what ran out."""
    wide = gpt_job(model=lambda: GPT(layers=1, width=32, heads=4, context=8, vocab=12), until=stoker.epochs(1))
    expected = weights(wide, ON_GPU, tmp_path / "plenty")
    used = torch.cuda.max_memory_allocated(0) - torch.cuda.memory_allocated(0)
    try:
        simulate_gpus(torch.cuda.device_count(), memory_bytes=torch.cuda.memory_allocated(0) + int(0.8 * used))
        found: list[Any] = []
        run = stoker.train(wide, plan=ON_GPU, run_dir=tmp_path / "short", sink=found.append)
    finally:
        simulate_gpus(torch.cuda.device_count())
    assert [event.kind for event in found].count("replanned") >= 1
    told = [event.fields["allocated_bytes"] for event in found if event.kind == "progress"]
    assert told[-1] < found[-1].fields["peak_bytes"]
    assert distance(torch.cat([t.flatten() for _, t in sorted(run.weights().items())]), expected) < 1e-5

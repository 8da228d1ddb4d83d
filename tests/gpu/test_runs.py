"""Whole runs on a GPU, real or simulated: what a CPU learns is learned there, under every kind of plan."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import stoker
from stoker.devices import attached_devices
from stoker.errors import BadJob
from stoker.loading.order import generators_kept, seed_torch
from stoker.planning.resolved_job import resolve_job
from stoker.records import Event, Plan
from stoker.stepping.random_draws import OwnDraws
from stoker.stepping.torch_compile import compiler_missing
from stoker.store import RunDirectory
from stoker.testing.simulated_gpu import is_simulated, simulate_gpus
from stoker.training import train
from stoker.training.elastic.rendezvous import Rendezvous
from stoker.training.plan_in_force import PlanInForce, Replanned
from stoker.training.run import RunProcess
from stoker.units import MIB
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
        "data": (tokens[:, :-1].clone(), tokens[:, 1:].clone()),
        "loss": "token_cross_entropy",
        "optimizer": stoker.AdamW(lr=1e-3),
        "clip_norm": 1.0,
        "batch": 16,
        "until": stoker.epochs(2),
        "valid": stoker.holdout(0.25),
    }
    return stoker.Job(**(settings | changes))


def cnn_job(**changes: Any) -> stoker.Job:
    """A small network with batch norm, on images."""
    images = torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    settings: dict[str, Any] = {
        "model": lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 2)
        ),
        "data": (images, (images.mean((1, 2, 3)) > 0).long()),
        "loss": "cross_entropy",
        "optimizer": stoker.SGD(lr=0.05, momentum=0.9),
        "batch": 16,
        "until": stoker.epochs(2),
    }
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
    "fp32": {},
    "micro-batches": {"micro_batch": 4},
    "checkpointed": {"checkpointed_blocks": 3},
    "loss in chunks": {"loss_chunks": 2},
    "fused": {"optimizer_implementation": "fused"},
    "foreach": {"optimizer_implementation": "foreach"},
    "captured": {"captured": True},
    "on the device": {"loader": "device"},
    "tf32": {"precision": "tf32"},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "bf16 checkpointed": {"precision": "bf16", "checkpointed_blocks": 3, "micro_batch": 8},
    "bf16 checkpointed selectively": {"precision": "bf16", "checkpointed_blocks": 3, "checkpointing": "selective"},
}


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


class Overflowing(nn.Linear):
    """A layer that overflows in reduced precision, from the moment that `is_broken`."""

    is_broken = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The layer; infinite under autocast."""
        output = super().forward(inputs)
        return output / 0 if self.is_broken and self.training and torch.is_autocast_enabled("cuda") else output


def test_a_run_that_overflows_goes_on_in_fp32_from_its_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU notices it after the weights have moved: they come from the checkpoint, and memory is freed for them."""
    monkeypatch.setattr(Overflowing, "is_broken", False)
    found: list[Event] = []
    unused_bytes: dict[str, int] = {}

    def breaking(event: Event) -> None:
        found.append(event)
        if event.kind == "evaluated" and event.fields["samples"] >= 80:
            Overflowing.is_broken = True
            torch.empty(256 * MIB, dtype=torch.uint8, device="cuda:0")  # freed at once: PyTorch keeps it for others
        if event.kind in ("evaluated", "resumed"):
            unused_bytes[event.kind] = torch.cuda.memory_reserved(0) - torch.cuda.memory_allocated(0)

    job = blobs_job(
        model=lambda: nn.Sequential(Overflowing(6, 8), nn.ReLU(), nn.Linear(8, 2)), on_non_finite="roll_back"
    )
    plan = dataclasses.replace(ON_GPU, precision="bf16")
    run = stoker.train(job, plan=plan, run_dir=tmp_path / "run", sink=breaking)
    assert run.status == "finished"
    (change,) = (event.fields for event in found if event.kind == "replanned")
    assert (change["old"]["precision"], change["new"]["precision"]) == ("bf16", "fp32")
    assert [event.fields["samples"] for event in found if event.kind == "resumed"] == [80]
    assert unused_bytes["resumed"] < 128 * MIB
    assert all(weight.isfinite().all() for weight in run.weights().values())


@pytest.mark.skipif(not is_simulated(), reason="takes a GPU of 2018")
def test_tf32_on_a_gpu_without_it_is_refused(tmp_path: Path) -> None:
    """Its products would silently be in fp32; a loop of one's own is refused likewise."""
    plan = dataclasses.replace(ON_GPU, precision="tf32")
    message = r"precision is tf32, but cuda:0 has compute capability 7\.5; tf32 came with 8\.0"
    try:
        simulate_gpus(torch.cuda.device_count(), capability=(7, 5))
        with pytest.raises(BadJob, match=message):
            weights(blobs_job(), plan, tmp_path)
        model = nn.Linear(6, 2)
        with pytest.raises(BadJob, match=message):
            stoker.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=plan)
        assert model.weight.device.type == "cpu"
    finally:
        simulate_gpus(torch.cuda.device_count())


def test_kernels_for_a_gpu_need_triton_and_a_c_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one of C++, as kernels for a CPU do."""
    gpu = torch.device("cuda:0")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    if importlib.util.find_spec("triton") is None:
        assert "Triton" in str(compiler_missing(gpu))
        (tmp_path / "triton.py").touch()  # looked for, and not imported
        monkeypatch.syspath_prepend(tmp_path)
    for name in ("c++", "g++"):
        (tmp_path / name).touch(mode=0o700)
    assert compiler_missing(gpu) == "no C compiler is found here (looked for gcc, clang, cc)"
    (tmp_path / "gcc").touch(mode=0o700)
    assert compiler_missing(gpu) is None


def test_draws_of_its_own_leave_the_gpus_generator_where_it_was() -> None:
    """Of two processes with the same samples, each drops other positions of its part, and then the same ones again."""
    gpu, drawn = torch.device("cuda:0"), []
    for place in (0, 1):
        seed_torch(5, gpu)
        draws = OwnDraws(place, 0, gpu)
        draws.begin()
        own = torch.rand(64, device=gpu)
        draws.end()
        drawn.append((own, torch.rand(64, device=gpu)))
    (first, first_after), (second, second_after) = drawn
    assert not torch.equal(first, second)
    assert torch.equal(first_after, second_after)


def test_what_draws_from_the_gpus_generator_can_leave_it_where_it_was() -> None:
    """As the CPU's, whatever it is seeded with in between."""
    gpu = torch.device("cuda:0")
    seed_torch(6, gpu)
    expected = torch.rand(8, device=gpu).cpu(), torch.rand(8)
    seed_torch(6, gpu)
    with generators_kept():
        torch.rand(3, device=gpu)
        seed_torch(7, gpu)
    assert torch.equal(torch.rand(8, device=gpu).cpu(), expected[0])
    assert torch.equal(torch.rand(8), expected[1])


def test_processes_of_several_machines_find_the_gpus_of_theirs() -> None:
    """Twice as many processes as there are GPUs here, half of them on a machine like this one."""
    count = torch.cuda.device_count()
    meeting = Rendezvous(number=1, rank=0, size=2 * count, name="launched/0")
    place = train._place("cuda", meeting, {"LOCAL_WORLD_SIZE": str(count)})
    assert place is not None
    assert (place.device.kind, place.count, place.is_here) == ("cuda", 2 * count, True)


class Cramped(nn.Linear):
    """A layer that notes where it computes, and for which more than `most` samples at once are too many in training."""

    most = 10**9
    devices: ClassVar[set[str]] = set()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The layer, if there is room."""
        self.devices.add(str(self.weight.device))
        if torch.is_grad_enabled() and len(inputs) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return super().forward(inputs)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_process_that_is_left_alone_goes_on_on_its_own_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan names the first one's: when it begins, in a change due at once, and in one that it makes itself."""
    job, path = blobs_job(model=lambda: nn.Sequential(Cramped(6, 8), nn.ReLU(), nn.Linear(8, 2))), tmp_path / "run"
    assert stoker.train(job, plan=ON_GPU, run_dir=path, sink=Stopping(80)).status == "unfinished"
    directory = RunDirectory(path)
    plans = PlanInForce.of(directory)
    plans.change(Replanned(old=ON_GPU, new=dataclasses.replace(plans.plan, micro_batch=8), why="the others are gone"))
    process = RunProcess(resolve_job(job), directory, attached_devices()[1], plans, [directory.append_event])
    monkeypatch.setattr(Cramped, "most", 4)
    Cramped.devices.clear()
    assert train.run_to_end(process).status == "finished"
    assert Cramped.devices - {"meta", "cpu"} == {"cuda:1"}
    assert (plans.schedule.last.micro_batch, plans.schedule.last.device) == (4, "cuda:0")

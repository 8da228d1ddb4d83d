"""Two devices, what they were measured to reach, and a quiet machine around them."""

from __future__ import annotations

from dataclasses import replace

from stoker.cli.doctor import MachineConditions
from stoker.devices import CpuLoad, TorchBuild
from stoker.records import Ceilings, Device, MicroBenchmark, Operation, Timing

CPU = Device(
    name="cpu", kind="cpu", model="AMD EPYC", cores=2, memory_bytes=25_276_502_016, fast_dtypes=("fp32", "bf16", "int8")
)
GPU = Device(
    name="cuda:0",
    kind="cuda",
    model="NVIDIA H200",
    cores=132,
    memory_bytes=143771 * 2**20,
    fast_dtypes=("fp32", "tf32", "bf16", "fp16", "fp8", "int8"),
    driver="580.95.05",
)
ON_CPU = Ceilings(
    device=CPU,
    threads=2,
    gemm_flops={"fp32": 200e9, "bf16": 430e9},
    copy_bytes_per_s=50e9,
    fresh_copy_bytes_per_s=10e9,
    host_to_device_bytes_per_s=None,
    took_s=8.3,
    measured_at="2026-11-21T12:50:35+00:00",
    torch_version="2.13.0+cpu",
)
ON_GPU = replace(
    ON_CPU,
    device=GPU,
    threads=8,
    gemm_flops={"fp32": 50e12, "tf32": 400e12, "bf16": 791.6e12, "fp16": 750e12},
    copy_bytes_per_s=4.08e12,
    fresh_copy_bytes_per_s=4.0e12,
    host_to_device_bytes_per_s=54e9,
)
_NOTHING = Operation(name="relu", inputs=(), outputs=(), flops=0, bytes_read=0, bytes_written=0)
TIMED_ON_CPU = tuple(
    MicroBenchmark(
        device=CPU,
        threads=threads,
        timings=(Timing(operation=_NOTHING, seconds=1e-6),) * 3,
        launch_s=5e-6,
        took_s=20.0,
        measured_at="2026-11-21T12:50:35+00:00",
        torch_version="2.13.0+cpu",
    )
    for threads in (1, 2)
)
QUIET = MachineConditions(
    torch=TorchBuild("2.13.0+cpu", None),
    python="3.11.7",
    system="Linux 6.8.0 x86_64",
    machine_cpus=2,
    load=CpuLoad(0.01, 0.0),
    data={"Fashion-MNIST": "found in /data/fashion-mnist"},
)

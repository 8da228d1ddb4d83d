"""Measured links between processes on this machine: over gloo on CPUs, over NCCL on GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import torch

from stoker.errors import NoDevice, RunFailed
from stoker.records import Device
from stoker.records.hardware import Collective, LinkCost, Links, line_through

PATIENCE_S = 180.0
"""Longest time of a measurement [s]; some 10 s is usual."""

_WORKER = "stoker.profiling.link_worker"
_SPREAD = 1.15
"""Uncertainty of measured times [ratio]: two measurements on a quiet machine differ by as much."""


def measure_links(
    device: Device, count: int, *, threads: int = 1, now: Callable[[], datetime] = lambda: datetime.now(UTC)
) -> Links:
    """Let `count` processes measure their links, one on each GPU or all on this CPU.

    Args:
        device: an attached device; for GPUs, the first.
        count: number of processes, at least 2.
        threads: threads of each process on a CPU.
        now: reads the date.

    Raises:
        NoDevice: there are fewer GPUs.
        RunFailed: a process fails, or they do not find each other.
        ValueError: `count` is below 2.
    """
    if count < 2:
        raise ValueError(f"links are between at least 2 processes, got {count}")
    attached = torch.cuda.device_count() if device.kind == "cuda" else count
    if attached < count:
        raise NoDevice(
            f"links between {count} GPUs cannot be measured: {attached} are attached",
            remedy=f"Use --on {attached}xhere." if attached > 1 else "Use --on 2xcpu.",
        )
    started = time.perf_counter()
    links = _measured(device.kind, count, threads)
    costs = []
    for name in get_args(Collective):
        if name in links["collectives"]:
            points = tuple((int(size), float(seconds)) for size, seconds in links["collectives"][name])
            alpha_s, beta = line_through(points)
            costs.append(LinkCost(collective=name, alpha_s=alpha_s, beta_s_per_byte=beta, measured=points))
    return Links(
        name="gloo, this machine" if device.kind == "cpu" else "NCCL, this machine",
        world_size=count,
        costs=tuple(costs),
        basis="measured here",
        spread=_SPREAD,
        overlap=float(links["overlap"]),
        slowdown={str(name): float(ratio) for name, ratio in links["slowdown"].items()},
        waits=tuple((float(arithmetic_s), float(wait_s)) for arithmetic_s, wait_s in links["waits"]),
        took_s=time.perf_counter() - started,
        measured_at=now().isoformat(timespec="seconds"),
        torch_version=str(torch.__version__),
    )


def _measured(kind: str, count: int, threads: int) -> dict[str, Any]:
    """The result of the processes; raises RunFailed with the last line of the first one that fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    if kind == "cpu":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory(prefix="stoker-links-") as folder:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", _WORKER, str(rank), str(count), kind, str(threads), folder],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(count)
        ]
        until = time.monotonic() + PATIENCE_S
        try:
            for rank, process in enumerate(processes):
                _, errors = process.communicate(timeout=max(0.1, until - time.monotonic()))
                if process.returncode:
                    last = (errors.strip().splitlines() or ["no message"])[-1]
                    raise RunFailed(f"measuring links failed in process {rank}: {last}")
        except subprocess.TimeoutExpired:
            raise RunFailed(f"measuring links took more than {PATIENCE_S:.0f} s") from None
        finally:
            for process in processes:
                process.kill()
                process.communicate()
        found: dict[str, Any] = json.loads((Path(folder) / "found.json").read_text(encoding="utf-8"))
    return found

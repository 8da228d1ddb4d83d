"""What is around the devices of this machine, and what of it a user should mind."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from stoker.cli.readings import WORTHWHILE_RATIO
from stoker.devices import CpuLoad, TorchBuild, installed_torch, watch_cpu
from stoker.devices.load import MOST_OTHERS, MOST_STOLEN
from stoker.records import Ceilings, Device

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_THREAD_LIMIT = "OMP_THREAD_LIMIT"


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What is around the devices: software, data, other people's load, settings of the environment.

    `data` says for each known data set where it is, or what would happen (`Fashion-MNIST`: `found in ...`); `problems`
    is what stood in the way of using a device; `machine_cpus` counts the whole machine's logical CPUs.
    """

    torch: TorchBuild | None
    python: str
    system: str
    machine_cpus: int | None = None
    load: CpuLoad | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    data: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


def look_around(
    *,
    data: Mapping[str, str] | None = None,
    problems: Iterable[str] = (),
    load: CpuLoad | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Surroundings:
    """The surroundings now.

    Args:
        data: where each data set is, in words.
        problems: of the survey of devices.
        load: what others used of the CPUs during the measurement; if None, the next 0.3 s are watched.
        sleep: waits that time.
    """
    names = (*_THREAD_VARIABLES, _THREAD_LIMIT, "CUDA_VISIBLE_DEVICES")
    return Surroundings(
        torch=installed_torch(),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        machine_cpus=os.cpu_count(),
        load=watch_cpu(sleep=sleep) if load is None else load,
        environment={name: os.environ[name] for name in names if name in os.environ},
        data=dict(data or {}),
        problems=tuple(problems),
    )


def find_cautions(devices: Sequence[Device], ceilings: Sequence[Ceilings], around: Surroundings) -> tuple[str, ...]:
    """What to mind, each a sentence with its numbers and what to do."""
    cpu = next((device for device in devices if device.kind == "cpu"), None)
    found = [*around.problems, *_load_cautions(around.load)]
    if around.torch is None:
        found.append("PyTorch is not installed: install torch, then nothing else is missing.")
    if cpu is not None:
        found += _thread_cautions(around.environment, cpu.cores)
    found += [caution for measured in ceilings for caution in _ceiling_cautions(measured)]
    return tuple(found)


def _load_cautions(load: CpuLoad | None) -> list[str]:
    """Of other people's load."""
    found = []
    if load is not None and load.others > MOST_OTHERS:
        found.append(
            f"Other processes are using {load.others:.0%} of this CPU now: measured rates may be too low. "
            "Run `stoker doctor` again when they are done."
        )
    if load is not None and load.stolen > MOST_STOLEN:
        found.append(
            f"The host takes {load.stolen:.0%} of this virtual machine's CPU time: expect slower, uneven steps."
        )
    return found


def _thread_cautions(environment: Mapping[str, str], cores: int) -> list[str]:
    """Of variables that set numbers of threads. A plan sets PyTorch's itself, up to OMP_NUM_THREADS or `--threads`."""
    found = []
    for name in (*_THREAD_VARIABLES, _THREAD_LIMIT):
        value = environment.get(name, "")
        wanted = int(value) if value.isdigit() else 0
        if name == _THREAD_LIMIT and 0 < wanted < cores:
            found.append(f"{name}={value} keeps PyTorch on {value} of {cores} cores, whatever the plan says. Unset it.")
        elif name != _THREAD_LIMIT and wanted > cores:
            found.append(f"{name}={value} makes other libraries use more threads than the {cores} cores. Unset it.")
        elif name != _THREAD_LIMIT and 0 < wanted < cores:
            whom = "plans and other libraries" if name == "OMP_NUM_THREADS" else "other libraries"
            remedy = "`--threads` is stronger." if name == "OMP_NUM_THREADS" else "Unset it."
            found.append(f"{name}={value} keeps {whom} on {value} of {cores} cores. {remedy}")
    return found


def _ceiling_cautions(ceilings: Ceilings) -> list[str]:
    """Of measured rates that surprise."""
    found = []
    fp32 = ceilings.gemm_flops.get("fp32")
    for dtype in ("bf16", "fp16", "tf32"):
        rate = ceilings.gemm_flops.get(dtype)
        if rate and fp32 and dtype in ceilings.device.fast_dtypes and rate < WORTHWHILE_RATIO * fp32:
            found.append(
                f"{ceilings.device.model} multiplies {dtype} natively, yet its products reach only {rate / fp32:.1f}x "
                "of fp32: this build of PyTorch may not use the instructions."
            )
    if ceilings.device.kind == "cpu" and ceilings.threads < ceilings.device.cores:
        found.append(f"Measured with {ceilings.threads} of {ceilings.device.cores} cores.")
    return found

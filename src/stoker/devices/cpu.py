"""The CPU as a device: its model, the cores and memory this process may use, the dtypes it multiplies natively.

Flags and what they mean. x86: Intel 64 and IA-32 Architectures Software Developer's Manual, and AMD64 Architecture
Programmer's Manual. Arm: Linux kernel documentation, "ARM64 ELF hwcaps".
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Collection
from pathlib import Path

from stoker.devices.cgroups import Limits, read_limits
from stoker.records import Device

FLAGS_OF_FAST_DTYPES: dict[str, frozenset[str]] = {
    "bf16": frozenset({"avx512_bf16", "amx_bf16", "bf16"}),
    "fp16": frozenset({"avx512_fp16", "amx_fp16", "asimdhp"}),
    "int8": frozenset({"avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm"}),
}
"""Any one of these flags in `/proc/cpuinfo` means a native dot-product or multiply-add instruction for the dtype."""

_ARM_MODELS = {
    ("0x41", "0xd0c"): "Arm Neoverse N1",
    ("0x41", "0xd40"): "Arm Neoverse V1",
    ("0x41", "0xd49"): "Arm Neoverse N2",
    ("0x41", "0xd4f"): "Arm Neoverse V2",
}
"""`/proc/cpuinfo` of an Arm machine gives (implementer, part), no name. Source: Arm's core manuals, MIDR_EL1."""


def describe_cpu(
    *, cpuinfo: str, affinity: Collection[int], physical_bytes: int, limits: Limits, otherwise: str
) -> Device:
    """The CPU as this process may use it.

    Args:
        cpuinfo: content of `/proc/cpuinfo`; empty where there is none, and then only fp32 is known to be fast.
        affinity: numbers of the logical CPUs the process may run on.
        physical_bytes: the machine's memory; 0 where unknown.
        limits: the container's or batch system's.
        otherwise: name of the model where `cpuinfo` does not tell.

    Returns:
        A device with as many cores as threads can compute at once without sharing one: SMT siblings count once, and
        half a CPU of quota is not a core. `memory_bytes` is 0 where unknown.
    """
    processors = _processors(cpuinfo)
    return Device(
        name="cpu",
        kind="cpu",
        model=_model(processors) or otherwise or "unknown",
        cores=_usable_cores(processors, affinity, limits.cpus),
        memory_bytes=min(physical_bytes, limits.memory_bytes or physical_bytes),
        fast_dtypes=("fp32", *_reduced_dtypes(processors)),
    )


def attached_cpu() -> Device:
    """The CPU of this machine, now."""
    return describe_cpu(
        cpuinfo=_read("/proc/cpuinfo"),
        affinity=usable_cpus(),
        physical_bytes=_physical_bytes(),
        limits=read_limits(_read("/proc/self/cgroup"), Path("/sys/fs/cgroup")),
        otherwise=platform.processor() or platform.machine(),
    )


def usable_cpus() -> frozenset[int]:
    """Numbers of the logical CPUs this process may run on; all of them where the system cannot tell."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _processors(cpuinfo: str) -> list[dict[str, str]]:
    """One dictionary for each logical CPU of `/proc/cpuinfo`."""
    found: list[dict[str, str]] = []
    for line in cpuinfo.splitlines():
        key, colon, value = (part.strip() for part in line.partition(":"))
        if key == "processor":
            found.append({})
        if colon and found:
            found[-1][key] = value
    return found


def _model(processors: list[dict[str, str]]) -> str:
    """The model's name; empty where it is not told."""
    first = processors[0] if processors else {}
    arm = _ARM_MODELS.get((first.get("CPU implementer", ""), first.get("CPU part", "")), "")
    return " ".join(first.get("model name", arm).split())


def _reduced_dtypes(processors: list[dict[str, str]]) -> tuple[str, ...]:
    """The dtypes below fp32 that every one of the CPUs multiplies natively."""
    flags = [frozenset((cpu.get("flags") or cpu.get("Features") or "").split()) for cpu in processors]
    return tuple(
        dtype for dtype, marks in FLAGS_OF_FAST_DTYPES.items() if flags and all(marks & of_one for of_one in flags)
    )


def _usable_cores(processors: list[dict[str, str]], affinity: Collection[int], quota: float | None) -> int:
    """Cores that can compute at once: distinct ones within the affinity, cut to whole CPUs of the quota, at least 1."""
    place = {
        int(cpu["processor"]): (cpu["physical id"], cpu["core id"])
        for cpu in processors
        if "physical id" in cpu and "core id" in cpu
    }
    cores = {place.get(number, number) for number in affinity}
    return max(1, min(len(cores), math.floor(quota) if quota is not None else len(cores)))


def _physical_bytes() -> int:
    """Memory of the machine; 0 where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0


def _read(path: str) -> str:
    """The content of a file of the kernel's, empty on systems that have none."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""

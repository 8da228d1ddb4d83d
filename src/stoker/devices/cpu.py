"""What a container or a batch system lets this process use: limits of Linux control groups, versions 1 and 2.

Source: Linux kernel documentation, "Control Group v2" (`cpu.max`, `memory.max`), "CFS Bandwidth Control" and "Memory
Resource Controller" (version 1: `cpu.cfs_quota_us`, `memory.limit_in_bytes`).

The CPU as a device: its model, the cores and memory this process may use, the dtypes it multiplies natively.

Flags and what they mean. x86: Intel 64 and IA-32 Architectures Software Developer's Manual, and AMD64 Architecture
Programmer's Manual. Arm: Linux kernel documentation, "ARM64 ELF hwcaps".

How busy the CPU is with other people's work: what makes a measurement on this machine untrustworthy.

Source: proc(5), `/proc/stat`: time spent in each state, in ticks of 1/sysconf(_SC_CLK_TCK) s, for each logical CPU.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import platform
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from stoker.records import Device

_NO_LIMIT_BYTES = 2**60
"""Version 1 writes 'no limit' as the largest multiple of the page size in 63 bits."""


@dataclass(frozen=True)
class CgroupLimits:
    """The tightest limits on this process, None where unlimited: CPU time [CPUs, maybe 1.5] and memory."""

    cpus: float | None = None
    memory_bytes: int | None = None


def read_limits(membership: str, root: Path) -> CgroupLimits:
    """The limits that hold for a process, its own group's and those of all groups around it.

    Args:
        membership: content of `/proc/self/cgroup`; inside a container its paths may be the host's, and are then absent.
        root: where control groups are mounted, normally `/sys/fs/cgroup`.
    """
    quotas: list[float] = []
    memories: list[int] = []
    for directory in _group_directories(membership, root):
        quota = _cpu_quota(directory)
        if quota is not None:
            quotas.append(quota)
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = _number(directory / name)
            if limit is not None and limit < _NO_LIMIT_BYTES:
                memories.append(limit)
    return CgroupLimits(cpus=min(quotas, default=None), memory_bytes=min(memories, default=None))


def _group_directories(membership: str, root: Path) -> Iterator[Path]:
    """Every directory of a group the process is in, and of the groups around it; they may be absent."""
    for line in membership.splitlines():
        fields = line.split(":", 2)
        if len(fields) != 3:
            continue
        controllers, path = fields[1], PurePosixPath(fields[2])
        mounts = (
            [root / name for name in (controllers, *controllers.split(","))]
            if controllers
            else [root, root / "unified"]
        )
        for mount in dict.fromkeys(mounts):
            for group in (path, *path.parents):
                yield mount / str(group).lstrip("/")


def _cpu_quota(directory: Path) -> float | None:
    """CPU time a group may use per second of wall time, in CPUs; None where it is not limited or not said."""
    words = _text(directory / "cpu.max").split()
    if len(words) == 2 and words[0].isdigit() and words[1].isdigit():
        return int(words[0]) / int(words[1])
    quota, period = _number(directory / "cpu.cfs_quota_us"), _number(directory / "cpu.cfs_period_us")
    return quota / period if quota and period else None


def _number(path: Path) -> int | None:
    """The non-negative whole number in a file; None for `max`, `-1` or a file that is not there."""
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    """The content of a file, empty where it cannot be read: a controller that is not mounted sets no limit."""
    try:
        return path.read_text()
    except OSError:
        return ""


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
    *, cpuinfo: str, affinity: Collection[int], physical_bytes: int, limits: CgroupLimits, otherwise: str
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


MOST_OTHERS, MOST_STOLEN = 0.10, 0.05
"""Fractions above which measurements are not to be trusted: a thread that waits for a core holds up all the others, so
that a neighbour on half of two cores was seen to slow products of matrices 2 to 10 times."""


PARTLY_BUSY = 0.4
"""A neighbour that uses less than this share of a core leaves it to us; one that competes with us for it gets half."""


@dataclass(frozen=True)
class CpuSample:
    """Times since start-up on the CPUs this process may use [CPU-seconds]: busy, stolen by the host, and in all.

    `own_s` is what this process, its workers and the children it has waited for used [CPU-seconds].
    """

    busy_s: float
    stolen_s: float
    total_s: float
    own_s: float


@dataclass(frozen=True)
class CpuLoad:
    """Fractions [0 to 1] of the usable CPUs' time that went to other processes here, and to the host's other guests."""

    others: float
    stolen: float

    @property
    def is_quiet(self) -> bool:
        """Whether what is measured under this load may be kept: `others` up to 10 %, `stolen` up to 5 %."""
        return self.others <= MOST_OTHERS and self.stolen <= MOST_STOLEN


def parse_stat(stat: str, cpus: Collection[int], *, ticks_per_s: int, own_s: float) -> CpuSample | None:
    """A sample from the text of `/proc/stat`, of the CPUs numbered in `cpus`; None if none of them is listed."""
    busy = stolen = total = 0
    for line in stat.splitlines():
        name, *ticks = line.split() or [""]
        if not (name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cpus):
            continue
        # Guest time (the ninth and tenth number) is already counted as user time.
        user, nice, system, idle, iowait, irq, softirq, steal = (int(t) for t in (ticks[:8] + ["0"] * 8)[:8])
        busy += user + nice + system + irq + softirq
        stolen += steal
        total += user + nice + system + irq + softirq + steal + idle + iowait
    if total == 0:
        return None
    return CpuSample(busy / ticks_per_s, stolen / ticks_per_s, total / ticks_per_s, own_s)


def load_between(before: CpuSample, after: CpuSample) -> CpuLoad:
    """What others used of the CPUs between two samples; ticks are coarse, so a tenth of a second or more apart."""
    total = after.total_s - before.total_s
    if total <= 0:
        return CpuLoad(0.0, 0.0)
    own = after.own_s - before.own_s
    others = (after.busy_s - before.busy_s - own) / total
    stolen = (after.stolen_s - before.stolen_s) / total
    return CpuLoad(others=min(1.0, max(0.0, others)), stolen=min(1.0, max(0.0, stolen)))


def others_cores(before: CpuSample, after: CpuSample, elapsed_s: float) -> float:
    """CPUs that others, the host's other guests among them, used on average in the `elapsed_s` seconds between."""
    if elapsed_s <= 0:
        return 0.0
    load = load_between(before, after)
    return (load.others + load.stolen) * (after.total_s - before.total_s) / elapsed_s


def free_cores(cpus: float, others: float) -> int:
    """How many threads find a core each, of `cpus` CPUs of which other processes use `others`; at least 1.

    >>> free_cores(2, 0.3), free_cores(2, 1.8), free_cores(8, 3.5)
    (2, 1, 4)
    """
    return max(1, math.floor(cpus - others + PARTLY_BUSY))


def sample_cpu() -> CpuSample | None:
    """A sample now; None on systems without `/proc/stat`."""
    try:
        stat = Path("/proc/stat").read_text()
    except OSError:
        return None
    spent = os.times()
    own_s = spent.user + spent.system + spent.children_user + spent.children_system
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    return parse_stat(stat, usable_cpus(), ticks_per_s=ticks_per_s, own_s=own_s + _children_ticks() / ticks_per_s)


def ticks_of(stat: str) -> int:
    """User and system time in the text of `/proc/PID/stat`, with that of children waited for [ticks].

    >>> ticks_of("7 (a (very) odd name) S 1 7 7 0 -1 4194304 100 0 0 0 30 4 2 1 20 0")
    37
    """
    fields = stat.rpartition(")")[2].split()  # the name may hold anything; the third field follows it
    return sum(map(int, fields[11:15]))


def _children_ticks() -> int:
    """What running children that Python's multiprocessing started have used, such as loader workers."""
    total = 0
    for child in multiprocessing.active_children():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            total += ticks_of(Path(f"/proc/{child.pid}/stat").read_text())
    return total


def watch_cpu(duration_s: float = 0.3, sleep: Callable[[float], None] = time.sleep) -> CpuLoad | None:
    """What others use of the CPUs during the next `duration_s` seconds; None on systems that do not tell."""
    before = sample_cpu()
    sleep(duration_s)
    after = sample_cpu()
    return load_between(before, after) if before and after else None

"""The CPU as a device: model, usable cores and memory, native dtypes; and its load by other processes.

Cores and memory are limited by the control groups of containers and batch systems, versions 1 and 2. Load by others
makes measurements on this machine untrustworthy.

Sources: Linux kernel documentation, "Control Group v2" (`cpu.max`, `memory.max`), "CFS Bandwidth Control" and "Memory
Resource Controller" (version 1: `cpu.cfs_quota_us`, `memory.limit_in_bytes`). Flags: Intel 64 and IA-32 Architectures
Software Developer's Manual; AMD64 Architecture Programmer's Manual; Linux kernel documentation, "ARM64 ELF hwcaps".
Load: proc(5), `/proc/stat`: time in each state for each logical CPU, in ticks of 1/sysconf(_SC_CLK_TCK) s.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import platform
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from stoker.records import Device

_NO_LIMIT_BYTES = 2**60
"""Version 1 writes 'no limit' as the largest multiple of the page size in 63 bits."""


@dataclass(frozen=True)
class CgroupLimits:
    """The tightest limits on this process, None if unlimited: CPU time [CPUs, such as 1.5] and memory [bytes]."""

    cpus: float | None = None
    memory_bytes: int | None = None


def read_limits(membership: str, root: Path) -> CgroupLimits:
    """The limits on a process by its own group and all parent groups.

    Args:
        membership: content of `/proc/self/cgroup`; inside a container its paths may be the host's, and are then absent.
        root: mount point of control groups, normally `/sys/fs/cgroup`.
    """
    quotas: list[float] = []
    memories: list[int] = []
    for directory in filter(os.path.isdir, _group_directories(membership, root)):
        quota = _cpu_quota(directory)
        if quota is not None:
            quotas.append(quota)
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = _number(directory / name)
            if limit is not None and limit < _NO_LIMIT_BYTES:
                memories.append(limit)
    return CgroupLimits(cpus=min(quotas, default=None), memory_bytes=min(memories, default=None))


def _group_directories(membership: str, root: Path) -> Iterator[Path]:
    """Directories of the process's groups and of their parents; they may be absent."""
    for line in membership.splitlines():
        fields = line.split(":", 2)
        if len(fields) != 3:
            continue
        controllers, path = fields[1], PurePosixPath(fields[2])
        if controllers and not {"cpu", "memory"} & set(controllers.split(",")):
            continue  # a hierarchy of version 1 with other limits
        mounts = (
            [root / name for name in (controllers, *controllers.split(","))]
            if controllers
            else [root, root / "unified"]
        )
        for mount in dict.fromkeys(mounts):
            for group in (path, *path.parents):
                yield mount / str(group).lstrip("/")


def _cpu_quota(directory: Path) -> float | None:
    """CPU time a group may use per second of wall time [CPUs]; None if not limited."""
    fields = _text(directory / "cpu.max").split()
    if len(fields) == 2 and fields[0].isdigit() and fields[1].isdigit():
        return int(fields[0]) / int(fields[1])
    quota, period = _number(directory / "cpu.cfs_quota_us"), _number(directory / "cpu.cfs_period_us")
    return quota / period if quota and period else None


def _number(path: Path) -> int | None:
    """The non-negative integer in a file; None for `max`, `-1` or a missing file."""
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    """The content of a file of the kernel's; empty if it cannot be read, as on systems without it."""
    try:
        return path.read_text()
    except OSError:
        return ""


FLAGS_OF_FAST_DTYPES: dict[str, frozenset[str]] = {
    "bf16": frozenset({"avx512_bf16", "amx_bf16", "bf16"}),
    "fp16": frozenset({"avx512_fp16", "amx_fp16", "asimdhp"}),
    "int8": frozenset({"avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm"}),
}
"""Any of these flags in `/proc/cpuinfo` means a native dot-product or multiply-add instruction for the dtype."""

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
        cpuinfo: content of `/proc/cpuinfo`; if empty, only fp32 counts as fast.
        affinity: numbers of the logical CPUs the process may run on.
        physical_bytes: the machine's memory [bytes]; 0 if unknown.
        limits: of the container or batch system.
        otherwise: name of the model if `cpuinfo` does not say.

    Returns:
        A device with as many cores as threads can compute at once without sharing one: SMT siblings count once, and
        half a CPU of quota is not a core. `memory_bytes` is 0 if unknown.
    """
    processors: list[dict[str, str]] = []
    for line in cpuinfo.splitlines():
        key, colon, value = (part.strip() for part in line.partition(":"))
        if key == "processor":
            processors.append({})
        if colon and processors:
            processors[-1][key] = value
    first = processors[0] if processors else {}
    arm = _ARM_MODELS.get((first.get("CPU implementer", ""), first.get("CPU part", "")), "")
    flags = [frozenset((cpu.get("flags") or cpu.get("Features") or "").split()) for cpu in processors]
    reduced = [dtype for dtype, marks in FLAGS_OF_FAST_DTYPES.items() if flags and all(marks & own for own in flags)]
    core_of = {
        int(cpu["processor"]): (cpu["physical id"], cpu["core id"])
        for cpu in processors
        if "physical id" in cpu and "core id" in cpu
    }
    num_cores = len({core_of.get(number, number) for number in affinity})
    quota = num_cores if limits.cpus is None else math.floor(limits.cpus)
    return Device(
        name="cpu",
        kind="cpu",
        model=" ".join(first.get("model name", arm).split()) or otherwise or "unknown",
        cores=max(1, min(num_cores, quota)),
        memory_bytes=min(physical_bytes, limits.memory_bytes or physical_bytes),
        fast_dtypes=("fp32", *reduced),
    )


def attached_cpu() -> Device:
    """The CPU of this machine, now."""
    return describe_cpu(
        cpuinfo=_text(Path("/proc/cpuinfo")),
        affinity=usable_cpus(),
        physical_bytes=_physical_bytes(),
        limits=read_limits(_text(Path("/proc/self/cgroup")), Path("/sys/fs/cgroup")),
        otherwise=platform.processor() or platform.machine(),
    )


def usable_cpus() -> frozenset[int]:
    """Numbers of the logical CPUs this process may run on; all of them if the system does not say."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _physical_bytes() -> int:
    """Memory of the machine [bytes]; 0 if the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0


MOST_OTHERS, MOST_STOLEN = 0.10, 0.05
"""Fractions above which measurements are not trusted [0 to 1]: a thread that waits for a core delays all the others. A
neighbour on half of two cores slowed matrix products 2 to 10 times."""

PARTLY_BUSY = 0.4
"""A neighbour that uses less than this share of a core leaves it to us [0 to 1]; one that competes gets half."""


@dataclass(frozen=True)
class CpuSample:
    """Times since start-up on the CPUs this process may use [CPU-seconds]: busy, stolen by the host, and total.

    `own_s` was used by this process, its workers and the children it has waited for [CPU-seconds].
    """

    busy_s: float
    stolen_s: float
    total_s: float
    own_s: float


@dataclass(frozen=True)
class CpuLoad:
    """Fractions of the usable CPUs' time used by other processes here, and by the host's other guests [0 to 1]."""

    others: float
    stolen: float

    @property
    def is_quiet(self) -> bool:
        """True if measurements under this load may be kept: `others` up to 10 %, `stolen` up to 5 %."""
        return self.others <= MOST_OTHERS and self.stolen <= MOST_STOLEN


def parse_stat(stat: str, cpus: Collection[int], *, ticks_per_s: int, own_s: float) -> CpuSample | None:
    """A sample from the text of `/proc/stat` for the CPUs numbered in `cpus`; None if none of them is listed."""
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
    """Load by others between two samples; ticks are coarse, so take them at least 0.1 s from each other."""
    total = after.total_s - before.total_s
    if total <= 0:
        return CpuLoad(0.0, 0.0)
    own = after.own_s - before.own_s
    others = (after.busy_s - before.busy_s - own) / total
    stolen = (after.stolen_s - before.stolen_s) / total
    return CpuLoad(others=min(1.0, max(0.0, others)), stolen=min(1.0, max(0.0, stolen)))


def others_cores(before: CpuSample, after: CpuSample, elapsed_s: float) -> float:
    """Average load by other processes and guests in the `elapsed_s` seconds between two samples [CPUs]."""
    if elapsed_s <= 0:
        return 0.0
    load = load_between(before, after)
    return (load.others + load.stolen) * (after.total_s - before.total_s) / elapsed_s


def free_cores(cpus: float, others: float) -> int:
    """Number of threads that get a core each [cores], of `cpus` CPUs of which other processes use `others`; at least 1.

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
    own_s += cpu_s_of(child.pid for child in multiprocessing.active_children())  # such as loader workers
    return parse_stat(stat, usable_cpus(), ticks_per_s=os.sysconf("SC_CLK_TCK"), own_s=own_s)


def process_stat(pid: int | None) -> list[str]:
    """What the kernel says of a process, from its state on; empty if it is gone, or the system says nothing.

    Source: proc(5), /proc/pid/stat: the state is field 3. Before it stands the name, which is any bytes.
    """
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return []


def cpu_s_of(pids: Iterable[int | None]) -> float:
    """CPU time of processes, and of those of their children that have ended [s]; 0 where the system says nothing."""
    ticks = sum(int(number) for pid in pids for number in process_stat(pid)[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def watch_cpu(duration_s: float = 0.3, sleep: Callable[[float], None] = time.sleep) -> CpuLoad | None:
    """Load by others during the next `duration_s` seconds; None on systems without `/proc/stat`."""
    before = sample_cpu()
    sleep(duration_s)
    after = sample_cpu()
    return load_between(before, after) if before and after else None

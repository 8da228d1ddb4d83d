"""How busy the CPU is with other people's work: what makes a measurement on this machine untrustworthy.

Source: proc(5), `/proc/stat`: time spent in each state, in ticks of 1/sysconf(_SC_CLK_TCK) s, for each logical CPU.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from stoker.devices.cpu import usable_cpus

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

"""The bottleneck of a run, the profile of its operations, and the times of each of its processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from stoker.records.plan import Estimate, Share

Bound = Literal[
    "data", "host launch", "memory bandwidth", "arithmetic", "copies", "checkpoints", "evaluation", "unknown"
]
"""The resource that a run waits for most: samples; the host, which starts operations; bytes across the device's memory;
products; the batch's copy to the device; checkpoints; evaluations; or unknown."""


@dataclass(frozen=True, kw_only=True)
class Achieved:
    """A rate that training reached, in `unit` (`FLOP/s` or `bytes/s`), and the device's ceiling.

    `ceiling` is measured on this device, never a datasheet's; None if it was not measured.
    """

    what: str
    value: float
    unit: str
    ceiling: float | None = None

    @property
    def fraction(self) -> float | None:
        """Share of the ceiling [fraction]; None if that is unknown."""
        return self.value / self.ceiling if self.ceiling else None


@dataclass(frozen=True, kw_only=True)
class Bottleneck:
    """The bottleneck of a run, in one `sentence`.

    `shares` are the training time [s] by what it waited for, largest first: those within an update are forecast for its
    operations and scaled to the measured time. `mfu` is the share of time that the model's own arithmetic would take at
    the measured ceilings, without recomputation [fraction]; None if it is unknown, or would be above 1. `advice` is the
    change that would help most, `gain` the share of the training time that it would save [fraction] (None: unknown).
    `problems` are figures that cannot be true, as text.
    """

    schema: ClassVar[int] = 1
    bound_by: Bound
    sentence: str
    shares: tuple[Share, ...]
    achieved: tuple[Achieved, ...]
    mfu: float | None
    evidence: tuple[str, ...]
    advice: str
    gain: Estimate | None
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One operation from one of the user's lines, over all profiled updates.

    `phase` is the range it ran in: `data`, `gradient`, `forward`, `backward`, `update`, or `other` (none of them).
    `device_s` is the time of its own kernels on a GPU; `host_s` is its time on a CPU, or on the host of a GPU, without
    the operations it calls [s]. `flops_per_s` is the rate of its products and convolutions (None: it has none that are
    counted).
    """

    operation: str
    where: str
    phase: str
    calls: int
    host_s: float
    device_s: float
    flops_per_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class KernelTable:
    """Operations of `updates` updates from number `first_update` (from 0) on, by time, largest first.

    The profiler slows the profiled updates down: use shares, not seconds. `peak_bytes` is the peak of memory allocated
    on the device since the profile began, and `peak_shares` [bytes] its live parts, by operation and line. `files` are
    names within the run's profile directory, by kind.
    """

    schema: ClassVar[int] = 1
    device: str
    first_update: int
    updates: int
    kernels: tuple[Kernel, ...]
    peak_bytes: int
    peak_shares: tuple[Share, ...]
    files: dict[str, str]

    @property
    def is_on_gpu(self) -> bool:
        """True if times are those of kernels on a GPU, not the host's."""
        return any(kernel.device_s > 0 for kernel in self.kernels)

    def seconds(self, kernel: Kernel) -> float:
        """Time that an operation is ranked by [s]."""
        return kernel.device_s if self.is_on_gpu else kernel.host_s

    @property
    def total_s(self) -> float:
        """Time of all operations [s]."""
        return sum(self.seconds(kernel) for kernel in self.kernels)


PARTS = ("compute", "blocked", "optimiser", "data", "evaluation", "checkpoint", "other")
"""Parts of a process's time; `blocked` is all time that it waits for other processes."""


FIRST_IN_FULL = 20
"""Number of first updates after a rendezvous that are all kept in full; they are the slow ones."""


@dataclass(frozen=True, kw_only=True)
class SampledUpdates:
    """Some updates in full, one entry of each column per update; all but `update` in seconds.

    `began_s` is by the clock of rank 0 (see `RankTimes.uncertainty_s`), `data_s` the wait for the batch before it. If a
    layout communicates within its passes, `compute_s` is without that: without waiting, the process would have ended at
    `began_s + compute_s`.
    """

    schema: ClassVar[int] = 1
    update: tuple[int, ...] = ()
    began_s: tuple[float, ...] = ()
    data_s: tuple[float, ...] = ()
    compute_s: tuple[float, ...] = ()
    blocked_s: tuple[float, ...] = ()
    optimiser_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        columns = (self.began_s, self.data_s, self.compute_s, self.blocked_s, self.optimiser_s)
        if any(len(column) != len(self.update) for column in columns):
            raise ValueError(f"every column must have {len(self.update)} entries, as `update` has")


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """Times of process number `rank` of `size` that trained together from update `first_update` on.

    Processes of one rendezvous have the same `began_at` [seconds since 1970]; there is a new one after a process was
    lost or came back. `worker` is the process's number across them. `parts_s` sums over all `updates`, by the names
    PARTS; `sample` has the first updates and then one at regular intervals. Clocks of different hosts are compared
    once: `uncertainty_s` is the possible difference to that of rank 0 [s], 0 on the same host.
    """

    schema: ClassVar[int] = 1
    rank: int
    size: int
    worker: int
    host: str
    began_at: float
    first_update: int
    updates: int
    uncertainty_s: float = 0.0
    parts_s: dict[str, float] = field(default_factory=dict)
    sample: SampledUpdates = SampledUpdates()

    @property
    def file_name(self) -> str:
        """Its file, among those of all processes and rendezvous of a run."""
        return f"{self.first_update:09}-{self.rank}.json"

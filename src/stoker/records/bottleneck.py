"""What bounds a run, what shows it, and the one change that would help most.

What a profiled stretch of training was made of: operations by the user's lines, and memory at its peak.

Where the time of updates went on one process of several, as that process noted it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from stoker.records.estimate import Estimate
from stoker.records.plan import Share

Bound = Literal[
    "data", "host launch", "memory bandwidth", "arithmetic", "copies", "checkpoints", "evaluation", "unknown"
]
"""What a run waits for most: samples; the host, which starts operations; bytes to cross the device's memory; products;
the batch to cross to the device; checkpoints; evaluations; or nobody knows."""


@dataclass(frozen=True, kw_only=True)
class Achieved:
    """A rate that training reached, in `unit` (`FLOP/s` or `bytes/s`), beside what the device reaches at nothing else.

    `ceiling` is measured on this device, never a datasheet's; None where it was not measured.
    """

    what: str
    value: float
    unit: str
    ceiling: float | None = None

    @property
    def fraction(self) -> float | None:
        """Of the ceiling; None where that is not known."""
        return self.value / self.ceiling if self.ceiling else None


@dataclass(frozen=True, kw_only=True)
class Bottleneck:
    """What bounds a run, in one `sentence`.

    `shares` are the training time [s] by what it waited for, the largest first: those of an update's inside are
    forecast for its operations and scaled to what updates took. `mfu` is the share of time that the model's own
    arithmetic would take at the measured ceilings, recomputation left out [fraction]; None where it is not known, or
    would be above 1.
    `advice` is the change that would help most, `gain` the share of the training time that it would save [fraction]
    (None: nobody knows). `problems` are figures that cannot be true, in words.
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
    """One operation from one line of the user's, over all profiled updates.

    `phase` is the range it ran in: `data`, `gradient`, `forward`, `backward`, `update`, or `beside` them. `device_s` is
    the time of the kernels that it started itself on a GPU; on a CPU, and on the host of a GPU, it takes `host_s`
    without the operations it calls [s]. `flops_per_s` are of its products and convolutions alone (None: it has
    none that are counted).
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
    """Operations of `updates` updates from number `first_update` (from 0) on, the most time first.

    Times are of the profiled stretch, which the profiler slows down: shares are of use, seconds are not the run's.
    `peak_bytes` is the most that was allocated on the device beyond what was there when the profile began, and
    `peak_shares` [bytes] are what of it was alive, by operation and line. `files` are names within the run's profile
    directory, by what they are.
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
        """Whether times are the kernels' on a GPU, not the host's."""
        return any(kernel.device_s > 0 for kernel in self.kernels)

    def seconds(self, kernel: Kernel) -> float:
        """The time an operation is ranked by [s]."""
        return kernel.device_s if self.is_on_gpu else kernel.host_s

    @property
    def total_s(self) -> float:
        """The time of all operations [s]."""
        return sum(self.seconds(kernel) for kernel in self.kernels)


PARTS = ("compute", "blocked", "optimiser", "data", "evaluation", "checkpoint", "other")
"""What a process does in its time; `blocked` is all time in which it could not go on without the others."""


FIRST_IN_FULL = 20
"""The first updates after processes met, all of which are kept in full; they are the slow ones."""


@dataclass(frozen=True, kw_only=True)
class SampledUpdates:
    """Some updates in full, one entry of each column for each of them; all but `update` in seconds.

    `began_s` is by the clock of the first process (see `RankTimes.uncertainty_s`), `data_s` the wait for the batch
    before it. Where a layout communicates within its passes, `compute_s` is without that: the process would have been
    done at `began_s + compute_s`, had it never waited.
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

    Processes that met have the same `began_at` [seconds since 1970]; after one was lost, or came back, those that are
    left meet anew. `worker` is the process by the number that it keeps meanwhile. `parts_s` sums over all `updates`, by
    the names PARTS; `sample` has the first ones and then every so many. Clocks of different hosts are compared once:
    `uncertainty_s` is how far this one may be off the first process's [s], 0 on the same host.
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
        """The file for it, among those of all processes and all meetings of a run."""
        return f"{self.first_update:09}-{self.rank}.json"

"""What a profiled stretch of training was made of: operations by the user's lines, and memory at its peak."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from stoker.records.plan import Share


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

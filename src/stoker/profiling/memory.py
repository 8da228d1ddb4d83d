"""Peak memory of a stretch of work: allocated on a GPU, resident of the whole process on a CPU."""

from __future__ import annotations

import contextlib
import resource
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")
_SAMPLING_S = 0.02


class PeakMemory:
    """Within its block, watches memory; `num_bytes` afterwards is the peak.

    On Linux the kernel's own high-water mark is reset before and read after; where that is not allowed, the process's
    resident size is sampled every 20 ms, and elsewhere it is the peak since the process began.
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._done = threading.Event()
        self._sampler: threading.Thread | None = None
        self._sampled = 0
        self.num_bytes = 0

    def __enter__(self) -> Self:
        """Begin to watch."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        elif _STATUS.exists() and not _reset_high_water():
            self._sampler = threading.Thread(target=self._sample, daemon=True)
            self._sampler.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Read the peak."""
        self._done.set()
        if self._device.type == "cuda":
            self.num_bytes = torch.cuda.max_memory_allocated(self._device)
        elif self._sampler is not None:
            self._sampler.join()
            self.num_bytes = self._sampled
        elif _STATUS.exists():
            self.num_bytes = _status_bytes("VmHWM")
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            self.num_bytes = peak if sys.platform == "darwin" else peak * 1024

    def _sample(self) -> None:
        while not self._done.wait(_SAMPLING_S):
            self._sampled = max(self._sampled, _status_bytes("VmRSS"))
        self._sampled = max(self._sampled, _status_bytes("VmRSS"))


def _reset_high_water() -> bool:
    with contextlib.suppress(OSError):
        _RESET.write_text("5", encoding="ascii")
        return True
    return False


def _status_bytes(name: str) -> int:
    for line in _STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0

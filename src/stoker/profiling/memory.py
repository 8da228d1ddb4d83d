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
    """Within its block, watches memory; `num_bytes` is the peak so far, and afterwards that of the block.

    On Linux the kernel's own high-water mark is reset before and read after; where that is not allowed, the process's
    resident size is sampled every 20 ms, and elsewhere it is the peak since the process began.
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._done = threading.Event()
        self._sampler: threading.Thread | None = None
        self._sampled = 0
        self._num_bytes: int | None = None

    @property
    def num_bytes(self) -> int:
        """The peak [bytes]: so far, or of the whole block once it is left."""
        return self._read() if self._num_bytes is None else self._num_bytes

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
        """Keep the peak."""
        self._done.set()
        if self._sampler is not None:
            self._sampler.join()
        self._num_bytes = self._read()

    def _read(self) -> int:
        """The peak so far."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        if self._sampler is not None:
            return max(self._sampled, _status_bytes("VmRSS"))
        if _STATUS.exists():
            return _status_bytes("VmHWM")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

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

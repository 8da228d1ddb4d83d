"""How long a thread is held up by messages of other processes, wherever in a pass it waits for them.

What: PyTorch's two doors to waiting, `Work.wait` and `wait_tensor`, are timed while somebody watches. Through them go
the collectives of FSDP2, tensor parallel and pipelines on a CPU, and all blocking calls of `torch.distributed`.
Use when: processes talk over gloo. Costs: two clock readings a wait. Does not see: waits in C++ (the end of
DistributedDataParallel's backward pass: see `noted` in `stepping/layouts/base.py`), and nothing under NCCL, where the
stream waits and the host goes on. If PyTorch ever refuses the exchange, `is_watching` stays False and all is 0.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.distributed._functional_collectives as functional


class Waits:
    """Counts the seconds that the thread which starts it spends in waits."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.total_s = 0.0
        self._clock = clock
        self.is_watching = False
        self._thread = 0
        self._wait: Any = None
        self._wait_tensor: Any = None

    def start(self) -> None:
        """Watch from now on; one watcher at a time."""
        if self.is_watching or not dist.is_available():
            return
        self._thread = threading.get_ident()
        self._wait, self._wait_tensor = dist.Work.wait, functional.wait_tensor
        try:
            dist.Work.wait = self._timed(self._wait)  # type: ignore[method-assign]  # as long as somebody watches
        except (TypeError, AttributeError):
            return
        functional.wait_tensor = self._timed(self._wait_tensor)
        self.is_watching = True

    def stop(self) -> None:
        """Leave PyTorch as it was found."""
        if self.is_watching:
            dist.Work.wait = self._wait  # type: ignore[method-assign]  # see `start`
            functional.wait_tensor = self._wait_tensor
            self.is_watching = False

    def _timed(self, wait: Any) -> Any:
        clock, thread_of = self._clock, threading.get_ident

        def timed(*arguments: Any, **settings: Any) -> Any:
            began = clock()
            try:
                return wait(*arguments, **settings)
            finally:
                if thread_of() == self._thread:
                    self.total_s += clock() - began

        return timed

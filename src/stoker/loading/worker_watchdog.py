"""A loader's worker ends when its trainer is gone, also if that was killed before the worker was set up.

What: a worker of PyTorch's DataLoader ends once its parent is another process than the one that it had when it was set
up. If the trainer was killed before that, its parent stays the same for ever, and so does the worker. Here it watches
the trainer.
It stands on a private part of PyTorch; where that is missing, PyTorch's own watch is what there is.
Source: PyTorch 2.13, torch/utils/data/_utils/worker.py, `ManagerWatchdog`.
"""

from __future__ import annotations

import sys
from typing import Any

from torch.utils.data import _utils

_WORKER: Any = getattr(_utils, "worker", None)
_CAN_WATCH = sys.platform == "linux" and hasattr(_WORKER, "ManagerWatchdog")


def watch_trainer(trainer: int) -> None:
    """Let this process, a worker, end its loop once process number `trainer` is not its parent."""
    if not _CAN_WATCH:
        return

    class TrainerWatchdog(_WORKER.ManagerWatchdog):  # type: ignore[misc]  # its base is not typed
        def __init__(self) -> None:
            super().__init__()
            self.manager_pid = trainer

    _WORKER.ManagerWatchdog = TrainerWatchdog

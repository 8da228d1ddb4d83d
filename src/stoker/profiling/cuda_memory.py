"""CUDA's own record of allocations with Python stacks, for https://pytorch.org/memory_viz.

What  `torch.cuda.memory._record_memory_history` and `_dump_snapshot`, private functions of PyTorch that its own guides
      use; where a version lacks them, there is no snapshot, and the timeline of the trace stands alone.
Costs  About a microsecond for each allocation while it records.
Source  PyTorch documentation, "Understanding CUDA Memory Usage".
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_MOST_ENTRIES = 200_000

_record: Callable[..., Any] | None = getattr(torch.cuda.memory, "_record_memory_history", None)
_dump: Callable[..., Any] | None = getattr(torch.cuda.memory, "_dump_snapshot", None)


def start_recording() -> bool:
    """Record allocations from now on; whether this PyTorch can."""
    if _record is None or _dump is None:
        return False
    _record(max_entries=_MOST_ENTRIES, stacks="python")
    return True


def stop_recording(path: Path | None = None) -> None:
    """Stop; what was recorded goes to `path` if it is given, a pickle that PyTorch's viewer opens in the browser."""
    if _record is not None and _dump is not None:
        if path is not None:
            _dump(str(path))
        _record(enabled=None)

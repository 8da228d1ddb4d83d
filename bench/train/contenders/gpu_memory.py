"""A contender on a GPU that it shares: its own memory counted, and left to others while it rests."""

from __future__ import annotations

from collections import deque

import torch

from bench.train.pacing import Pacer

_AHEAD = 2
"""Updates that may wait on the device: enough to keep it busy, and few enough that a slice ends when it should."""

_SETTLING = 3


def share_device(pacer: Pacer, device: torch.device) -> None:
    """Let the pacer tell the most that PyTorch allocated on `device` [bytes], and free cached memory before a rest.

    The updates after a rest, which allocate it again, do not count. On a CPU nothing changes.
    """
    if device.type != "cuda":
        return
    given: deque[torch.cuda.Event] = deque()

    def keep_up() -> None:
        given.append(torch.cuda.Event())
        given[-1].record()
        if len(given) > _AHEAD:
            given.popleft().synchronize()

    pacer.peak_bytes, pacer.keep_up, pacer.before_rest = (
        torch.cuda.max_memory_allocated,
        keep_up,
        torch.cuda.empty_cache,
    )
    pacer.settling_updates = _SETTLING

"""Peaks of a GPU's memory in place of the host's."""

from __future__ import annotations

import torch

from bench.train.pacing import Pacer


def count_device_memory(pacer: Pacer, device: torch.device) -> None:
    """Let the pacer tell the most that PyTorch allocated on `device` [bytes]; on a CPU nothing changes."""
    if device.type == "cuda":
        pacer.peak_bytes = torch.cuda.max_memory_allocated

"""What a GPU's memory holds of others than a test's own tensors."""

from __future__ import annotations

import gc

import torch

from stoker.testing.simulated_gpu import is_simulated


def allocated_by_others() -> int:
    """Bytes that are allocated now; workspaces of cuBLAS are freed before, which every forecast counts as its own."""
    gc.collect()
    if not is_simulated():
        torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated(0)

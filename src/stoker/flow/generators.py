"""Random generators of the user's process, left as they were found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from stoker.loading import generator_states, restore_generators


@contextmanager
def generators_kept() -> Iterator[None]:
    """Put back Python's, NumPy's and PyTorch's generators, of all devices in use, after the block."""
    states = generator_states()
    is_cuda_in_use = torch.cuda.is_available() and torch.cuda.is_initialized()
    devices = range(torch.cuda.device_count()) if is_cuda_in_use else ()
    with torch.random.fork_rng(devices=list(devices)):
        try:
            yield
        finally:
            restore_generators(states)

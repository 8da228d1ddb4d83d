"""How many threads PyTorch computes with, for as long as something is measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Run with `count` intra-op threads, or as many as there are; as before afterwards."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)

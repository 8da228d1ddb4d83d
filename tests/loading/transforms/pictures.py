"""Images and draws for the tests of transforms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from stoker.loading.transforms import Draw

CPU = torch.device("cpu")


def draw_for(indices: Sequence[int] | np.ndarray, epoch: int = 0, seed: int = 0) -> Draw:
    """Draws for these samples."""
    return Draw(seed, epoch, np.asarray(indices, dtype=np.int64), CPU)


def images(shape: tuple[int, ...], dtype: torch.dtype = torch.uint8, seed: int = 0) -> torch.Tensor:
    """Images no two pixels of which are likely equal: bytes, or floating ones from 0 to 1."""
    bytes_BCHW = torch.randint(1, 250, shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    return (bytes_BCHW.to(dtype) / 255) if dtype.is_floating_point else bytes_BCHW.to(dtype)


def one_by_one(transform: Any, x: torch.Tensor, *, epoch: int = 0) -> torch.Tensor:
    """The samples transformed in batches of one."""
    return torch.cat([transform(x[i : i + 1], draw_for([i], epoch)) for i in range(len(x))])

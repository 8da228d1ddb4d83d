"""What samples are filled up with, and the type that holds it."""

from __future__ import annotations

import torch

from stoker.errors import BadJob


def holding(dtype: torch.dtype, fill: float) -> torch.dtype:
    """The type that holds values of `dtype` and `fill` as well: itself, or int64 where it ends before `fill`.

    Bytes filled up with -100 would be filled with 156, which a loss counts.

    Raises:
        BadJob: `fill` is a fraction, NaN or infinite, and values are whole numbers.

    >>> holding(torch.uint8, -100), holding(torch.float32, -100), holding(torch.int32, 0)
    (torch.int64, torch.float32, torch.int32)
    """
    if dtype.is_floating_point or dtype.is_complex:
        return dtype
    if not float(fill).is_integer():
        raise BadJob(f"samples of {dtype} cannot be filled up with {fill}", remedy="Give a whole number to pad with.")
    low, high = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    return dtype if low <= fill <= high else torch.int64

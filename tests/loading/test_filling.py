"""What samples are filled up with."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import BadJob
from stoker.loading.lengths import dtype_holding

DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float32, torch.bfloat16]


@given(st.sampled_from(DTYPES), st.integers(-1000, 1000))
def test_what_is_filled_in_is_read_back(dtype: torch.dtype, fill: int) -> None:
    """Whatever the values are, their padding is what was asked for, and not what it wraps to."""
    fill = fill if dtype is not torch.bfloat16 else fill % 128  # of more it rounds, as of any value
    held = dtype_holding(dtype, fill)
    assert torch.full((1,), fill, dtype=held).item() == fill
    assert torch.promote_types(held, dtype) == held


@pytest.mark.parametrize("fill", [0.5, float("nan"), float("inf")])
def test_a_fraction_among_whole_numbers_is_refused(fill: float) -> None:
    """It would be cut to a whole number; among floats it is what it is."""
    with pytest.raises(BadJob, match="cannot be filled up with"):
        dtype_holding(torch.int64, fill)
    assert dtype_holding(torch.float64, fill) == torch.float64

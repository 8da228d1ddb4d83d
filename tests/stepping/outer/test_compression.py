from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stoker.stepping.outer.compression import CHUNK, codec_of


@given(count=st.integers(1, 3 * CHUNK), scale=st.floats(1e-20, 1e20), seed=st.integers(0, 99))
def test_int8_is_off_by_no_more_than_stated(count: int, scale: float, seed: int) -> None:
    """Each element comes back within 1/254 of the largest one of its chunk, from as many bytes as promised."""
    values = scale * torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    codec = codec_of("int8")
    encoded = codec.encode(values)
    found = codec.decode(encoded, count, values.dtype)
    assert encoded.dtype == torch.uint8
    assert encoded.numel() == codec.num_bytes(count, values.dtype)
    for mine, theirs in zip(found.split(CHUNK), values.split(CHUNK), strict=True):
        assert float((mine - theirs).abs().max()) <= float(theirs.abs().max()) / 254 * (1 + 1e-5)


def test_int8_keeps_what_is_zero() -> None:
    """A chunk of zeros, whose scale is zero, comes back as zeros."""
    codec = codec_of("int8")
    values = torch.zeros(CHUNK + 5)
    values[-1] = 3.0
    assert torch.equal(codec.decode(codec.encode(values), CHUNK + 5, torch.float32), values)


@pytest.mark.parametrize("compress", ["int8", "none"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_shows(compress: str, bad: float) -> None:
    """A value that is not finite leaves one behind that is not, instead of a number like any other."""
    codec = codec_of(compress)  # type: ignore[arg-type]
    values = torch.ones(7)
    values[3] = bad
    assert not bool(codec.decode(codec.encode(values), 7, torch.float32).isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_is_lost_uncompressed(dtype: torch.dtype) -> None:
    """Without compression the same bits come back."""
    codec, values = codec_of("none"), torch.randn(100, dtype=dtype)
    encoded = codec.encode(values)
    assert encoded.numel() == codec.num_bytes(100, dtype)
    assert torch.equal(codec.decode(encoded, 100, dtype), values)

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stoker.jobs.sync import Compression
from stoker.stepping.diloco_exchange import CODECS

STATED: dict[Compression, tuple[int, float]] = {"int8": (1024, 1 / 254), "int4": (128, 1 / 14)}
"""Elements of a chunk, and the largest error as a share of its largest element, as `stoker.DiLoCo` says."""


@pytest.mark.parametrize("compress", STATED)
@given(count=st.integers(1, 3_000), scale=st.floats(1e-20, 1e20), seed=st.integers(0, 99))
def test_integers_are_off_by_no_more_than_stated(compress: Compression, count: int, scale: float, seed: int) -> None:
    """Each element comes back near, as far as its chunk's largest allows, from as many bytes as promised."""
    values = scale * torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    codec, (chunk, share) = CODECS[compress], STATED[compress]
    encoded = codec.encode(values)
    found = codec.decode(encoded, count, values.dtype)
    assert encoded.dtype == torch.uint8
    assert encoded.numel() == 4 * -(-count // chunk) + -(-count * {"int8": 8, "int4": 4}[compress] // 8)
    for mine, theirs in zip(found.split(chunk), values.split(chunk), strict=True):
        assert float((mine - theirs).abs().max()) <= float(theirs.abs().max()) * share * (1 + 1e-5)


@pytest.mark.parametrize("compress", STATED)
def test_integers_keep_what_is_zero(compress: Compression) -> None:
    """A chunk of zeros, whose scale is zero, comes back as zeros."""
    codec = CODECS[compress]
    values = torch.zeros(1024 + 5)
    values[-1] = 3.0
    assert torch.equal(codec.decode(codec.encode(values), len(values), torch.float32), values)


def test_four_bits_are_half_the_bytes_of_eight() -> None:
    """But for their scales, of which there are more."""
    four, eight = (CODECS[compress].encode(torch.ones(1_000_000)).numel() for compress in ("int4", "int8"))
    assert 0.5 < four / eight < 0.54


@pytest.mark.parametrize("compress", ["int8", "int4", "none"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_shows(compress: Compression, bad: float) -> None:
    """A value that is not finite leaves one behind that is not, instead of a number like any other."""
    codec = CODECS[compress]
    values = torch.ones(7)
    values[3] = bad
    assert not bool(codec.decode(codec.encode(values), 7, torch.float32).isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_is_lost_uncompressed(dtype: torch.dtype) -> None:
    """Without compression the same bits come back."""
    codec, values = CODECS["none"], torch.randn(100, dtype=dtype)
    encoded = codec.encode(values)
    assert encoded.numel() == 100 * dtype.itemsize
    assert torch.equal(codec.decode(encoded, 100, dtype), values)

"""Numbers as bytes for a slow link: 8-bit integers with a scale for each chunk, or as they are.

What: an element is rounded to one of 255 multiples of the largest of its chunk over 127, to even where in between.
Use when: the link is what limits. Costs: an error of at most 1/254 of the chunk's largest element, once an exchange; it
is not carried over to the next. Source: block-wise quantisation as in Dettmers et al. 2021,
https://arxiv.org/abs/2110.02861, section 2.1, here linear; int8 pseudo-gradients as in Jaghouar et al. 2024
(INTELLECT-1), https://arxiv.org/abs/2412.01152.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from stoker.jobs.sync import Compression

CHUNK = 1024
"""Elements that share a scale."""

_LARGEST = 127
_SCALE_BYTES = 4


class Codec(Protocol):
    """Turns a flat tensor into bytes and back."""

    def num_bytes(self, count: int, dtype: torch.dtype) -> int:
        """Bytes that `count` elements of `dtype` come to."""
        ...

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Floating values [N] as bytes (uint8), on their device."""
        ...

    def decode(self, encoded: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
        """The `count` values that were encoded."""
        ...


class Int8:
    """See the head of this file. Layout: float32 scales, one for each chunk, then one byte for each element."""

    def num_bytes(self, count: int, dtype: torch.dtype) -> int:
        """As `Codec.num_bytes`."""
        return _SCALE_BYTES * _chunks(count) + count

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """As `Codec.encode`. A chunk with a value that is not finite has a scale that is not."""
        count = values.numel()
        chunks = F.pad(values, (0, _chunks(count) * CHUNK - count)).view(-1, CHUNK)
        scales = (chunks.abs().amax(1) / _LARGEST).to(torch.float32)
        divisors = scales.to(values.dtype).masked_fill(scales == 0, 1).unsqueeze(1)
        rounded = (chunks / divisors).round_().clamp_(-_LARGEST, _LARGEST).nan_to_num_()
        integers = rounded.to(torch.int8).view(-1)[:count]
        return torch.cat([scales.view(torch.uint8), integers.view(torch.uint8)])

    def decode(self, encoded: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
        """As `Codec.decode`."""
        split = _SCALE_BYTES * _chunks(count)
        scales = encoded[:split].clone().view(torch.float32).to(dtype)  # a copy lies where float32 may
        integers = encoded[split:].view(torch.int8).to(dtype)
        padded = F.pad(integers, (0, len(scales) * CHUNK - count)).view(-1, CHUNK)
        return (padded * scales.unsqueeze(1)).view(-1)[:count]


class Exact:
    """Every byte."""

    def num_bytes(self, count: int, dtype: torch.dtype) -> int:
        """As `Codec.num_bytes`."""
        return count * dtype.itemsize

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """As `Codec.encode`."""
        return values.contiguous().view(torch.uint8)

    def decode(self, encoded: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
        """As `Codec.decode`."""
        return encoded.clone().view(dtype)  # a copy lies where `dtype` may


def codec_of(compress: Compression) -> Codec:
    """The codec of a job's setting."""
    return Int8() if compress == "int8" else Exact()


def _chunks(count: int) -> int:
    return -(-count // CHUNK)

"""Numbers as bytes for a slow link: integers of 8 or 4 bits with a scale for each chunk, or as they are.

What: an element is rounded to one of 255 multiples of the largest of its chunk over 127, to even where in between; of
4 bits to one of 15 multiples of the largest over 7. Use when: the link is what limits. Costs: an error of at most 1/254
(1/14) of the chunk's largest element, once an exchange; it is not carried over to the next.
Source: block-wise quantisation as in Dettmers et al. 2021, https://arxiv.org/abs/2110.02861, section 2.1, here linear;
int8 pseudo-gradients as in Jaghouar et al. 2024 (INTELLECT-1), https://arxiv.org/abs/2412.01152; of 4 bits, there
floating ones, in Douillard et al. 2025, https://arxiv.org/abs/2501.18512, section 3.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from stoker.jobs.sync import Compression

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


@dataclass(frozen=True)
class Integers:
    """See the head of this file. Layout: float32 scales, one for each chunk, then the integers, of 4 bits two a byte.

    Args:
        bits: 8 or 4.
        chunk: elements that share a scale; an even number.
    """

    bits: int
    chunk: int

    @property
    def largest(self) -> int:
        """The largest of the integers."""
        return (1 << (self.bits - 1)) - 1

    def num_bytes(self, count: int, dtype: torch.dtype) -> int:
        """As `Codec.num_bytes`."""
        return _SCALE_BYTES * self._chunks(count) + -(-count * self.bits // 8)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """As `Codec.encode`. A chunk with a value that is not finite has a scale that is not."""
        count = values.numel()
        chunks = F.pad(values, (0, self._chunks(count) * self.chunk - count)).view(-1, self.chunk)
        scales = (chunks.abs().amax(1) / self.largest).to(torch.float32)
        divisors = scales.to(values.dtype).masked_fill(scales == 0, 1).unsqueeze(1)
        rounded = (chunks / divisors).round_().clamp_(-self.largest, self.largest).nan_to_num_()
        integers = rounded.to(torch.int8).view(-1)[:count]
        return torch.cat(
            [scales.view(torch.uint8), _packed(integers) if self.bits == 4 else integers.view(torch.uint8)]
        )

    def decode(self, encoded: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
        """As `Codec.decode`."""
        split = _SCALE_BYTES * self._chunks(count)
        scales = encoded[:split].clone().view(torch.float32).to(dtype)  # a copy lies where float32 may
        integers = _unpacked(encoded[split:], count) if self.bits == 4 else encoded[split:].view(torch.int8)
        padded = F.pad(integers.to(dtype), (0, len(scales) * self.chunk - count)).view(-1, self.chunk)
        return (padded * scales.unsqueeze(1)).view(-1)[:count]

    def _chunks(self, count: int) -> int:
        return -(-count // self.chunk)


def _packed(integers: torch.Tensor) -> torch.Tensor:
    """Integers from -7 to 7 [N] as 4 bits each, two a byte [ceil(N / 2)], the first one in the lower half."""
    nibbles = F.pad((integers + 8).to(torch.uint8), (0, len(integers) % 2)).view(-1, 2)
    return nibbles[:, 0] | (nibbles[:, 1] << 4)


def _unpacked(encoded: torch.Tensor, count: int) -> torch.Tensor:
    nibbles = torch.stack([encoded & 15, encoded >> 4], dim=1).view(-1)[:count]
    return nibbles.to(torch.int8) - 8


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


CODECS: dict[Compression, Codec] = {"int8": Integers(8, 1024), "int4": Integers(4, 128), "none": Exact()}
"""By a job's setting. Of few bits fewer elements share a scale: what is small beside the largest of them is lost."""


def codec_of(compress: Compression) -> Codec:
    """The codec of a job's setting."""
    return CODECS[compress]

"""One exchange between sites: its messages, their compression, and the parts of a model they are about.

A message is a note (float64) with the signals that processes otherwise share at every update; the running statistics of
batch norms (in the parameters' dtype); and the encoded pseudo-gradient. Every site sends the same bytes to every other:
with fewer than eight sites that is less than a ring's reduction of decoded values, and needs no decoding on the way.

Compression. What: an element is rounded to one of 255 multiples of the largest of its chunk over 127, to even where in
between; of 4 bits to one of 15 multiples of the largest over 7. Use when: the link is the limit. Costs: an error of at
most 1/254 (1/14) of the chunk's largest element, once an exchange; it is not carried over to the next.
Source: block-wise quantisation as in Dettmers et al. 2021, https://arxiv.org/abs/2110.02861, section 2.1, here linear;
int8 pseudo-gradients as in Jaghouar et al. 2024 (INTELLECT-1), https://arxiv.org/abs/2412.01152; of 4 bits, there
floating ones, in Douillard et al. 2025, https://arxiv.org/abs/2501.18512, section 3.3.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from stoker.errors import BadJob
from stoker.jobs.sync import Compression
from stoker.stepping.batch_norm import batch_norms
from stoker.stepping.world import SIGNALS, World


@dataclass(frozen=True)
class SiteNote:
    """A site's progress since it last sent this fragment: samples, summed losses, seconds at work; and its signals."""

    samples: float
    loss_sum: float
    seconds: float
    signals: tuple[float, ...]

    @property
    def speed(self) -> float:
        """Speed of the site [samples/s]; 0 if it did nothing."""
        return self.samples / self.seconds if self.seconds > 0 else 0.0


NOTE_BYTES = 8 * (3 + len(SIGNALS))


@dataclass(frozen=True)
class SiteProgress:
    """A site's progress so far: samples, seconds at work, sum of the samples' losses (float64, on its device)."""

    samples: int
    seconds: float
    loss_sum: torch.Tensor

    def since(self, before: SiteProgress) -> torch.Tensor:
        """The progress since then: samples, summed losses, seconds (float64 [3])."""
        parts = (self.samples - before.samples, self.loss_sum - before.loss_sum, self.seconds - before.seconds)
        device = self.loss_sum.device
        return torch.stack([torch.as_tensor(part, dtype=torch.float64, device=device) for part in parts])

    def state(self) -> list[Any]:
        """As numbers and a tensor."""
        return [self.samples, self.seconds, self.loss_sum.clone()]

    @classmethod
    def of(cls, state: list[Any], device: torch.device) -> SiteProgress:
        """The progress that `state` was made of."""
        samples, seconds, loss_sum = state
        return cls(samples, seconds, loss_sum.to(device))


@dataclass(frozen=True)
class MessageFormat:
    """Layout of a message: numbers of statistics and of encoded values, and the dtype of both."""

    codec: Codec
    num_statistics: int
    num_values: int
    dtype: torch.dtype

    def pack(self, note: torch.Tensor, statistics: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """A message (uint8) of a note (float64 [3 + signals]), statistics and values, on their device."""
        return torch.cat([note.view(torch.uint8), statistics.view(torch.uint8), self.codec.encode(values)])

    def note(self, message: torch.Tensor) -> SiteNote:
        """The note at a message's head."""
        samples, loss_sum, seconds, *signals = message[:NOTE_BYTES].clone().view(torch.float64).tolist()
        return SiteNote(samples, loss_sum, seconds, tuple(signals))

    def without_signals(self, message: torch.Tensor) -> torch.Tensor:
        """A copy of the message that sends no signals: they are of the moment at which it was made."""
        unset = torch.zeros_like(message[NOTE_BYTES - 8 * len(SIGNALS) : NOTE_BYTES])
        return torch.cat([message[: NOTE_BYTES - len(unset)], unset, message[NOTE_BYTES:]])

    def statistics(self, message: torch.Tensor) -> torch.Tensor:
        """The statistics in a message."""
        end = NOTE_BYTES + self.num_statistics * self.dtype.itemsize
        return message[NOTE_BYTES:end].clone().view(self.dtype)

    def values(self, message: torch.Tensor) -> torch.Tensor:
        """The values in a message, decoded."""
        start = NOTE_BYTES + self.num_statistics * self.dtype.itemsize
        return self.codec.decode(message[start:], self.num_values, self.dtype)


class PendingExchange:
    """An asynchronous exchange of one message of each site with all others."""

    def __init__(self, message: torch.Tensor, world: World) -> None:
        self.message = message
        self._work: dist.Work | None = None
        self._received = [message]
        if world.data is not None:
            self._received = [torch.empty_like(message) for _ in range(world.layout.data_size)]
            self._work = dist.all_gather(self._received, message, group=world.data, async_op=True)

    def received(self) -> Sequence[torch.Tensor]:
        """The messages by site; waits for all of them.

        Raises:
            RuntimeError: a site did not answer in time, or is gone.
        """
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._received


_SCALE_BYTES = 4


class Codec(Protocol):
    """Turns a flat tensor into bytes and back."""

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Floating values [N] as bytes (uint8), on their device."""
        ...

    def decode(self, encoded: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
        """The `count` values that were encoded."""
        ...


@dataclass(frozen=True)
class IntegerCodec:
    """See the head of this file. Layout: float32 scales, one for each chunk, then the integers, of 4 bits two a byte.

    Args:
        bits: 8 or 4.
        chunk: elements that share a scale; an even number.
    """

    bits: int
    chunk: int

    @property
    def largest(self) -> int:
        """The largest of the integers [1]."""
        return (1 << (self.bits - 1)) - 1

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """As `Codec.encode`. A chunk with a value that is not finite has a scale that is not."""
        count = values.numel()
        chunks = F.pad(values, (0, self._chunks(count) * self.chunk - count)).view(-1, self.chunk)
        scales = (chunks.abs().amax(1) / self.largest).to(torch.float32)
        divisors = scales.to(values.dtype).masked_fill(scales == 0, 1).unsqueeze(1)
        rounded = (chunks / divisors).round_().clamp_(-self.largest, self.largest).nan_to_num_()
        integers = rounded.to(torch.int8).view(-1)[:count]
        if self.bits == 8:
            return torch.cat([scales.view(torch.uint8), integers.view(torch.uint8)])
        # From -7 to 7, as 4 bits each, two a byte [ceil(N / 2)], the first one in the lower half.
        nibbles = F.pad((integers + 8).to(torch.uint8), (0, count % 2)).view(-1, 2)
        return torch.cat([scales.view(torch.uint8), nibbles[:, 0] | (nibbles[:, 1] << 4)])

    def decode(self, encoded: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
        """As `Codec.decode`."""
        split = _SCALE_BYTES * self._chunks(count)
        scales = encoded[:split].clone().view(torch.float32).to(dtype)  # a copy is aligned
        integers = encoded[split:].view(torch.int8)
        if self.bits == 4:
            nibbles = torch.stack([encoded[split:] & 15, encoded[split:] >> 4], dim=1).view(-1)[:count]
            integers = nibbles.to(torch.int8) - 8
        padded = F.pad(integers.to(dtype), (0, len(scales) * self.chunk - count)).view(-1, self.chunk)
        return (padded * scales.unsqueeze(1)).view(-1)[:count]

    def _chunks(self, count: int) -> int:
        return -(-count // self.chunk)


class ExactCodec:
    """The values' own bytes, uncompressed."""

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """As `Codec.encode`."""
        return values.contiguous().view(torch.uint8)

    def decode(self, encoded: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
        """As `Codec.decode`."""
        return encoded.clone().view(dtype)  # a copy is aligned


CODECS: dict[Compression, Codec] = {"int8": IntegerCodec(8, 1024), "int4": IntegerCodec(4, 128), "none": ExactCodec()}
"""By a job's setting. With fewer bits fewer elements share a scale: those small next to the largest are lost."""


@dataclass(frozen=True)
class _Piece:
    """Elements start..stop of a parameter."""

    parameter: torch.Tensor
    start: int
    stop: int


class Fragment:
    """A run of elements of several parameters, in the model's order; read and written as one tensor of `dtype`."""

    def __init__(self, pieces: Sequence[_Piece], dtype: torch.dtype) -> None:
        self._pieces, self._dtype = tuple(pieces), dtype

    @property
    def size(self) -> int:
        """Number of elements [1]."""
        return sum(piece.stop - piece.start for piece in self._pieces)

    def read(self) -> torch.Tensor:
        """A copy of the elements."""
        rows = [piece.parameter.detach().reshape(-1)[piece.start : piece.stop] for piece in self._pieces]
        return torch.cat([row.to(self._dtype) for row in rows])

    def write(self, values: torch.Tensor) -> None:
        """Write `values` to the elements."""
        for piece, part in zip(self._pieces, self._parted(values), strict=True):
            parameter = piece.parameter.detach()
            row = parameter.reshape(-1)  # a copy where the parameter is not contiguous
            row[piece.start : piece.stop] = part
            if not parameter.is_contiguous():
                parameter.copy_(row.view(parameter.shape))

    def into(self, tensors: dict[int, torch.Tensor], values: torch.Tensor) -> None:
        """Write `values` to the elements of tensors [N] that replace parameters, by the parameters' ids."""
        for piece, part in zip(self._pieces, self._parted(values), strict=True):
            tensors[id(piece.parameter)][piece.start : piece.stop] = part

    def _parted(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts: tuple[torch.Tensor, ...] = values.split([piece.stop - piece.start for piece in self._pieces])
        return parts


def fragments_of(parameters: Iterable[nn.Parameter], count: int) -> tuple[Fragment, ...]:
    """All elements of the parameters in `count` fragments, which differ by one element at most.

    Their common dtype is float64 where one of the parameters has it, else float32.

    Raises:
        BadJob: there are fewer elements than fragments.
    """
    trained = list(parameters)
    total = sum(p.numel() for p in trained)
    if total < count:
        raise BadJob(f"{total} trained parameters cannot be cut into {count} fragments that are exchanged in turn")
    dtype = torch.float64 if any(p.dtype == torch.float64 for p in trained) else torch.float32
    fragments: list[Fragment] = []
    for first, last in pairwise(total * number // count for number in range(count + 1)):
        pieces, offset = [], 0
        for parameter in trained:
            start, stop = max(first - offset, 0), min(last - offset, parameter.numel())
            if start < stop:
                pieces.append(_Piece(parameter, start, stop))
            offset += parameter.numel()
        fragments.append(Fragment(pieces, dtype))
    return tuple(fragments)


_NAMES = ("running_mean", "running_var")


class RunningStatistics:
    """The running means and variances of a model's batch norms."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        self._norms = [norm for norm in batch_norms(model) if getattr(norm, _NAMES[0], None) is not None]
        self._dtype, self._device = dtype, device

    def read(self) -> torch.Tensor:
        """A copy of all of them, one after the other."""
        rows = [tensor.detach().reshape(-1).to(self._dtype) for tensor in self._tensors()]
        return torch.cat(rows) if rows else torch.empty(0, dtype=self._dtype, device=self._device)

    def write(self, values: torch.Tensor) -> None:
        """Write values such as `read` gives to the buffers."""
        rows = self.parted(values)
        for tensor in self._tensors():
            tensor.copy_(rows[id(tensor)].view(tensor.shape))

    def parted(self, values: torch.Tensor) -> dict[int, torch.Tensor]:
        """Values such as `read` gives, cut into one row for each buffer, by the buffers' ids."""
        tensors = self._tensors()
        rows = values.split([tensor.numel() for tensor in tensors])
        return {id(tensor): row for tensor, row in zip(tensors, rows, strict=True)}

    def _tensors(self) -> list[torch.Tensor]:
        # Looked up each time: a model may replace the tensor of a buffer.
        return [getattr(norm, name) for norm in self._norms for name in _NAMES]

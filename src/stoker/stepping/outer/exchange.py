"""What sites tell each other in one exchange, and the exchange itself: every site sends the same bytes to every other.

A message is a note (float64), in which are also the signals that processes else tell each other with every update; the
running statistics of batch norms (as the parameters' dtype); and the encoded pseudo-gradient. Bytes over the link for
each site: its message to each of the others, which is less than a ring's reduction of decoded values while there are
fewer than eight sites, and needs no decoding under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from stoker.stepping.outer.compression import Codec
from stoker.stepping.world import SIGNALS, World


@dataclass(frozen=True)
class Note:
    """What a site did since it last sent this fragment: samples, their summed losses, seconds at work; its signals."""

    samples: float
    loss_sum: float
    seconds: float
    signals: tuple[float, ...]

    @property
    def speed(self) -> float:
        """Samples a second; 0 if nothing was done."""
        return self.samples / self.seconds if self.seconds > 0 else 0.0


NOTE_BYTES = 8 * (3 + len(SIGNALS))


@dataclass(frozen=True)
class Done:
    """What a site did so far: samples, seconds at work, and the sum of the samples' losses (float64, on its device)."""

    samples: int
    seconds: float
    loss_sum: torch.Tensor

    def since(self, before: Done) -> torch.Tensor:
        """What was done since then: samples, summed losses, seconds (float64 [3])."""
        parts = (self.samples - before.samples, self.loss_sum - before.loss_sum, self.seconds - before.seconds)
        device = self.loss_sum.device
        return torch.stack([torch.as_tensor(one, dtype=torch.float64, device=device) for one in parts])

    def state(self) -> list[Any]:
        """As numbers and a tensor."""
        return [self.samples, self.seconds, self.loss_sum.clone()]

    @classmethod
    def of(cls, state: list[Any], device: torch.device) -> Done:
        """What `state` gave."""
        samples, seconds, loss_sum = state
        return cls(samples, seconds, loss_sum.to(device))


@dataclass(frozen=True)
class Form:
    """How a message is laid out: of so many statistics and encoded values, both of `dtype` before."""

    codec: Codec
    num_statistics: int
    num_values: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of a message."""
        statistics = self.num_statistics * self.dtype.itemsize
        return NOTE_BYTES + statistics + self.codec.num_bytes(self.num_values, self.dtype)

    def pack(self, note: torch.Tensor, statistics: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """A message (uint8) of a note (float64 [3 + signals]), statistics and values, on their device."""
        return torch.cat([note.view(torch.uint8), statistics.view(torch.uint8), self.codec.encode(values)])

    def note(self, message: torch.Tensor) -> Note:
        """The note at a message's head."""
        samples, loss_sum, seconds, *signals = message[:NOTE_BYTES].clone().view(torch.float64).tolist()
        return Note(samples, loss_sum, seconds, tuple(signals))

    def statistics(self, message: torch.Tensor) -> torch.Tensor:
        """The statistics in a message."""
        end = NOTE_BYTES + self.num_statistics * self.dtype.itemsize
        return message[NOTE_BYTES:end].clone().view(self.dtype)

    def values(self, message: torch.Tensor) -> torch.Tensor:
        """The values in a message, decoded."""
        start = NOTE_BYTES + self.num_statistics * self.dtype.itemsize
        return self.codec.decode(message[start:], self.num_values, self.dtype)


class Sending:
    """One message of each site on its way to all, in the background."""

    def __init__(self, message: torch.Tensor, world: World) -> None:
        self.message = message
        self._work: dist.Work | None = None
        self._received = [message]
        if world.data is not None:
            self._received = [torch.empty_like(message) for _ in range(world.layout.data_size)]
            self._work = dist.all_gather(self._received, message, group=world.data, async_op=True)

    def received(self) -> Sequence[torch.Tensor]:
        """The messages by site, as soon as all are here.

        Raises:
            RuntimeError: a site did not answer in time, or is gone.
        """
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._received

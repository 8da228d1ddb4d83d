"""Clocks of several processes made comparable, once, when they have met.

On one host all processes read the same monotonic clock. Between hosts, questions go back and forth through the store
that they share; the quickest answer says most (Cristian 1989, "Probabilistic clock synchronization", section 3).
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol

PINGS = 8
"""Questions that each process on another host asks."""


class Store(Protocol):
    """What is used of `torch.distributed.Store`."""

    def set(self, key: str, value: str) -> None:
        """Leave a value for everybody."""
        ...

    def get(self, key: str) -> bytes:
        """A value that is there."""
        ...

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Return when all keys are there."""
        ...


@dataclass(frozen=True)
class Alignment:
    """What to add to a process's monotonic clock to have the first one's [s], and by how much that may be wrong [s].

    `began_at` is when they met, by the first one's calendar [seconds since 1970]: the same in all of them.
    """

    offset_s: float = 0.0
    uncertainty_s: float = 0.0
    began_at: float = 0.0


def this_host() -> str:
    """The host's name and its boot, so that equal ones share a monotonic clock."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text(encoding='ascii').strip() if boot.exists() else ''}".strip()


def align(
    store: Store,
    rank: int,
    size: int,
    *,
    patience_s: float = 20.0,
    host: str | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Alignment:
    """Compare this process's clock with the first one's; all `size` processes that met have to call it.

    Args:
        store: where all find each other, with names that were not used before (such as a PrefixStore of the meeting).
        rank: of this process.
        size: how many there are.
        patience_s: longest wait for an answer.
        host: see `this_host`.
        clock: monotonic [s].

    Raises:
        torch.distributed.DistStoreError: another process does not answer in time.
    """
    here = this_host() if host is None else host
    talk = _Talk(store, timedelta(seconds=patience_s))
    if rank == 0:
        began_at = time.time()
        talk.say("clock/first", f"{began_at!r} {here}")
        for other in range(1, size):
            _answer(talk, other, clock)
        return Alignment(began_at=began_at)
    said, _, first = talk.hear("clock/first").partition(" ")
    is_same = first == here
    talk.say(f"clock/{rank}/asks", "0" if is_same else str(PINGS))
    offset, uncertainty = (0.0, 0.0) if is_same else _asked(talk, rank, clock)
    return Alignment(offset, uncertainty, float(said))


def _answer(talk: _Talk, other: int, clock: Callable[[], float]) -> None:
    """The first process's side: the time, as often as another one asks."""
    for number in range(int(talk.hear(f"clock/{other}/asks"))):
        talk.hear(f"clock/{other}/ping/{number}")
        talk.say(f"clock/{other}/pong/{number}", repr(clock()))


def _asked(talk: _Talk, rank: int, clock: Callable[[], float]) -> tuple[float, float]:
    """Offset and uncertainty by the quickest answer [s]."""
    best = (0.0, float("inf"))
    for number in range(PINGS):
        sent = clock()
        talk.say(f"clock/{rank}/ping/{number}", "?")
        theirs = float(talk.hear(f"clock/{rank}/pong/{number}"))
        half = (clock() - sent) / 2
        if half < best[1]:
            best = (theirs - (sent + half), half)
    return best


@dataclass(frozen=True)
class _Talk:
    """Saying and hearing through a store, with an end to patience."""

    store: Store
    patience: timedelta

    def say(self, key: str, value: str) -> None:
        self.store.set(key, value)

    def hear(self, key: str) -> str:
        self.store.wait([key], self.patience)
        return self.store.get(key).decode()

"""Connections to other processes, cut so that nobody waits on them.

What: TCP connections that were opened within a block, such as those of a process group; cutting them makes a call that
waits on one fail at once, in this process and at the other end.
Use when: a generation is broken. Gloo tells only those that talk to the dead process directly; who talks to one of
these waits for all of its patience, since neither `destroy_process_group` nor `abort` closes connections (2.13.0).
Does not see: connections opened by another thread within the same block, which it takes for the group's.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

_DESCRIPTORS = Path("/proc/self/fd")


class Connections:
    """TCP connections that this process opens within the block."""

    def __init__(self) -> None:
        self._before: set[str] = set()
        self._own: set[str] = set()

    def __enter__(self) -> Self:
        """Begin."""
        self._before = set(_sockets())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Those that are there now, and were not."""
        self._own = set(_sockets()) - self._before

    def cut(self) -> None:
        """Cut those that still exist; may be called from any thread, and again."""
        for name, descriptor in _sockets().items():
            if name in self._own:
                with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as end:
                    if end.family in {socket.AF_INET, socket.AF_INET6}:
                        end.getpeername()  # fails for one that listens, which is to stay
                        end.shutdown(socket.SHUT_RDWR)


def _sockets() -> dict[str, int]:
    """Sockets of this process: their names, which are never those of others, and a descriptor of each."""
    found = {}
    for path in _DESCRIPTORS.iterdir():
        with suppress(OSError):  # closed meanwhile
            name = str(path.readlink())
            if name.startswith("socket:"):
                found[name] = int(path.name)
    return found

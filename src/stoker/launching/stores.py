"""The key-value store in which processes find each other: PyTorch's, served by the supervisor."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # missing from the stubs

LOOPBACK = "127.0.0.1"
"""Workers of a supervisor are on its machine; nobody else is to reach their store."""

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.5


def listen() -> socket.socket:
    """A socket on a free port for `serve`: those that connect before that wait, so that nobody waits for PyTorch."""
    return socket.create_server((LOOPBACK, 0))


def serve(listener: socket.socket) -> TCPStore:
    """The store, served by this process on the listener's port, which is the store's from now on."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # noqa: PLC0415 - takes seconds; workers start

    host, port = listener.getsockname()[:2]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def connect(host: str, port: int, *, patience_s: float, is_server: bool = False) -> TCPStore:
    """The store that is served at host and port; here, if `is_server`.

    Raises:
        RuntimeError: nobody answers in time, or the port is taken.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # noqa: PLC0415 - likewise, not loaded before

    patience = timedelta(seconds=patience_s)
    return TCPStore(host, port, is_master=is_server, wait_for_workers=False, timeout=patience)


def wait_for(store: Store, keys: Sequence[str], patience_s: float) -> bool:
    """Whether all keys are set within a time [s].

    By asking now and then: the store's own `wait` writes lines of its own to standard error when the time is over.

    Raises:
        RuntimeError: nobody serves the store any more.
    """
    until, pause_s = time.monotonic() + patience_s, _SHORTEST_PAUSE_S
    while not store.check(list(keys)):
        left_s = until - time.monotonic()
        if left_s <= 0:
            return False
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return True

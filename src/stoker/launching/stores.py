"""The key-value store in which processes find each other: PyTorch's, served by the supervisor."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # missing from the stubs

LOOPBACK = "127.0.0.1"
"""Workers of a supervisor are on its machine; nobody else is to reach their store."""

LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
"""Its name, for the listeners of gloo and NCCL."""

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.5
_SIOCGIFADDR = 0x8915


def listen(host: str = LOOPBACK, port: int = 0) -> socket.socket:
    """A socket for `serve`, on this address alone: those that connect before that wait, not for PyTorch's import.

    Raises:
        OSError: the port is taken, or the address is not one of this machine.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family)


def serve(listener: socket.socket, *, patience_s: float = 300.0) -> TCPStore:
    """The store, served by this process on the listener's address, which is the store's from now on."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # noqa: PLC0415 - takes seconds; workers start

    host, port = listener.getsockname()[:2]
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(),
        timeout=timedelta(seconds=patience_s),
    )  # fmt: skip


def connect(host: str, port: int, *, patience_s: float) -> TCPStore:
    """The store that is served at host and port.

    Raises:
        RuntimeError: no store answers there.
        OSError: nothing listens there in time. PyTorch's own attempts would last longer than its timeout.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # noqa: PLC0415 - likewise, not loaded before

    local_address(host, port, patience_s)
    patience = timedelta(seconds=patience_s)
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=patience)


def local_address(host: str, port: int, patience_s: float) -> str:
    """This machine's address on the way to a host and port, once something listens there.

    Raises:
        OSError: nothing does in time.
    """
    until, pause_s = time.monotonic() + patience_s, _SHORTEST_PAUSE_S
    while True:
        left_s = until - time.monotonic()
        try:
            with socket.create_connection((host, port), timeout=max(left_s, _SHORTEST_PAUSE_S)) as way:
                return str(way.getsockname()[0])
        except OSError:
            if time.monotonic() >= until:
                raise
        time.sleep(max(0.0, min(pause_s, until - time.monotonic())))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def interface_of(address: str) -> str | None:
    """The network interface that has an IPv4 address of this machine; None: none, or it cannot be found out.

    >>> interface_of("127.0.0.1") in {"lo", "lo0", None}
    True
    """
    import fcntl  # noqa: PLC0415 - not everywhere

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no such address
                answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, name.encode()[:15].ljust(256, b"\0"))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


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

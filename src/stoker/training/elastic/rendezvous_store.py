"""The key-value store in which processes meet: PyTorch's, with authenticated values and waits that end at a loss.

What: everyone who reaches the port of PyTorch's store can read and write. `AuthenticatedStore` adds to each value an
HMAC-SHA-256 over its key and content, and refuses values written without the session's key. Keys contain the name of
the generation, so that no value can be replayed in another one. Waits end as soon as the generation is broken.
Use when: processes meet. Costs: a hash of each value at the start; a wait polls every few milliseconds.
Does not protect: reading; counters (`add`); deletion of keys. A stranger at the port can make processes wait or fail,
but not believe it. See docs/trust.md.
Source: RFC 2104 (HMAC); M. Bellare, P. Rogaway, "Entity authentication and key distribution" (1993), for `agreed_key`.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import stat
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError, Store, TCPStore  # type: ignore[attr-defined]  # missing from the stubs

from stoker.errors import BadJob, RunFailed
from stoker.store.locations import cache_root

LOOPBACK = "127.0.0.1"
"""Address of a supervisor's store: its workers are on the same machine, and no other one may reach it."""

LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
"""Name of the loopback interface, for the listeners of gloo and NCCL."""

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.5
_SIOCGIFADDR = 0x8915


def listen(host: str = LOOPBACK, port: int = 0) -> socket.socket:
    """A socket for `serve`, on this address alone; clients can connect to it before PyTorch is imported.

    Raises:
        OSError: the port is taken, or the address is not one of this machine.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family)


def serve(listener: socket.socket, *, patience_s: float = 300.0) -> TCPStore:
    """The store, served by this process on the listener's address; the listener belongs to the store from now on."""
    host, port = listener.getsockname()[:2]
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        timeout=timedelta(seconds=patience_s),
    )


def connect(host: str, port: int, *, patience_s: float) -> TCPStore:
    """The store at host and port.

    Raises:
        RuntimeError: no store answers there.
        OSError: nothing listens there in time. PyTorch's own attempts would last longer than its timeout.
    """
    local_address(host, port, patience_s)
    patience = timedelta(seconds=patience_s)
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=patience)


def local_address(host: str, port: int, patience_s: float) -> str:
    """This machine's address towards a host and port, once something listens there.

    Raises:
        OSError: nothing listens there in time.
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
    """The network interface with an IPv4 address of this machine; None if it is unknown.

    >>> interface_of("127.0.0.1") in {"lo", "lo0", None}
    True
    """
    import fcntl  # noqa: PLC0415 - Unix only

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no such address
                answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, name.encode()[:15].ljust(256, b"\0"))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def wait_for(store: Store, keys: Sequence[str], patience_s: float, longest_pause_s: float = _LONGEST_PAUSE_S) -> bool:
    """Whether all keys are set within `patience_s` [s]; looks at least every `longest_pause_s` [s].

    It polls: the store's own `wait` writes to standard error when the time is over.

    Raises:
        RuntimeError: the store is no longer served.
    """
    until, pause_s = time.monotonic() + patience_s, _SHORTEST_PAUSE_S
    while not store.check(list(keys)):
        left_s = until - time.monotonic()
        if left_s <= 0:
            return False
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, longest_pause_s)
    return True


SECRET_VARIABLE = "STOKER_SECRET"  # noqa: S105 - the name of it
"""Environment variable: the secret that only the processes of a launched run know."""

LEAST_CHARACTERS = 16
_LONGEST_POLL_S = 0.05
_SIZE = hashlib.sha256().digest_size


class AuthenticatedStore(Store):
    """`store`, with values authenticated by `key`, in which waits end with DistStoreError once `is_broken`.

    Keys that are set can still be read then. The methods are those of PyTorch's store, which calls them.
    """

    def __init__(self, store: Store, key: bytes, is_broken: Callable[[], bool] = lambda: False) -> None:
        super().__init__()
        self._store: Any = store  # the stubs lack some of its methods
        self._key, self._is_broken = key, is_broken
        self._clones: list[AuthenticatedStore] = []

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set.

        Raises:
            DistStoreError: the generation is broken and they are not set, or the time is over.
        """
        patience_s = (self._store.timeout if timeout is None else timeout).total_seconds()
        if not wait_for(self, keys, patience_s, _LONGEST_POLL_S):
            raise DistStoreError(f"timed out after {patience_s:g} s waiting for {', '.join(keys)}")

    def get(self, key: str) -> bytes:
        """The value of a key; waits until it is set.

        Raises:
            DistStoreError: it was not written by a process that knows the secret.
        """
        self.wait([key])
        return self._opened(key, self._store.get(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Values of keys; waits until all are set."""
        self.wait(keys)
        return [self._opened(key, value) for key, value in zip(keys, self._store.multi_get(list(keys)), strict=True)]

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        self._store.set(key, self._closed(key, value))

    def add(self, key: str, value: int) -> int:
        """New value of a counter after adding to it [1]; it is not authenticated."""
        return int(self._store.add(key, value))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Set a key if it has the expected value; returns its value after that."""
        expected = self._closed(key, expected_value) if expected_value else b""
        value: bytes = self._store.compare_set(key, expected, self._closed(key, desired_value))
        return self._opened(key, value)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are set.

        Raises:
            DistStoreError: they are not, and the generation is broken: the process that would set them may be lost.
        """
        is_there = bool(self._store.check(list(keys)))
        if not is_there and self._is_broken():
            raise DistStoreError(f"another process was lost while this one waited for {', '.join(keys)}")
        return is_there

    def delete_key(self, key: str) -> bool:
        """Delete a key; returns whether it was set."""
        return bool(self._store.delete_key(key))

    def num_keys(self) -> int:
        """Number of keys [keys]."""
        return int(self._store.num_keys())

    def clone(self) -> Store:
        """The same store over a connection of its own, for threads that wait for no other process."""
        clone = AuthenticatedStore(self._store.clone(), self._key)
        self._clones.append(clone)  # C++ does not keep the Python object alive
        return clone

    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815 - as PyTorch's C++ calls them

    def _closed(self, key: str, value: str | bytes) -> bytes:
        content = value.encode() if isinstance(value, str) else bytes(value)
        return proof(self._key, key.encode(), content) + content

    def _opened(self, key: str, value: bytes) -> bytes:
        content = bytes(value[_SIZE:])
        if not hmac.compare_digest(bytes(value[:_SIZE]), proof(self._key, key.encode(), content)):
            raise DistStoreError(f"{key} in the store was not written by a process that knows this run's secret")
        return content


def proof(key: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA-256 of parts, each preceded by its length [32 bytes]."""
    return hmac.digest(key, b"".join(len(part).to_bytes(8, "big") + part for part in parts), "sha256")


def agreed_key(store: Any, secret: bytes, name: str, rank: int, size: int, patience_s: float) -> bytes:
    """The key of one rendezvous, from the secret and a nonce of each process, once all have proved to know the secret.

    It depends on a fresh nonce of every process, so that nothing of an earlier run or attempt can be replayed.

    Raises:
        RunFailed: a process does not know the secret, or does not answer in time; its rank is named.
    """
    mine = secrets.token_bytes(_SIZE)
    store.set(f"{name}/nonce/{rank}", mine)
    nonces = _answers(store, f"{name}/nonce", size, patience_s)
    nonces[rank] = mine  # a stranger may have overwritten it
    key = proof(secret, b"stoker meeting", name.encode(), str(size).encode(), *nonces)
    store.set(f"{name}/proof/{rank}", proof(key, str(rank).encode()))
    proofs = _answers(store, f"{name}/proof", size, patience_s)
    strangers = [
        other
        for other, given in enumerate(proofs)
        if other != rank and not hmac.compare_digest(given, proof(key, str(other).encode()))
    ]
    if strangers:
        who = ", ".join(map(str, strangers))
        raise RunFailed(
            f"rank {rank} of {size} met strangers: what answers as rank {who} does not know this run's secret",
            remedy=f"Set {SECRET_VARIABLE} to the same text of at least {LEAST_CHARACTERS} characters for all "
            "processes. Without it each user's own file is taken, which machines must share.",
        )
    return key


def _answers(store: Any, name: str, size: int, patience_s: float) -> list[bytes]:
    keys = [f"{name}/{rank}" for rank in range(size)]
    if not wait_for(store, keys, patience_s):
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        raise RunFailed(f"ranks {missing} of {size} did not prove in {patience_s:g} s that they know the secret")
    return [bytes(value) for value in store.multi_get(keys)]


def launched_secret(environ: Mapping[str, str] = os.environ) -> bytes:
    """The secret of a launched run: STOKER_SECRET, or the content of a file that only this user can read.

    Raises:
        BadJob: it is too short, or others can read or write the file.
    """
    if given := environ.get(SECRET_VARIABLE):
        if len(given) < LEAST_CHARACTERS:
            raise BadJob(
                f"{SECRET_VARIABLE} has {len(given)} characters; at least {LEAST_CHARACTERS} are needed",
                remedy="`openssl rand -hex 32` makes one.",
            )
        return given.encode()
    path = cache_root(environ) / f"secret-{os.getuid()}"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_hex(_SIZE).encode())
        with suppress(FileExistsError):  # another process of this run was faster
            os.link(draft, path)
        draft.unlink()
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        about = os.fstat(file.fileno())
        if about.st_uid != os.getuid() or stat.S_IMODE(about.st_mode) & 0o077:
            raise BadJob(
                f"{path} can be read or was written by others; the secret in it is none",
                remedy=f"Remove it, or set {SECRET_VARIABLE}.",
            )
        return file.read()

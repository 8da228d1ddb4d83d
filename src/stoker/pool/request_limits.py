"""How many requests and connections of one sender a control plane takes: keys cost nothing, and addresses little.

What: requests count against their address and events against their key, each in a token bucket; connections count
against their address from the moment on at which they are accepted; a TLS handshake has to be over within
`HANDSHAKE_S`, and a request's head has to come within `HEAD_S`.

Source: the token bucket is RFC 2697's in its simplest form.
"""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from stoker.pool.events import Refused

MOST_AT_ONCE = 2000
"""Requests of one address that are being answered, or wait for news: each agent has one."""
MOST_CONNECTIONS = 2 * MOST_AT_ONCE
"""Connections of one address, those included that have asked for nothing yet."""
MOST_WAITING, MOST_WAITING_IN_ALL = 256, 1024
"""Connections that have asked for nothing yet, of one address and of all."""
UNREAD_S, LEAST_BYTES_PER_S = 30.0, 32e3
"""Time in which a client takes what was written to it: so long, and by its size [s, bytes/s]."""
MOST_UNREAD_BYTES = 64 << 20
"""Of answers that clients of one address do not take [bytes]."""
HANDSHAKE_S = 10.0
"""Time for a TLS handshake [s]."""
HEAD_S = 30.0
"""Time for the head of a request [s]: a connection that asks for nothing is closed then."""
MOST_HEAD_BYTES = 1 << 16
"""Of the head of a request, about [bytes]."""


@dataclass(frozen=True, kw_only=True)
class RequestRates:
    """Requests a second that are answered, after a burst: of one address, and events of one key."""

    per_address: float = 100.0
    per_key: float = 20.0
    burst_s: float = 10.0


class TooMany(Refused):
    """Too many requests."""

    http_status = 429


@dataclass
class TokenBuckets:
    """Token buckets by name, each refilled at `rate` a second up to `most`."""

    rate: float
    most: float
    _left: dict[str, tuple[float, float]] = field(default_factory=dict)
    _cleaned_s: float = 0.0

    def take(self, name: str, what: str, cost: float = 1.0) -> None:
        """Take `cost` tokens of a bucket.

        Raises:
            TooMany: it has fewer; `what` says whose it is.
        """
        if self._refilled(name) < cost:
            raise TooMany(f"{what} sends more than {self.rate:g} requests a second", remedy="Wait a second.")
        self.charge(name, cost)

    def charge(self, name: str, cost: float) -> None:
        """Take tokens for what is known only once it is done: what is missing is made up for by the next ones."""
        now_s = time.monotonic()
        self._left[name] = (self._refilled(name) - cost, now_s)
        if len(self._left) > 20_000 and now_s - self._cleaned_s > 1.0:  # full ones are as good as new ones
            self._cleaned_s = now_s
            self._left = {name: kept for name, kept in self._left.items() if self._refilled(name) < self.most}

    def _refilled(self, name: str) -> float:
        left, at_s = self._left.get(name, (self.most, 0.0))
        return min(self.most, left + (time.monotonic() - at_s) * self.rate)


def network_of_host(host: str) -> str:
    """What counts as one sender: an IPv4 address, or the /64 of an IPv6 one, all of which one customer has.

    >>> network_of_host("192.0.2.1"), network_of_host("[2001:db8::1:2]"), network_of_host("::ffff:192.0.2.1")
    ('192.0.2.1', '2001:db8::/64', '192.0.2.1')
    """
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return host
    if address.version == 4:
        return str(address)
    return str(address.ipv4_mapped or ipaddress.ip_network((address, 64), strict=False))


@dataclass(eq=False)
class Place:
    """The place of one connection among those that are open; `abort` ends it.

    `unread_bytes`: of an answer that its client does not take; `has_left`: it is free again.
    """

    network: str
    abort: Callable[[], None]
    unread_bytes: int = 0
    has_left: bool = False


class OpenConnections:
    """The connections that are open: so many of one address, and of all.

    Those that have asked for nothing yet, in the middle of a TLS handshake or of their first head, are fewer still.
    Beyond that the oldest of them is ended, of the address that has most of them: an honest one takes a moment, so that
    it gets in however many are held open on purpose.

    Args:
        most: open at a time; half of that, and `MOST_CONNECTIONS`, of one address.

    Attributes:
        num_open: how many there are.
        num_waiting: how many of them have asked for nothing yet.
    """

    def __init__(self, most: int = 2 * MOST_CONNECTIONS) -> None:
        self._most = most
        self.num_open = self.num_waiting = 0
        self._open_by = Counter[str]()
        self._waiting: dict[str, dict[Place, None]] = {}  # by address, the oldest first
        self._unread = Counter[str]()

    def enter(self, network: str, abort: Callable[[], None]) -> Place | None:
        """A place for a new connection; None: there is none, and it was ended."""
        is_full = self._open_by.get(network, 0) >= min(MOST_CONNECTIONS, self._most // 2)
        if is_full or (self.num_open >= self._most and not self._end_oldest()):
            abort()
            return None
        place = Place(network, abort)
        self.num_open, self.num_waiting = self.num_open + 1, self.num_waiting + 1
        self._open_by[network] += 1
        self._waiting.setdefault(network, {})[place] = None
        if len(self._waiting[network]) > MOST_WAITING:
            self._end_oldest(network)
        elif self.num_waiting > MOST_WAITING_IN_ALL:
            self._end_oldest()
        return place

    def has_asked(self, place: Place) -> None:
        """Note that a request has come over a connection."""
        waiting = self._waiting.get(place.network, {})
        if place in waiting:
            self.num_waiting -= 1
            del waiting[place]
            if not waiting:
                del self._waiting[place.network]

    def note_unread(self, place: Place, num_bytes: int) -> None:
        """Note what is kept of an answer until its client takes it; too much for one address ends the connection."""
        self._unread[place.network] += num_bytes - place.unread_bytes
        place.unread_bytes = num_bytes
        if not self._unread[place.network]:
            del self._unread[place.network]
        elif num_bytes and self._unread[place.network] > MOST_UNREAD_BYTES:
            place.abort()

    def leave(self, place: Place) -> None:
        """Give up a connection's place; once is enough."""
        if place.has_left:
            return
        place.has_left = True
        self.has_asked(place)
        self.note_unread(place, 0)
        self.num_open -= 1
        self._open_by[place.network] -= 1
        if not self._open_by[place.network]:
            del self._open_by[place.network]

    def _end_oldest(self, network: str | None = None) -> bool:
        """End the oldest connection that has asked for nothing, of the address with most of them; whether one was."""
        if not self._waiting:
            return False
        of_one = self._waiting[network or max(self._waiting, key=lambda name: len(self._waiting[name]))]
        place = next(iter(of_one))
        self.leave(place)
        place.abort()
        return True


class BoundedConnection(HttpToolsProtocol):
    """A connection that counts against its address, and is closed where no request comes.

    uvicorn bounds all connections together: one address could have them all, and keep everyone else out.

    Args:
        args, more: of uvicorn.
        connections: those that are open.
        place: of this one, where it has one before its handshake.
    """

    def __init__(self, *args: Any, connections: OpenConnections, place: Place | None = None, **more: Any) -> None:
        super().__init__(*args, **more)
        self._connections, self.place = connections, place
        self._late: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._early, self._head_bytes, self.is_lost = b"", 0, False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count it, or close it."""
        super().connection_made(transport)
        if self.place is None:
            network = network_of_host(self.client[0] if self.client else "")
            self.place = self._connections.enter(network, transport.abort)
        else:
            self.place.abort = transport.abort
        if self.place is not None:
            self._await_head()
        if self._early:
            early, self._early = self._early, b""
            self.data_received(early)

    def data_received(self, data: bytes) -> None:
        """Take what comes; of a TLS connection it may come with the end of the handshake, before `connection_made`."""
        if self.transport is None:
            self._early += data
            return
        super().data_received(data)
        self._head_bytes = self._head_bytes + len(data) if self._late is not None else 0
        if self._head_bytes > MOST_HEAD_BYTES:  # the parser keeps all of it
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Count it no more."""
        super().connection_lost(exc)
        self.is_lost = True
        self._has_head()
        self._is_read()
        if self.place is not None:
            self._connections.leave(self.place)

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        """The head is here."""
        self._has_head()
        if self.place is not None:
            self._connections.has_asked(self.place)
        super().on_headers_complete()

    def pause_writing(self) -> None:
        """An answer is not taken as fast as it is made: what waits for its client has its time, by its size."""
        super().pause_writing()
        num_bytes = self.transport.get_write_buffer_size()
        if self.place is not None:
            self._connections.note_unread(self.place, num_bytes)
        self._is_read()
        self._unread = self.loop.call_later(UNREAD_S + num_bytes / LEAST_BYTES_PER_S, self.transport.abort)

    def resume_writing(self) -> None:
        """The client has taken it."""
        super().resume_writing()
        self._is_read()
        if self.place is not None:
            self._connections.note_unread(self.place, 0)

    def _is_read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _await_head(self) -> None:
        self._has_head()
        self._late = self.loop.call_later(HEAD_S, self.transport.abort)

    def _has_head(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class TlsGate(asyncio.Protocol):
    """Where a connection is until its TLS handshake is over: it counts from its first moment.

    An event loop that is given a certificate calls a protocol after the handshake, which takes a minute
    where the other side says nothing, and counts none of them.

    Args:
        then: has the connection from then on.
        connections: those that are open.
        context: the certificate.
        count: counts a handshake against its address, and raises Refused where those are too many.
    """

    def __init__(
        self,
        then: BoundedConnection,
        connections: OpenConnections,
        context: ssl.SSLContext,
        count: Callable[[str], None],
    ) -> None:
        self._then, self._connections, self._context, self._count = then, connections, context, count
        self._place: Place | None = None
        self._handshake: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin the handshake, if there is a place."""
        host = (transport.get_extra_info("peername") or ("",))[0]
        self._place = self._connections.enter(network_of_host(host), transport.abort)
        if self._place is None:
            return
        try:
            self._count(host)
        except Refused:
            transport.abort()  # and then `connection_lost`
            return
        self._handshake = asyncio.create_task(self._secure(transport))

    def connection_lost(self, exc: Exception | None) -> None:
        """It ended before its handshake began."""
        if self._handshake is not None:
            self._handshake.cancel()
        self._end()

    async def _secure(self, transport: asyncio.Transport) -> None:
        assert self._place is not None
        secure = None
        try:
            secure = await asyncio.get_running_loop().start_tls(
                transport, self._then, self._context, server_side=True, ssl_handshake_timeout=HANDSHAKE_S
            )
        except OSError:  # also of `ssl`, and where it took too long
            transport.abort()
        finally:
            if secure is None or self._then.is_lost:  # the connection has ended
                self._end()
        if secure is not None and self._place.has_left:
            secure.abort()
        elif secure is not None:
            self._then.place = self._place
            self._then.connection_made(secure)

    def _end(self) -> None:
        if self._place is not None:
            self._connections.leave(self._place)

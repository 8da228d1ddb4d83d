"""How many requests and connections of one sender a control plane takes: keys cost nothing, and addresses little.

What: requests count against their address and events against their key, each in a token bucket; connections count
against their address, and a request's head has to come within `HEAD_S`.

Source: the token bucket is RFC 2697's in its simplest form.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from stoker.pool.events import Refused

MOST_AT_ONCE = 2000
"""Requests of one address that are being answered, or wait for news: each agent has one."""
MOST_CONNECTIONS = 2 * MOST_AT_ONCE
"""Connections of one address, those included that have asked for nothing yet."""
HEAD_S = 30.0
"""Time for the head of a request [s]: a connection that asks for nothing is closed then."""


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
        now_s = time.monotonic()
        left, at_s = self._left.get(name, (self.most, now_s))
        left = min(self.most, left + (now_s - at_s) * self.rate)
        if left < cost:
            raise TooMany(f"{what} sends more than {self.rate:g} requests a second", remedy="Wait a second.")
        self._left[name] = (left - cost, now_s)
        if len(self._left) > 20_000 and now_s - self._cleaned_s > 1.0:  # full ones are as good as new ones
            self._cleaned_s = now_s
            self._left = {name: kept for name, kept in self._left.items() if now_s - kept[1] < self.most / self.rate}


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


class BoundedConnection(HttpToolsProtocol):
    """A connection that counts against its address, and is closed where no request comes.

    uvicorn bounds all connections together: one address could have them all, and keep everyone else out.

    Args:
        args, more: of uvicorn.
        open_by: connections by address.
    """

    def __init__(self, *args: Any, open_by: Counter[str], **more: Any) -> None:
        super().__init__(*args, **more)
        self._open_by, self._network = open_by, ""
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count it, or close it."""
        super().connection_made(transport)
        self._network = network_of_host(self.client[0] if self.client else "")
        self._open_by[self._network] += 1
        self._await_head()
        if self._open_by[self._network] > MOST_CONNECTIONS:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Count it no more."""
        super().connection_lost(exc)
        self._has_head()
        self._open_by[self._network] -= 1
        if not self._open_by[self._network]:
            del self._open_by[self._network]

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        """The head is here."""
        self._has_head()
        super().on_headers_complete()

    def _await_head(self) -> None:
        self._has_head()
        self._late = self.loop.call_later(HEAD_S, self.transport.abort)

    def _has_head(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

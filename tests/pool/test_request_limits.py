from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from stoker.pool import request_limits
from stoker.pool.events import Refused
from stoker.pool.request_limits import BoundedConnection, TokenBuckets, network_of_host

ASKED = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


def test_a_customers_ipv6_network_is_one_sender() -> None:
    """It has 2^64 addresses; a rate for each would be none."""
    buckets, networks = TokenBuckets(1.0, 2.0), [network_of_host(f"[2001:db8::{number}]") for number in range(3)]
    for network in networks[:2]:
        buckets.take(network, network)
    with pytest.raises(Refused, match="2001:db8::/64"):
        buckets.take(networks[2], networks[2])


async def answer(_: Any, __: Any, send: Any) -> None:
    """An answer without content."""
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@pytest.fixture
def open_by() -> Counter[str]:
    """Connections by address."""
    return Counter()


async def served(open_by: Counter[str]) -> tuple[asyncio.Server, int]:
    """A server, and its port."""
    made = partial(BoundedConnection, open_by=open_by)
    config = uvicorn.Config(answer, http=made, ws="none", lifespan="off", log_config=None, timeout_keep_alive=60)  # type: ignore[arg-type]
    config.load()
    state = ServerState()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: made(config=config, server_state=state, app_state={}), "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()[1]


@asynccontextmanager
async def connected(port: int, begin: bytes = b"") -> AsyncIterator[asyncio.StreamReader]:
    """A connection on which something was sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(begin)
    try:
        yield reader
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def is_closed(reader: asyncio.StreamReader) -> bool:
    """Whether the server closes a connection within a fifth of a second; what it sends is left out."""
    with suppress(ConnectionError):
        try:
            await asyncio.wait_for(reader.read(), 0.2)
        except TimeoutError:
            return False
    return True


def test_one_address_has_so_many_connections(open_by, monkeypatch) -> None:
    """Those that ask for nothing count as well: uvicorn's limit is for all addresses together."""
    monkeypatch.setattr(request_limits, "MOST_CONNECTIONS", 2)

    async def connect() -> None:
        server, port = await served(open_by)
        async with server, connected(port) as first:
            async with connected(port, ASKED) as second:
                async with connected(port) as third:
                    assert await is_closed(third)
                assert (await second.readline()).startswith(b"HTTP/1.1 204")
            assert not await is_closed(first)  # by then the others count no more
            assert open_by.total() == 1
            async with connected(port) as again:
                assert not await is_closed(again)

    asyncio.run(asyncio.wait_for(connect(), 20))


@pytest.mark.parametrize(
    ("begin", "closes"), [(b"", True), (b"GET / HTTP/1.1\r\nX: ", True), (ASKED + b"GET /", True), (2 * ASKED, False)]
)
def test_a_connection_without_a_request_is_closed(open_by, monkeypatch, begin, closes) -> None:
    """Silent from the beginning, in the middle of a head, or of the next one; one that was answered is kept."""
    monkeypatch.setattr(request_limits, "HEAD_S", 0.05)

    async def connect() -> None:
        server, port = await served(open_by)
        async with server, connected(port, begin) as reader:
            assert await is_closed(reader) is closes

    asyncio.run(asyncio.wait_for(connect(), 20))

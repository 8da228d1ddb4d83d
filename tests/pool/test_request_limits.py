from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from stoker.pool import request_limits
from stoker.pool.events import Refused
from stoker.pool.keys import own_key
from stoker.pool.request_limits import (
    BoundedConnection,
    OpenConnections,
    Place,
    TlsGate,
    TokenBuckets,
    TooMany,
    network_of_host,
)
from stoker.pool.serve import _certificate

ASKED = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


def test_a_customers_ipv6_network_is_one_sender() -> None:
    """It has 2^64 addresses; a rate for each would be none."""
    buckets, networks = TokenBuckets(1.0, 2.0), [network_of_host(f"[2001:db8::{number}]") for number in range(3)]
    for network in networks[:2]:
        buckets.take(network, network)
    with pytest.raises(Refused, match="2001:db8::/64"):
        buckets.take(networks[2], networks[2])


def test_what_an_answer_turns_out_to_cost_is_paid_later() -> None:
    """Its size is known once it is made: the next requests wait for what was missing."""
    buckets = TokenBuckets(1e-9, 10.0)
    buckets.take("a", "a")
    buckets.charge("a", 100.0)
    with pytest.raises(TooMany):
        buckets.take("a", "a")
    buckets.take("b", "b")


async def answer(_: Any, __: Any, send: Any) -> None:
    """An answer without content."""
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def served(
    connections: OpenConnections, context: ssl.SSLContext | None = None, app: Any = answer
) -> tuple[asyncio.Server, int]:
    """A server, over TLS where it has a certificate, and its port."""
    config = uvicorn.Config(app, ws="none", lifespan="off", log_config=None, timeout_keep_alive=60)
    config.load()

    def made() -> asyncio.Protocol:
        then = BoundedConnection(config=config, server_state=ServerState(), app_state={}, connections=connections)
        return then if context is None else TlsGate(then, connections, context, lambda _: None)

    server = await asyncio.get_running_loop().create_server(made, "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()[1]


@asynccontextmanager
async def connected(port: int, begin: bytes = b"", **more: Any) -> AsyncIterator[asyncio.StreamReader]:
    """A connection on which something was sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, **more)
    writer.write(begin)
    try:
        yield reader
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def is_closed(reader: asyncio.StreamReader, within_s: float = 60.0) -> bool:
    """Whether the server closes a connection within so many seconds; what it sends is left out."""
    with suppress(ConnectionError):
        try:
            await asyncio.wait_for(reader.read(), within_s)
        except TimeoutError:
            return False
    return True


async def is_left(connections: OpenConnections, num_open: int = 0) -> bool:
    """Whether so many are open, and none waits: the server hears of it in a moment."""
    for _ in range(1000):
        if (connections.num_open, connections.num_waiting) == (num_open, 0):
            return True
        await asyncio.sleep(0.01)
    return False


def test_one_address_has_so_many_connections(monkeypatch) -> None:
    """Those that ask for nothing count as well: uvicorn's limit is for all addresses together."""
    monkeypatch.setattr(request_limits, "MOST_CONNECTIONS", 2)
    connections = OpenConnections()

    async def connect() -> None:
        server, port = await served(connections)
        async with server, connected(port) as first:
            async with connected(port, ASKED) as second:
                assert (await second.readline()).startswith(b"HTTP/1.1 204")
                async with connected(port) as third:
                    assert await is_closed(third)
            assert not await is_closed(first, 0.2)  # by then the others count no more
            assert connections.num_open == 1
            async with connected(port) as again:
                assert not await is_closed(again, 0.2)

    asyncio.run(asyncio.wait_for(connect(), 120))


@pytest.mark.parametrize(
    ("begin", "closes"), [(b"", True), (b"GET / HTTP/1.1\r\nX: ", True), (ASKED + b"GET /", True), (2 * ASKED, False)]
)
def test_a_connection_without_a_request_is_closed(monkeypatch, begin, closes) -> None:
    """Silent from the beginning, in the middle of a head, or of the next one; one that was answered is kept."""
    monkeypatch.setattr(request_limits, "HEAD_S", 0.05)

    async def connect() -> None:
        server, port = await served(OpenConnections())
        async with server, connected(port, begin) as reader:
            assert await is_closed(reader, 60.0 if closes else 0.2) is closes

    asyncio.run(asyncio.wait_for(connect(), 120))


@pytest.mark.parametrize("begin", [b"GET /", ASKED[:-2] + b"X: "])
def test_a_head_without_an_end_is_not_kept(begin) -> None:
    """Half a minute of one, at the rate of a fast line, would be gigabytes of the pool's memory."""

    async def connect() -> None:
        connections = OpenConnections()
        server, port = await served(connections)
        async with server, connected(port, begin + b"x" * (4 << 20)) as reader:
            assert await is_closed(reader)
            assert await is_left(connections)
        server, port = await served(connections)
        async with server, connected(port, b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4194304\r\n\r\n") as reader:
            assert (await reader.readline()).startswith(b"HTTP/1.1 204")

    asyncio.run(asyncio.wait_for(connect(), 120))


def test_connections_that_ask_for_nothing_keep_no_other_out() -> None:
    """Whoever holds most of them loses the oldest, so that an address which just came gets in."""
    connections, ended = OpenConnections(most=6), list[str]()

    def enter(network: str, name: str) -> Place | None:
        return connections.enter(network, lambda: ended.append(name))

    many = [enter("loris", f"loris-{number}") for number in range(3)]
    assert None not in many
    assert enter("loris", "loris-3") is None  # half of all at most
    assert all(enter("other", f"other-{number}") is not None for number in range(3))
    assert ended == ["loris-3"]
    honest = enter("honest", "honest")
    assert honest is not None
    assert ended == ["loris-3", "loris-0"]
    connections.has_asked(honest)
    for place in many:
        connections.leave(place)  # the first of them again, which changes nothing
    assert (connections.num_open, connections.num_waiting) == (4, 3)
    for number in range(2):
        busy = enter("busy", f"busy-{number}")
        connections.has_asked(busy)
    assert enter("late", "late") is not None
    assert ended == ["loris-3", "loris-0", "other-0"]


async def talk(_: Any, __: Any, send: Any) -> None:
    """An answer that no socket's buffers hold."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % (32 << 20))]})
    await send({"type": "http.response.body", "body": bytes(32 << 20)})


@pytest.mark.parametrize(("limit", "value"), [("MOST_UNREAD_BYTES", 40 << 20), ("UNREAD_S", -1000.0)])
def test_answers_that_nobody_reads_are_not_kept(monkeypatch, limit, value) -> None:
    """One address would fill the memory of a pool with them: beyond a size, or a time, the connection is ended."""
    monkeypatch.setattr(request_limits, limit, value)
    connections = OpenConnections()

    async def connect() -> None:
        server, port = await served(connections, app=talk)
        async with server, AsyncExitStack() as stack:
            for _ in range(2):
                await stack.enter_async_context(connected(port, ASKED, limit=1 << 10))
            left = 1 if limit == "MOST_UNREAD_BYTES" else 0
            assert await is_left(connections, left)
        assert await is_left(connections)
        assert not connections._unread

    asyncio.run(asyncio.wait_for(connect(), 120))


def test_an_answer_that_is_read_is_sent_whole() -> None:
    """However large."""

    async def connect() -> None:
        connections = OpenConnections()
        server, port = await served(connections, app=talk)
        async with server, connected(port, ASKED) as reader:
            await reader.readuntil(b"\r\n\r\n")
            assert len(await reader.readexactly(32 << 20)) == 32 << 20
            assert not connections._unread

    asyncio.run(asyncio.wait_for(connect(), 120))


def test_the_oldest_that_wait_are_ended(monkeypatch) -> None:
    """Of one address beyond its share, and of all."""
    monkeypatch.setattr(request_limits, "MOST_WAITING", 2)
    monkeypatch.setattr(request_limits, "MOST_WAITING_IN_ALL", 3)
    connections, ended = OpenConnections(), list[str]()
    for name in ("a1", "a2", "a3", "b1", "c1"):
        connections.enter(name[0], lambda name=name: ended.append(name))
    assert ended == ["a1", "a2"]
    assert connections.num_waiting == 3


@pytest.fixture
def contexts(tmp_path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Of a server and a client."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(*_certificate(tmp_path, own_key("control", tmp_path)))
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    return server, client


def test_handshakes_that_are_held_open_keep_nobody_out(monkeypatch, contexts) -> None:
    """They count before they are over: a client of the same address gets in, and the oldest of them goes."""
    monkeypatch.setattr(request_limits, "MOST_WAITING", 3)
    connections, (server_context, client_context) = OpenConnections(), contexts

    async def connect() -> None:
        server, port = await served(connections, server_context)
        async with server, AsyncExitStack() as stack:
            silent = [await stack.enter_async_context(connected(port, begin)) for begin in (b"", b"\x16\x03\x01", b"")]
            for _ in range(2):
                async with connected(port, ASKED, ssl=client_context) as reader:
                    assert (await reader.readline()).startswith(b"HTTP/1.1 204")
            assert await is_closed(silent[0])
            assert not any([await is_closed(one, 0.2) for one in silent[1:]])
            assert connections.num_waiting == 2
        assert await is_left(connections)

    asyncio.run(asyncio.wait_for(connect(), 120))


@pytest.mark.parametrize("begin", [b"", b"\x16\x03\x01\x02", b"GET / HTTP/1.1\r\n\r\n"])
def test_a_handshake_that_does_not_end_is_closed(monkeypatch, contexts, begin) -> None:
    """Nothing, a part of one, or none: within its time, and its place is free again."""
    monkeypatch.setattr(request_limits, "HANDSHAKE_S", 0.05)
    connections = OpenConnections()

    async def connect() -> None:
        server, port = await served(connections, contexts[0])
        async with server, connected(port, begin) as reader:
            assert await is_closed(reader)
            assert await is_left(connections)

    asyncio.run(asyncio.wait_for(connect(), 120))


def test_a_connection_that_loses_its_place_at_the_end_of_its_handshake_is_ended(monkeypatch) -> None:
    """It is counted once, and does not go on without a place."""
    connections, ended = OpenConnections(), list[str]()

    async def connect() -> None:
        async def secured(*_: Any, **__: Any) -> Any:
            assert connections._end_oldest()
            return SimpleNamespace(abort=lambda: ended.append("secure"))

        monkeypatch.setattr(asyncio.get_running_loop(), "start_tls", secured)
        config = uvicorn.Config(answer, ws="none", lifespan="off", log_config=None)
        config.load()
        then = BoundedConnection(config=config, server_state=ServerState(), app_state={}, connections=connections)
        gate = TlsGate(then, connections, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), lambda _: None)
        plain: Any = SimpleNamespace(get_extra_info=lambda _: ("192.0.2.1", 9), abort=lambda: ended.append("plain"))
        gate.connection_made(plain)
        assert gate._handshake is not None
        await gate._handshake
        assert then.transport is None

    asyncio.run(connect())
    assert (ended, connections.num_open, connections.num_waiting) == (["plain", "secure"], 0, 0)


def test_handshakes_count_against_the_rate_of_an_address(contexts) -> None:
    """They cost the most of a request that is refused."""

    def refuse(host: str) -> None:
        raise TooMany(host)

    connections, (server_context, client_context) = OpenConnections(), contexts

    async def connect() -> None:
        config = uvicorn.Config(answer, ws="none", lifespan="off", log_config=None)
        config.load()

        def made() -> asyncio.Protocol:
            then = BoundedConnection(config=config, server_state=ServerState(), app_state={}, connections=connections)
            return TlsGate(then, connections, server_context, refuse)

        server = await asyncio.get_running_loop().create_server(made, "127.0.0.1", 0)
        async with server:
            with pytest.raises((ConnectionError, ssl.SSLError)):
                async with connected(server.sockets[0].getsockname()[1], ssl=client_context):
                    raise AssertionError("a handshake was made")
            assert await is_left(connections)

    asyncio.run(asyncio.wait_for(connect(), 120))

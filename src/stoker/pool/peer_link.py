"""Requests between two keys over QUIC: dialled by key, through NATs, on streams of one connection (iroh).

What: an endpoint's name is its pool key, so the handshake proves who is there. Both sides dial each other at once, at
the addresses that the control plane sees them at: the packet of each opens its own NAT for the other's ("hole
punching"). That works where a NAT gives a socket one port for all destinations, and not where both sides, or one
of them and a port filter, have a port for each destination ("symmetric"). No relay is used, and nothing is looked up
elsewhere.
Costs: one UDP socket for all peers; a packet every few seconds keeps the NAT's port.

A request is a stream in both directions: `length (4 bytes) | head (JSON) | body`, and the answer has the same form.
Lengths, heads and times are limited here; bodies by who reads them.

Source: iroh 1.2 (QUIC by n0); Ford et al., "Peer-to-Peer Communication Across Network Address Translators", 2005.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib.metadata
import logging
import re
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import iroh
from iroh import iroh_ffi

from stoker.errors import BadJob, PlaceFailed, PlaceUnreachable
from stoker.pool.events import canonical
from stoker.pool.keys import Key
from stoker.records.codec import parsed

_log = logging.getLogger(__name__)

PART_BYTES = 1 << 20
STALLED_S = 60.0
"""Silence in the middle of a body after which it counts as broken off [s]."""
DIAL_S = 4.0
"""How long a direct path is tried for [s]."""
_ALPN = b"stoker-pool/1"
_MOST_HEAD_BYTES = 64 * 1024
_ANSWER_S, _HANDSHAKE_S = 30.0, 10.0
_MOST_STREAMS = 32
"""Requests of one peer at a time."""
_MOST_CONNECTIONS = 4
"""With one key; the oldest go."""
_MOST_HANDSHAKES = 256
_REFUSED = 1
"""Code of a connection that is closed with the reason why."""
_DIALS_AT_S = (0.0, 0.4, 1.2)
_PATCHED = "1.2.0"


def _patch() -> None:
    """Let the Python binding write buffers at once: as released it loops over every byte, 30 times slower.

    Raises:
        BadJob: another version is installed, whose internals may differ.
    """
    if (version := importlib.metadata.version("iroh")) != _PATCHED:
        raise BadJob(
            f"iroh {version} is installed, and direct transfers were tried with {_PATCHED} alone",
            remedy=f"pip install iroh=={_PATCHED}",
        )

    def write(self: Any, value: bytes) -> None:
        with self._reserve(len(value)):
            ctypes.memmove(ctypes.addressof(self.rbuf.data.contents) + self.rbuf.len, bytes(value), len(value))

    iroh_ffi._UniffiRustBufferBuilder.write = write  # type: ignore[method-assign]  # noqa: SLF001


_patch()

Body = bytes | AsyncIterator[bytes]
Head = dict[str, Any]
Serve = Callable[[str, Head, "Incoming"], Awaitable[tuple[Head, Body]]]
"""Answers a request of a key: its head and its body in, those of the answer out."""


class NotAdmitted(PlaceUnreachable):
    """The other side ended the connection, and says why."""


class Incoming:
    """The body of a request or an answer, on its way."""

    def __init__(self, stream: iroh.RecvStream) -> None:
        self._stream = stream

    async def read(self, most_bytes: int = PART_BYTES) -> bytes:
        """The next part, b"" at the end.

        Raises:
            PlaceUnreachable: it broke off.
        """
        try:
            async with asyncio.timeout(STALLED_S):
                return bytes(await self._stream.read(most_bytes))
        except (iroh.IrohError, TimeoutError) as problem:
            raise PlaceUnreachable(f"a direct transfer broke off: {_words(problem)}") from problem

    async def stop(self) -> None:
        """Read no further."""
        with contextlib.suppress(iroh.IrohError):
            await self._stream.stop(0)


class PeerEndpoint:
    """A key's endpoint, in the event loop that made it.

    Args:
        key: its name.
        serve: answers requests of others.
        admits: why a key that connects from an address (`host:port`) is not listened to; "": it is.
        left: called with a key whose last connection has ended.
        greets: whether an address that proved to be its own may shake hands, which costs much more than to refuse it;
            None: anyone may, and addresses prove nothing, which saves a round trip.
    """

    def __init__(
        self,
        key: Key,
        serve: Serve,
        admits: Callable[[str, str], str],
        left: Callable[[str], None] = lambda _: None,
        greets: Callable[[str], bool] | None = None,
    ) -> None:
        self.key = key
        self._serve, self._admits, self._left, self._greets = serve, admits, left, greets
        self._endpoint: iroh.Endpoint | None = None
        self._connections: dict[str, list[iroh.Connection]] = defaultdict(list)
        self._arrived = asyncio.Event()
        self._meeting: Counter[str] = Counter()
        self._refusals: dict[str, str] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    async def bind(self, address: str = "0.0.0.0:0") -> int:
        """Open the socket; its port.

        Raises:
            PlaceFailed: the address is taken, or is none of this machine.
        """
        options = iroh.EndpointOptions(
            preset=iroh.preset_minimal(),
            bind_addr=address,
            alpns=[_ALPN],
            relay_mode=iroh.RelayMode.disabled(),
            secret_key=self.key.private.private_bytes_raw(),
        )
        try:
            self._endpoint = await iroh.Endpoint.bind(options)
        except iroh.IrohError as problem:
            raise PlaceFailed(f"UDP cannot be listened to at {address}: {_words(problem)}") from problem
        self._spawn(self._accept())
        host = address.rpartition(":")[0]
        return next(int(bound.rpartition(":")[2]) for bound in self._endpoint.bound_sockets() if bound.startswith(host))

    async def close(self) -> None:
        """End all connections."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if self._endpoint is not None:
            await self._endpoint.close()
        await asyncio.gather(*tasks, return_exceptions=True)

    def address_of(self, key: str) -> str:
        """Where a connected key is seen, as `host:port`; "" if it is not connected."""
        connection = self.connection(key)
        paths = [] if connection is None else connection.paths()
        return str(paths[0].remote_addr) if paths else ""

    def local_addresses(self) -> list[str]:
        """Where this machine's own network interfaces listen."""
        assert self._endpoint is not None
        return [str(one) for one in self._endpoint.addr().direct_addresses()]

    def connection(self, key: str) -> iroh.Connection | None:
        """The newest connection with a key, from either side."""
        known = [one for one in self._connections.get(key, ()) if one.close_reason() is None]
        return known[-1] if known else None

    @property
    def num_keys(self) -> int:
        """Keys that are connected."""
        return len(self._connections)

    def drop(self, key: str, why: str = "") -> None:
        """End the connections with a key; `why`: as a refusal."""
        for one in self._connections.pop(key, []):
            with contextlib.suppress(iroh.IrohError):
                one.close(_REFUSED if why else 0, why.encode()[:500])

    async def meet(self, key: str, addresses: list[str], timeout_s: float = DIAL_S) -> iroh.Connection:
        """A connection with a key that dials as well, or listens; an earlier one if it is still there.

        Dials are not cancelled when the other side's arrives first: both sides might end the one that the other keeps.

        Raises:
            PlaceUnreachable: there is no direct path.
            NotAdmitted: there is, and the other side does not want it.
        """
        if (known := self.connection(key)) is not None:
            return known
        self._meeting[key] += 1
        self._refusals.pop(key, None)
        dials = [self._spawn(self._dial(key, addresses, after_s, timeout_s)) for after_s in _DIALS_AT_S]
        try:
            return await self.arrival(key, timeout_s)
        except TimeoutError:
            for dial in dials:
                dial.cancel()
            if why := self._refusals.get(key):
                raise NotAdmitted(why) from None
            where = ", ".join(addresses) or "no address"
            raise PlaceUnreachable(f"no direct path to {key[:12]}… at {where} within {timeout_s:g} s") from None
        finally:
            self._meeting[key] -= 1
            self._meeting += Counter()  # those at zero go
            self._refusals.pop(key, None)

    async def arrival(self, key: str, timeout_s: float) -> iroh.Connection:
        """A connection with a key, waited for.

        Raises:
            TimeoutError: none came.
        """
        async with asyncio.timeout(timeout_s):
            while (connection := self.connection(key)) is None:
                await self._arrived.wait()  # of any key: the next one has an event of its own
        return connection

    async def gone(self, key: str) -> None:
        """Wait until a key is not connected any more."""
        while (connection := self.connection(key)) is not None:
            await connection.closed()

    def received_bytes(self, key: str) -> int:
        """What a key has sent over the connections that it has now [bytes]."""
        return sum(one.stats().udp_rx_bytes for one in self._connections.get(key, ()))

    async def _dial(self, key: str, addresses: list[str], after_s: float, timeout_s: float) -> None:
        assert self._endpoint is not None
        await asyncio.sleep(after_s)
        if self.connection(key) is not None or key in self._refusals:
            return
        try:
            async with asyncio.timeout(timeout_s):
                address = iroh.EndpointAddr(iroh.EndpointId.from_string(key), None, addresses)
                connection = await self._endpoint.connect(address, _ALPN)
        except (iroh.IrohError, TimeoutError):
            return
        self._keep(key, connection)

    async def _accept(self) -> None:
        assert self._endpoint is not None
        greeting = set[asyncio.Task[None]]()
        while (incoming := await self._endpoint.accept_next()) is not None:
            with contextlib.suppress(iroh.IrohError):  # it is gone; the others are waited for
                if len(greeting) >= _MOST_HANDSHAKES:
                    await incoming.ignore()  # QUIC tries again
                elif self._greets is not None and not await incoming.remote_addr_validated():
                    await incoming.retry()  # a datagram may say that it comes from anywhere
                elif self._greets is not None and not self._greets(getattr(await incoming.remote_addr(), "addr", "")):
                    await incoming.refuse()
                else:
                    task = self._spawn(self._welcome(incoming))
                    greeting.add(task)
                    task.add_done_callback(greeting.discard)

    async def _welcome(self, incoming: iroh.Incoming) -> None:
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                connection = await (await incoming.accept()).connect()
            key = str(connection.remote_id())
            address = str(connection.paths()[0].remote_addr) if connection.paths() else ""
            if not self._meeting[key] and (why := self._admits(key, address)):
                connection.close(_REFUSED, why.encode()[:500])
            else:
                self._keep(key, connection)
        except (iroh.IrohError, TimeoutError) as problem:  # from any sender
            _log.debug("a connection came to nothing: %s", _words(problem))

    def _keep(self, key: str, connection: iroh.Connection) -> None:
        self._connections[key].append(connection)
        if len(self._connections[key]) > _MOST_CONNECTIONS:
            self._connections[key].pop(0).close(0, b"there are newer ones")
        self._spawn(self._listen(key, connection))  # first: it gives the place back, also where the rest fails
        connection.set_max_concurrent_bi_streams(_MOST_STREAMS)
        connection.set_max_concurrent_uni_streams(0)
        self._arrived.set()
        self._arrived = asyncio.Event()

    async def _listen(self, key: str, connection: iroh.Connection) -> None:
        limit = asyncio.Semaphore(_MOST_STREAMS)
        try:
            while True:
                await limit.acquire()
                stream = await connection.accept_bi()
                self._spawn(self._answer(key, stream)).add_done_callback(lambda _: limit.release())
        except iroh.IrohError:
            if self._meeting[key] and (why := _refusal(connection)):
                self._refusals[key] = why
            known = self._connections.get(key, [])
            if connection in known:
                known.remove(connection)
            if not known:
                self._connections.pop(key, None)
                self._left(key)

    async def _answer(self, key: str, stream: iroh.BiStream) -> None:
        incoming = Incoming(stream.recv())
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                head = await _read_head(stream.recv())
            answer, body = await self._serve(key, head, incoming)
            await _send(stream.send(), answer, body)
        except Exception as problem:  # noqa: BLE001 - whatever a peer sends; it is theirs to try again
            _log.debug("a request of %s came to nothing: %s", key[:12], _words(problem))
            with contextlib.suppress(iroh.IrohError):
                await stream.send().reset(1)
        finally:
            await incoming.stop()

    async def request(
        self, connection: iroh.Connection, head: Head, body: Body = b"", timeout_s: float = _ANSWER_S
    ) -> tuple[Head, Incoming]:
        """Send a request; the head of the answer, and its body on the way.

        The time counts from the end of the request's body, which may stall for `STALLED_S`.

        Raises:
            PlaceUnreachable: it broke off.
            NotAdmitted: the other side ended it, and says why.
        """
        tasks = list[asyncio.Task[Any]]()
        try:
            stream = await asyncio.wait_for(connection.open_bi(), timeout_s)
            sending = asyncio.ensure_future(_send(stream.send(), head, body))
            answer = asyncio.ensure_future(_read_head(stream.recv()))  # may come before the body is sent: a refusal
            tasks += [sending, answer]
            await asyncio.wait({sending, answer}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                with contextlib.suppress(iroh.IrohError):  # the other side reads no further: its answer says why
                    await sending
            return await asyncio.wait_for(answer, timeout_s), Incoming(stream.recv())
        except (iroh.IrohError, TimeoutError) as problem:
            if why := _refusal(connection):
                raise NotAdmitted(why) from problem
            raise PlaceUnreachable(f"a direct transfer broke off: {_words(problem)}") from problem
        finally:
            for task in tasks:
                if not task.cancel() and not task.cancelled():
                    task.exception()  # looked at: the answer says what is wrong

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _send(stream: iroh.SendStream, head: Head, body: Body) -> None:
    content = canonical(head)
    try:
        await asyncio.wait_for(stream.write_all(len(content).to_bytes(4, "big") + content), STALLED_S)
        if isinstance(body, bytes):
            await asyncio.wait_for(stream.write_all(body), STALLED_S)
        else:
            async for part in body:
                await asyncio.wait_for(stream.write_all(part), STALLED_S)
        await stream.finish()
    except BaseException:
        with contextlib.suppress(iroh.IrohError):
            await stream.reset(1)  # else what was cut would end like a whole one
        raise


async def _read_head(stream: iroh.RecvStream) -> Head:
    """The head of a request or an answer.

    Raises:
        PlaceFailed: it is too long, or none.
    """
    num_bytes = int.from_bytes(await stream.read_exact(4), "big")
    if num_bytes > _MOST_HEAD_BYTES:
        raise PlaceFailed(f"a head of {num_bytes:,} bytes: at most {_MOST_HEAD_BYTES:,} are taken")
    try:
        head = parsed(bytes(await stream.read_exact(num_bytes)))
    except ValueError as problem:
        raise PlaceFailed(f"a head that is no JSON: {problem}") from problem
    if not isinstance(head, dict):
        raise PlaceFailed("a head that is no object")
    return head


def _refusal(connection: iroh.Connection) -> str:
    """Why the other side refused a connection; "": it did not."""
    match = re.fullmatch(rf"closed by peer: (.*) \(code {_REFUSED}\)", connection.close_reason() or "", re.DOTALL)
    return "".join(filter(str.isprintable, match[1])) if match else ""


def _words(problem: BaseException) -> str:
    """What iroh says of a problem."""
    if isinstance(problem, iroh.IrohError):
        with contextlib.suppress(Exception):  # its text comes over the binding, which may be gone at the end
            return str(problem.message())
    return str(problem) or type(problem).__name__

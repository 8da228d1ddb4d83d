"""One HTTP request: its headers, its body under limits (`Exchange`), and the body's buffer (`BufferedBody`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from stoker.serving.http import bodies
from stoker.serving.http.routes import Route
from stoker.serving.refusals import BadRequest, Cancelled, OverCapacity, RequestTimeout, TooLarge
from stoker.serving.service import InFlight, RequestLimits
from stoker.units import format_bytes, format_seconds

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

WORTH_A_THREAD_BYTES = 64 * 1024
"""Size above which bytes are decompressed, parsed or written on a thread instead of the event loop."""


class Exchange:
    """A request while it is answered. `scope` and `receive` are ASGI's.

    Its decompressed body, and its answer until it is sent, count in `in_flight` until `release`; then the connection
    counts what its client has not read.
    """

    __slots__ = (
        "_in_flight", "_receive", "_taken", "bytes_in", "caller", "headers", "id", "limits", "path", "route", "scope",
    )  # fmt: skip

    def __init__(self, scope: Scope, receive: Receive, limits: RequestLimits, in_flight: InFlight) -> None:
        self.scope = scope
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.limits = limits
        self.path: str = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1")
        self.route: Route | None = None
        self.caller = self.id = ""
        self.bytes_in = self._taken = 0
        self._receive = receive
        self._in_flight = in_flight

    def hold(self, num_bytes: int) -> None:
        """Count bytes held for this request.

        Raises:
            OverCapacity: there is no room.
        """
        self._in_flight.take(num_bytes)
        self._taken += num_bytes

    def release(self) -> None:
        """Release all counted bytes."""
        self._in_flight.give_back(self._taken)
        self._taken = 0

    def text_headers(self) -> dict[str, str]:
        """All headers, names in lower case."""
        return {name.decode("latin-1"): value.decode("latin-1") for name, value in self.headers.items()}

    def number(self, header: bytes) -> int | None:
        """Value of a header that is a number of bytes; None if it is absent.

        Raises:
            BadRequest: it is not a whole number.
        """
        value = self.headers.get(header)
        if value is None:
            return None
        if not value.isdigit() or len(value) > 18:
            raise BadRequest(f"the header {header.decode()} must be a number of bytes, got {value[:40]!r}")
        return int(value)

    async def body(self) -> bytes:
        """The whole body, decompressed.

        Raises:
            TooLarge: it exceeds the limit, as sent or decompressed.
            OverCapacity: all bodies together exceed the server's limit.
            RequestTimeout: it did not arrive in time.
            Cancelled: the client disconnected.
            BadRequest: it is damaged.
            WrongFormat: its compression is unknown.
        """
        body = await self._read()
        self.bytes_in = len(body)
        encoding = self.headers.get(b"content-encoding")
        if encoding is None:
            return body
        name, most = encoding.decode("latin-1"), self.limits.body_bytes
        if len(body) < WORTH_A_THREAD_BYTES:
            whole = bodies.decompress(body, name, most_bytes=most)
        else:
            whole = await asyncio.to_thread(bodies.decompress, body, name, most_bytes=most)
        self.hold(len(whole))
        return whole

    async def _read(self) -> bytes:
        if isinstance(self._receive, BufferedBody) and self._receive.is_whole:  # nearly always, and without a timer
            return self._bounded([(await self._receive())["body"]])
        announced = self.number(b"content-length")
        if announced is not None and announced > self.limits.body_bytes:
            raise self._too_large(announced)
        try:
            async with asyncio.timeout(self.limits.body_s):
                pieces: list[bytes] = []
                size = 0
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise Cancelled(f"the client went away after {size} bytes of the body")
                    pieces.append(message.get("body", b""))
                    size += len(pieces[-1])
                    if size > self.limits.body_bytes or not message.get("more_body", False):
                        return self._bounded(pieces)
        except TimeoutError as error:
            raise RequestTimeout(
                f"the body did not arrive within {format_seconds(self.limits.body_s)}; send it faster, or in parts"
            ) from error

    def _bounded(self, pieces: list[bytes]) -> bytes:
        size = sum(map(len, pieces))
        if size > self.limits.body_bytes:
            raise self._too_large(size)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _too_large(self, size: int) -> TooLarge:
        most = format_bytes(self.limits.body_bytes)
        return TooLarge(f"the body has {size} bytes or more; this server takes {most}: send fewer rows at once")


def header_list(headers: Iterable[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    """Headers in ASGI's form."""
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]


_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class BufferedBody:
    """ASGI's `receive` for an application that needs the whole body; it wakes the request's task once.

    Uvicorn's pauses every 64 KiB and copies the body twice more. Of a body with more than `most_bytes`, no more than
    the exceeding piece is kept; the application receives it as a part, and refuses it. Kept bytes count in `in_flight`
    until `release`.
    """

    __slots__ = (
        "_awaited", "_content", "_cycle", "_has_news", "_in_flight", "_most_bytes", "_num_bytes", "_refusal", "_taken",
        "is_whole",
    )  # fmt: skip

    def __init__(self, cycle: RequestResponseCycle, most_bytes: int, in_flight: InFlight) -> None:
        self._cycle = cycle
        self._most_bytes = most_bytes
        self._in_flight = in_flight
        self._content: bytes | bytearray = b""
        self._num_bytes = self._taken = 0
        self._refusal: OverCapacity | None = None
        self.is_whole = False
        """Whether the body is complete."""
        self._has_news = False
        self._awaited: asyncio.Event | None = None

    def add(self, piece: bytes) -> None:
        """Add a received piece."""
        if self._num_bytes > self._most_bytes or self._refusal is not None:
            return
        try:
            self._in_flight.take(len(piece))
        except OverCapacity as refusal:
            self._refusal = refusal
            self.release()
            self._tell()
            return
        self._taken += len(piece)
        if not self._num_bytes:
            self._content = piece  # nearly always the only one; not copied
        elif isinstance(self._content, bytes):
            self._content = bytearray(self._content + piece)
        else:
            self._content += piece  # a list of pieces of two bytes would take thirty times as much
        self._num_bytes += len(piece)
        if self._num_bytes > self._most_bytes:
            self._tell()

    def end(self) -> None:
        """Mark the body as complete."""
        self.is_whole = True
        self._tell()

    def release(self) -> None:
        """Drop the content: the request is over, or will not be answered."""
        self._in_flight.give_back(self._taken)
        self._content, self._taken = b"", 0

    async def __call__(self) -> dict[str, Any]:
        """The body, or its beginning if it is too large.

        Raises:
            OverCapacity: all bodies together exceed the server's limit.
        """
        cycle = self._cycle
        if cycle.waiting_for_100_continue and not cycle.transport.is_closing():
            cycle.transport.write(_CONTINUE)
            cycle.waiting_for_100_continue = False
        if not self._has_news:
            self._awaited = asyncio.Event()
            await self._awaited.wait()
        if self._refusal is not None:
            raise self._refusal
        body, self._content = self._content, b""
        return {"type": "http.request", "body": body, "more_body": not self.is_whole}

    def _tell(self) -> None:
        """Wake the application, or let it not wait at all."""
        self._has_news = True
        if self._awaited is not None:
            self._awaited.set()

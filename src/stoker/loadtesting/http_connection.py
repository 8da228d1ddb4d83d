"""A minimal HTTP/1.1 client connection: the client's cost per request must stay small next to what it measures."""

from __future__ import annotations

import re
import select
import socket
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

from stoker.errors import BadJob, ServiceError

_HEAD_END = b"\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)[ \t]*(?=\r\n)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:[^\r\n]*\bchunked\b", re.IGNORECASE)
_CLOSES = re.compile(rb"\r\nconnection:[ \t]*close[ \t]*(?=\r\n)", re.IGNORECASE)
_READ_BYTES = 256 * 1024
_CONNECT_S = 5.0


@dataclass(frozen=True)
class Address:
    """Where a service listens; `prefix` comes before every path."""

    host: str
    port: int
    prefix: str = ""


@dataclass(frozen=True)
class HttpAnswer:
    """A response: status, head including its blank line, and body."""

    status: int
    head: bytes
    body: bytes


def address_of(url: str) -> Address:
    """The address in `http://host:port/prefix`.

    Raises:
        BadJob: the URL has another form.
    """
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise BadJob(f"{url!r} is no URL: {error}", remedy="Give one such as http://127.0.0.1:8000.") from error
    if parts.scheme != "http" or not host:
        raise BadJob(
            f"{url!r}: requests are sent over plain HTTP",
            remedy="Give a URL such as http://127.0.0.1:8000; measure behind whatever ends TLS.",
        )
    return Address(host, port or 80, parts.path.rstrip("/"))


class ClientConnection:
    """A non-blocking socket and the response being received; one request at a time.

    Only opening blocks: microseconds on this machine, a round trip elsewhere.
    """

    def __init__(self, address: Address) -> None:
        self._socket = socket.create_connection((address.host, address.port), timeout=_CONNECT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setblocking(False)
        self._unsent = memoryview(b"")
        self._received = bytearray()
        self._answers = 0

    def fileno(self) -> int:
        """Number of the socket's file descriptor [descriptor], for selectors."""
        return self._socket.fileno()

    @property
    def wants_to_send(self) -> bool:
        """Whether a part of the request is still to be sent."""
        return len(self._unsent) > 0

    @property
    def is_fresh_loss(self) -> bool:
        """Whether a loss now is not the request's fault: the other side closed an idle connection."""
        return self._answers > 0 and not self._received

    def begin(self, request: bytes) -> None:
        """Start a request: send as much of it as the socket takes now.

        Raises:
            OSError: the connection is lost.
        """
        self._received.clear()
        self._unsent = memoryview(request)
        self.send()

    def send(self) -> None:
        """Send more of the request, as much as the socket takes now.

        Raises:
            OSError: the connection is lost.
        """
        try:
            self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            return

    def receive(self) -> HttpAnswer | None:
        """Read what has arrived; the answer once it is complete.

        Raises:
            OSError: the connection is lost.
            ServiceError: the response is not HTTP/1.1.
        """
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return None
        if not data:
            raise ConnectionResetError("closed by the other side")
        self._received += data
        answer = parse(self._received)
        self._answers += answer is not None
        return answer

    def close(self) -> None:
        """Close the socket; the service may drop the request."""
        self._socket.close()


def parse(received: bytes | bytearray) -> HttpAnswer | None:
    """The answer in these bytes, None while it is incomplete.

    Raises:
        ServiceError: the bytes are not HTTP/1.1, or a chunk has no size.
    """
    end = received.find(_HEAD_END)
    if end < 0:
        return None
    head = bytes(received[: end + len(_HEAD_END)])
    status = head[9:12]
    if not (head.startswith(b"HTTP/1.") and status.isdigit()):
        raise ServiceError(f"the answer is no HTTP/1.1: it begins with {head[:40]!r}")
    if status.startswith(b"1"):  # `100 Continue` and the like: the answer follows
        return parse(received[len(head) :])
    body: bytes | None
    if _CHUNKED.search(head):
        body = _chunked(received, len(head))
    else:
        length = _LENGTH.search(head)
        end = len(head) + (int(length[1]) if length else 0)
        body = bytes(received[len(head) : end]) if len(received) >= end else None
    return None if body is None else HttpAnswer(int(status), head, body)


def closes(answer: HttpAnswer) -> bool:
    """Whether the service ends the connection after this answer."""
    return answer.head.startswith(b"HTTP/1.0") or _CLOSES.search(answer.head) is not None


def _chunked(received: bytes | bytearray, start: int) -> bytes | None:
    parts: list[bytes] = []
    while (end := received.find(b"\r\n", start)) >= 0:
        try:
            size = int(received[start:end].split(b";")[0], 16)
        except ValueError as error:
            raise ServiceError(f"a chunk of the answer has no size: {bytes(received[start:end])[:40]!r}") from error
        start = end + 2
        if len(received) < start + size + 2:
            return None
        if size == 0:
            return b"".join(parts)
        parts.append(bytes(received[start : start + size]))
        start += size + 2
    return None


def ask(address: Address, request: bytes, *, timeout_s: float = 30.0) -> HttpAnswer:
    """Send one request on a new connection, and wait for the answer.

    Raises:
        ServiceError: the connection failed, or no answer came in time.
    """
    where = f"http://{address.host}:{address.port}"
    ends = time.monotonic() + timeout_s
    try:
        connection = ClientConnection(address)
        try:
            connection.begin(request)
            while (left := ends - time.monotonic()) > 0:
                writing = [connection] if connection.wants_to_send else []
                readable, writable, _ = select.select([connection], writing, [], left)
                if writable:
                    connection.send()
                if readable and (answer := connection.receive()) is not None:
                    return answer
        finally:
            connection.close()
    except OSError as error:
        raise ServiceError(f"{where} does not answer: {error}", remedy="Is the server running there?") from error
    raise ServiceError(f"{where} gave no answer within {timeout_s:g} s")

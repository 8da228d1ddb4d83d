"""Bounds what gRPC holds that no handler sees: messages that are still coming in, and answers that are not read.

What: gRPC's library takes a message's bytes as soon as it is asked for the message, and says nothing before it has all
of them. So it is asked only after the key was checked, and only for as many messages at a time as fit a quarter of the
memory budget at the largest size allowed. A read that is not done after `QUICK_S` is slow, and slow ones may have half
of the places: those who send little of a large message and wait cannot keep out small ones. A stream that waits for its
next message looks the same as one that sends half of it, so there may be as many streams as fit half of the budget.
Until its turn a call has at most `WINDOW_BYTES` of its message here, which is HTTP/2's flow control; the limits on
connections and on calls of one make the last quarter of that. Together this is the budget once more, beside what
`InFlight` counts: the library (grpcio 1.85) cannot be told to count both as one. An answer counts until gRPC is done
with it, and a client that reads it more slowly than the least rate loses its connection, whose socket is found among
the process's own: the library has no call for that.
Costs: for each message an entry in a dictionary; one timer while there are any.
Does not combine with: systems without `/proc`, where clients that do not read are not dropped; their answers count.
Source: the newest first under overload: Maurer 2015, Fail at Scale, ACM Queue 13(8), "adaptive LIFO".
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from google.protobuf.message import DecodeError
from grpc.aio import EOF, ServicerContext

from stoker.serving.edge import Edge
from stoker.serving.problems import BadRequest, Crowded, TooSlow
from stoker.units import KIB, format_bytes, format_seconds

_DESCRIPTORS = Path("/proc/self/fd")
QUICK_S = 0.05
"""A read that is done within it competes with no slow one."""
WINDOW_BYTES = 16 * KIB
"""Of a message that may not be read yet."""
MOST_CALLS = 128
"""Calls at a time on one connection."""
_IDLE_LOOK_S = 0.25
_NEWEST_FIRST_S = 0.1
"""When the first in line waits longer, the last goes first: there is more than can be read, and it has given up."""


Parse = Callable[[bytes], Any]
"""Makes a message of its bytes."""


def parsed(raw: bytes, parse: Parse) -> Any:
    """The message in these bytes.

    Raises:
        BadRequest: they are none.
    """
    try:
        return parse(raw)
    except DecodeError as error:
        raise BadRequest(f"the message is not the method's: {error}") from error


def options(edge: Edge) -> list[tuple[str, int]]:
    """What the library is told: the largest message, and limits whose product is a quarter of the memory budget."""
    return [
        ("grpc.max_receive_message_length", edge.limits.body_bytes),
        ("grpc.max_concurrent_streams", MOST_CALLS),
        ("grpc.max_allowed_incoming_connections", max(1, edge.in_flight.most_bytes // (4 * MOST_CALLS * WINDOW_BYTES))),
        ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
        # It would let a call have up to 32 MiB here before anybody asks for its message.
        ("grpc.http2.bdp_probe", 0),
    ]


def connection_of(peer: str) -> socket.socket | None:
    """A second descriptor of the connection to `ipv4:HOST:PORT` or `ipv6:[HOST]:PORT`; None where none is seen."""
    _, _, address = unquote(peer).partition(":")
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not port.isdigit() or not _DESCRIPTORS.is_dir():
        return None
    for entry in _DESCRIPTORS.iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile, or a socket that is not connected
            if not stat.S_ISSOCK(os.fstat(int(entry.name)).st_mode):
                continue
            copy = socket.socket(fileno=os.dup(int(entry.name)))
            try:
                if copy.family in {socket.AF_INET, socket.AF_INET6}:
                    there = copy.getpeername()  # gRPC takes IPv4 by sockets of IPv6 too, under mapped addresses
                    if (there[0].removeprefix("::ffff:"), there[1]) == (host, int(port)):
                        return copy
            except OSError:
                copy.close()
                raise
            copy.close()
    return None


class Reception:
    """The places in which messages come in."""

    def __init__(self, edge: Edge) -> None:
        self._limits = edge.limits
        self._in_flight = edge.in_flight
        self.places = max(2, edge.in_flight.most_bytes // (4 * edge.limits.body_bytes))
        self.most_streams = max(2, edge.in_flight.most_bytes // (2 * edge.limits.body_bytes))
        self._num_streams = 0
        self._reading: dict[asyncio.Task[Any], float] = {}
        self._slow: set[asyncio.Task[Any]] = set()
        self._unread: dict[object, tuple[float, str]] = {}
        self._given_up: dict[asyncio.Task[Any], Crowded | TooSlow] = {}
        self._waiting: deque[tuple[float, asyncio.Future[None]]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    async def read(self, context: ServicerContext[Any, Any]) -> bytes | None:
        """The bytes of a call's next message; None where there is none any more.

        Raises:
            Crowded: too many messages come in slowly.
            TooSlow: it, or its turn, did not come within `Limits.body_s`.
        """
        loop = asyncio.get_running_loop()
        if len(self._reading) >= self.places or self._waiting:
            turn: asyncio.Future[None] = loop.create_future()
            entry = (loop.time(), turn)
            self._waiting.append(entry)
            self._watch(loop)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled() and turn.exception() is None:
                    self._next()  # the turn had been given, and nobody takes it
                raise
            finally:
                if entry in self._waiting:
                    self._waiting.remove(entry)
        task = asyncio.current_task()
        assert task is not None
        self._reading[task] = loop.time()
        self._watch(loop)
        try:
            raw = await context.read()
        except asyncio.CancelledError:
            if refusal := self._given_up.pop(task, None):
                task.uncancel()
                raise refusal from None
            raise
        finally:
            del self._reading[task]
            self._slow.discard(task)
            self._next()
        return None if raw is EOF else raw

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        """Count a stream in while it lasts; its messages need no place.

        Raises:
            Crowded: there are as many as there may be.
        """
        if self._num_streams >= self.most_streams:
            raise Crowded(
                f"there are {self.most_streams} streams, each of which may hold a message of up to "
                f"{format_bytes(self._limits.body_bytes)}; ask with ModelInfer, or serve with a smaller --max-body or "
                "a larger --max-bodies"
            )
        self._num_streams += 1
        try:
            yield
        finally:
            self._num_streams -= 1

    def hold_answer(self, context: ServicerContext[Any, Any], num_bytes: int) -> None:
        """Count an answer until it is sent, and drop its connection when it is not read at the least rate.

        Raises:
            Crowded: there is no room; it was not counted.
        """
        loop, limits = asyncio.get_running_loop(), self._limits
        self._in_flight.take(num_bytes)
        key = object()
        self._unread[key] = (loop.time() + limits.body_s + num_bytes / limits.least_bytes_per_s, context.peer())

        def sent(_context: object) -> None:
            self._in_flight.give_back(num_bytes)
            self._unread.pop(key, None)

        context.add_done_callback(sent)
        self._watch(loop)

    async def only(self, context: ServicerContext[Any, Any]) -> bytes:
        """The bytes of a call's only message.

        Raises:
            BadRequest: there is none.
            Crowded: see `read`.
            TooSlow: likewise.
        """
        raw = await self.read(context)
        if raw is None:
            raise BadRequest("the call ended without a message")
        return raw

    def _next(self) -> None:
        """Give a place that is free to one who waits."""
        while self._waiting and len(self._reading) < self.places:
            is_long = asyncio.get_running_loop().time() - self._waiting[0][0] > _NEWEST_FIRST_S
            _, turn = self._waiting.pop() if is_long else self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is None:
            is_busy = self._reading or self._waiting
            self._timer = loop.call_later(QUICK_S if is_busy else _IDLE_LOOK_S, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Give up reads that take too long, or are slow and too many; go on while there is any."""
        self._timer = None
        now = loop.time()
        patience = format_seconds(self._limits.body_s)
        for task, began in list(self._reading.items()):
            if now - began > self._limits.body_s:
                self._give_up(task, TooSlow(f"the message did not arrive within {patience}; send it faster"))
            elif now - began >= QUICK_S and task not in self._slow:
                if len(self._slow) >= self.places // 2:
                    self._give_up(task, self._crowded())
                else:
                    self._slow.add(task)
        while self._waiting and now - self._waiting[0][0] > self._limits.body_s:
            _, turn = self._waiting.popleft()
            if not turn.done():
                turn.set_exception(self._crowded())
        for key, (due, peer) in list(self._unread.items()):
            if now > due:
                del self._unread[key]
                if connection := connection_of(peer):
                    with connection, contextlib.suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)
        if self._reading or self._waiting or self._unread:
            self._watch(loop)

    def _give_up(self, task: asyncio.Task[Any], why: Crowded | TooSlow) -> None:
        if task not in self._given_up:
            self._given_up[task] = why
            task.cancel()

    def _crowded(self) -> Crowded:
        return Crowded(
            f"{self.places // 2} messages of up to {format_bytes(self._limits.body_bytes)} come in slowly, and the "
            "server has memory for no more; ask again, or with fewer rows",
            retry_after_s=1.0,
        )

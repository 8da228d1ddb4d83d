"""The gRPC server: the protocol's methods and gRPC's health check, with bounded memory for messages and answers.

What: gRPC's library receives a message as soon as it is requested, and reports nothing before it is complete. So a
message is requested only after the key was checked, and only as many at a time as fit a quarter of the memory budget at
the largest size. A read not done after `QUICK_S` is slow, and slow ones may use half of the places, so that senders of
partial messages cannot block small ones. An idle stream looks like one with a partial message, so there are at most as
many streams as fit half of the budget. Until its turn a call has at most `WINDOW_BYTES` of its message here (HTTP/2's
flow control); limits on connections and on calls per connection make that the last quarter. Together this is a second
budget next to `InFlight`'s: the library (grpcio 1.85) cannot count both as one. An answer counts until gRPC is done
with it. A client that reads it too slowly loses its connection, whose socket is found among the process's own, since
the library has no call for that.
Use when: always.
Costs: a dictionary entry per message; one timer while there are any.
Does not combine with: systems without `/proc`, where clients that do not read are not dropped; their answers count.
Source: newest first under overload: Maurer 2015, Fail at Scale, ACM Queue 13(8), "adaptive LIFO".
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import grpc
from google.protobuf.descriptor import MethodDescriptor
from grpc.aio import EOF, ServicerContext

from stoker.serving.grpc import messages
from stoker.serving.grpc.messages import Message, Parse, parsed, typed_memory
from stoker.serving.grpc.methods import CallRecord, InferenceStream, abort, answer, as_refusal, caller_of, infer
from stoker.serving.refusals import BadRequest, Cancelled, OverCapacity, RequestTimeout
from stoker.serving.service import ServerContext
from stoker.units import KIB, format_bytes, format_seconds

_OPTIONS = (
    # Tensors are larger than gRPC's 4 MiB; an answer has no limit, since the server made it.
    ("grpc.max_send_message_length", -1),
    # A port that another server listens on is an error, and not shared with it.
    ("grpc.so_reuseport", 0),
    # Clients may keep an idle connection alive by a ping every ten seconds.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
)


COUNTED_BYTES = 16 * KIB
"""Larger answers count in the memory budget until the client has read them."""


def server(edge: ServerContext, *, options: Sequence[tuple[str, Any]] = ()) -> grpc.aio.Server:
    """A server without a port; add one with `add_insecure_port` or `add_secure_port`, then call `start`.

    Must be created in the event loop that it runs in.
    """
    made = grpc.aio.server(options=[*_OPTIONS, *limit_options(edge), *options])
    reception = Reception(edge)
    for service in (messages.INFERENCE, messages.HEALTH):
        handlers = {method.name: _handler(edge, method, reception) for method in service.methods}
        made.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))
    return made


def _handler(edge: ServerContext, method: MethodDescriptor, reception: Reception) -> grpc.RpcMethodHandler[Any, Any]:
    """The handler of a method. `reception` reads its messages as bytes, which needs a streaming method.

    On the wire a call with one message is the same as a stream of one.
    """
    parse = messages.request_class(method).FromString
    write = messages.response_class(method).SerializeToString
    if method.name == "ModelStreamInfer":
        stream = _streamed(edge, method.name, reception)
        return grpc.stream_stream_rpc_method_handler(stream, response_serializer=write)
    single = _single(edge, method.name, reception, parse)
    return grpc.stream_unary_rpc_method_handler(single, response_serializer=write)


def _single(edge: ServerContext, method: str, reception: Reception, parse: Parse) -> Any:
    """A method with one message and one response."""
    is_inference = method == "ModelInfer"

    async def call(_messages: object, context: ServicerContext) -> Message | None:
        record = CallRecord(edge, method)
        entry = record.entry
        try:
            entry.caller = caller_of(edge, method, context)
            raw = await reception.only(context)
            entry.bytes_in = len(raw)
            with edge.in_flight.taken(typed_memory(raw)):
                asked = parsed(raw, parse)
                del raw
                if is_inference:
                    response = await infer(edge, asked, entry, time_left_s=context.time_remaining())
                else:
                    response = await answer(edge, method, asked)
            num_bytes = response.ByteSize()
            if num_bytes > COUNTED_BYTES:
                reception.hold_answer(context, num_bytes)
        except asyncio.CancelledError:
            record.done(Cancelled("the client went away, or its deadline passed"))
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is becomes a status
            refused = as_refusal(error, method)
            record.done(refused)
            await abort(context, refused)
            return None
        entry.bytes_out = num_bytes
        record.done()
        return response

    return call


def _streamed(edge: ServerContext, method: str, reception: Reception) -> Any:
    """ModelStreamInfer."""

    async def asked_by(context: ServicerContext) -> AsyncIterator[bytes]:
        while (raw := await context.read()) is not EOF:
            yield raw

    async def call(_messages: object, context: ServicerContext) -> AsyncIterator[Message]:
        with contextlib.ExitStack() as held:
            try:
                stream = InferenceStream(edge, context, method)
                held.enter_context(reception.stream())
            except Exception as error:  # noqa: BLE001 - likewise; no key, or a wrong one
                refused = as_refusal(error, method)
                CallRecord(edge, method).done(refused)
                await abort(context, refused)
                return
            async for response in stream.answers(asked_by(context)):
                with reception.unread(context, response.ByteSize()):
                    yield response

    return call


_DESCRIPTORS = Path("/proc/self/fd")
QUICK_S = 0.05
"""Longer reads count as slow [s]."""
WINDOW_BYTES = 16 * KIB
"""Bytes of a message that may arrive before it is read."""
MOST_CALLS = 128
"""Limit on concurrent calls of one connection."""
_IDLE_LOOK_S = 0.25
_NEWEST_FIRST_S = 0.1
"""Waiting time of the oldest call above which the newest goes first [s]: under overload the oldest has given up."""


def limit_options(edge: ServerContext) -> list[tuple[str, int]]:
    """The library's options: the largest message, and limits whose product is a quarter of the memory budget."""
    return [
        ("grpc.max_receive_message_length", edge.limits.body_bytes),
        ("grpc.max_concurrent_streams", MOST_CALLS),
        # With it, calls that have ended but are not freed count too, and clients that keep the limit are refused.
        ("grpc.http.overload_protection", 0),
        ("grpc.max_allowed_incoming_connections", max(1, edge.in_flight.most_bytes // (4 * MOST_CALLS * WINDOW_BYTES))),
        ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
        # With it, a call could send up to 32 MiB before its message is requested.
        ("grpc.http2.bdp_probe", 0),
    ]


def connection_of(peer: str) -> socket.socket | None:
    """A second descriptor of the connection to `ipv4:HOST:PORT` or `ipv6:[HOST]:PORT`; None if it is not found."""
    _, _, address = unquote(peer).partition(":")
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not port.isdigit() or not _DESCRIPTORS.is_dir():
        return None
    for entry in _DESCRIPTORS.iterdir():
        with contextlib.suppress(OSError):  # just closed, or not connected
            if not stat.S_ISSOCK(os.fstat(int(entry.name)).st_mode):
                continue
            copy = socket.socket(fileno=os.dup(int(entry.name)))
            try:
                if copy.family in {socket.AF_INET, socket.AF_INET6}:
                    name = copy.getpeername()  # gRPC accepts IPv4 by IPv6 sockets too, with mapped addresses
                    if (name[0].removeprefix("::ffff:"), name[1]) == (host, int(port)):
                        return copy
            except OSError:
                copy.close()
                raise
            copy.close()
    return None


class Reception:
    """Bounds the messages being received, the streams, and the unread answers."""

    def __init__(self, edge: ServerContext) -> None:
        self._limits = edge.limits
        self._in_flight = edge.in_flight
        self.places = max(2, edge.in_flight.most_bytes // (4 * edge.limits.body_bytes))
        self.most_streams = max(2, edge.in_flight.most_bytes // (2 * edge.limits.body_bytes))
        self._num_streams = 0
        self._reading: dict[asyncio.Task[Any], float] = {}
        self._slow: set[asyncio.Task[Any]] = set()
        self._unread: dict[object, tuple[float, str]] = {}
        self._given_up: dict[asyncio.Task[Any], OverCapacity | RequestTimeout] = {}
        self._waiting: deque[tuple[float, asyncio.Future[None]]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    async def read(self, context: ServicerContext[Any, Any]) -> bytes | None:
        """The bytes of a call's next message; None at the end.

        Raises:
            OverCapacity: too many messages arrive slowly.
            RequestTimeout: it, or its turn, did not come within `RequestLimits.body_s`.
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
                    self._next()  # the turn had been given: pass it on
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
        """Count a stream within the block; its messages need no place.

        Raises:
            OverCapacity: the limit on streams is reached.
        """
        if self._num_streams >= self.most_streams:
            raise OverCapacity(
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
        """Count an answer until it is sent, and drop its connection if it is read too slowly.

        Raises:
            OverCapacity: there is no room; it was not counted.
        """
        held = contextlib.ExitStack()
        held.enter_context(self._in_flight.taken(num_bytes))
        held.enter_context(self.unread(context, num_bytes))
        context.add_done_callback(lambda _context: held.close())

    @contextlib.contextmanager
    def unread(self, context: ServicerContext[Any, Any], num_bytes: int) -> Iterator[None]:
        """Within the block, drop the connection if so many bytes are read too slowly."""
        loop, limits = asyncio.get_running_loop(), self._limits
        key = object()
        self._unread[key] = (loop.time() + limits.body_s + num_bytes / limits.least_bytes_per_s, context.peer())
        self._watch(loop)
        try:
            yield
        finally:
            self._unread.pop(key, None)

    async def only(self, context: ServicerContext[Any, Any]) -> bytes:
        """The bytes of a call's only message.

        Raises:
            BadRequest: there is none.
            OverCapacity: see `read`.
            RequestTimeout: likewise.
        """
        raw = await self.read(context)
        if raw is None:
            raise BadRequest("the call ended without a message")
        return raw

    def _next(self) -> None:
        """Give a free place to a waiting call."""
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
        """Give up reads that take too long, or are slow and too many; repeat while there are any."""
        self._timer = None
        now = loop.time()
        patience = format_seconds(self._limits.body_s)
        for task, began in list(self._reading.items()):
            if now - began > self._limits.body_s:
                self._give_up(task, RequestTimeout(f"the message did not arrive within {patience}; send it faster"))
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

    def _give_up(self, task: asyncio.Task[Any], why: OverCapacity | RequestTimeout) -> None:
        if task not in self._given_up:
            self._given_up[task] = why
            task.cancel()

    def _crowded(self) -> OverCapacity:
        return OverCapacity(
            f"{self.places // 2} messages of up to {format_bytes(self._limits.body_bytes)} come in slowly, and the "
            "server has memory for no more; ask again, or with fewer rows",
            retry_after_s=1.0,
        )

"""HTTP connections: uvicorn's with limits on headers, trailers, pipelined requests, slow clients and unread answers.

An answer's head and body are sent in one write: one system call, and one packet if it fits.

Costs: less CPU than uvicorn's own connections, which have none of these limits: 105 µs an answer (90 to 140), not 155
(125 to 170), with a 28 × 28 image in binary and no model; uvicorn alone with an empty handler takes 70. Source:
`python -m bench.serving.wire_overhead --requests 2000 --rounds 15`, 2026-11-23, 2 cores, uvicorn 0.54.
Source: uvicorn 0.54, `protocols/http/httptools_impl.py`; overridden are the interfaces of its parser (httptools) and of
asyncio, and its own `_start_asgi_task` and `on_response_complete`: one timer per idle connection instead of one per
request, and one coroutine less per request.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any

import orjson
from httptools import HttpParserError, HttpParserUpgrade
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from stoker.serving.http.application import DISCONNECTED, Application, BufferedBody
from stoker.serving.refusals import OverCapacity
from stoker.serving.service import ServerContext
from stoker.units import format_bytes, format_seconds

MOST_HEADERS = 128
"""Limit on a request's header lines: a short line takes thirty times its length in memory."""
MOST_PIPELINED = 64
"""Limit on a connection's requests that wait for the answer to an earlier one: each takes some kilobytes."""

_logger = logging.getLogger(__name__)


class HttpConnection(HttpToolsProtocol):
    """A client's connection. Its headers are bounded in bytes and time, its requests cancelled when it is lost."""

    def __init__(self, *args: Any, edge: ServerContext, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = edge.limits
        self._in_flight = edge.in_flight
        self._in_headers = False
        self._is_refused = False
        self._refusal = b""
        self._header_bytes = self._come_bytes = 0
        self._is_in_body = False
        self._bodiless_bytes = 0
        self._is_counted = False
        self._peer = ""
        self._timer: asyncio.TimerHandle | None = None
        self._idle_since = self.loop.time()
        self._idle_timer: asyncio.TimerHandle | None = None
        self._unsent_bytes = self._held_bytes = 0
        self._stall: asyncio.TimerHandle | None = None
        self._bodies: dict[RequestResponseCycle, BufferedBody] = {}
        self._body: BufferedBody
        self._running: asyncio.Task[None] | None = None
        self._answered: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer for the headers."""
        super().connection_made(transport)
        self._peer = self.client[0] if self.client else ""
        # Paused while any part of an answer is unsent, which keeps all of it. With 0, uvloop's TLS pauses at once.
        transport.set_write_buffer_limits(high=1, low=0)
        try:
            self._in_flight.connect(
                self._peer, most=self._limits.connections, most_of_peer=self._limits.connections_of_peer
            )
        except OverCapacity as refused:
            self._refuse(503, str(refused))
            return
        self._is_counted = True
        self._in_headers = True
        self._arm(self._limits.header_s, self._headers_are_late)
        self._look_at_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the connection's requests."""
        super().connection_lost(exc)
        self._disarm()
        self._end_stall()
        if self._is_counted:
            self._in_flight.disconnect(self._peer)
        self.pipeline.clear()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        for body in self._bodies.values():  # of pipelined requests that were not started
            body.release()
        self._bodies.clear()
        if self._running is not None and self._answered is not None and not self._running.done():
            self._answered.disconnected = True  # uvicorn sets it on the newest request only, which may be a later one
            self._running.cancel(DISCONNECTED)

    def data_received(self, data: bytes) -> None:
        """Parse; refuse headers or trailers that are too long, and, without a log line, what is not HTTP."""
        if self._is_refused:
            return
        self._come_bytes = len(data)
        try:
            self.parser.feed_data(data)
        except HttpParserUpgrade:
            if not self._is_refused:
                self.cycle.keep_alive = False  # answered; what follows would be in another protocol
        except HttpParserError as error:
            if not self._is_refused:
                self._refuse(400, f"this is not an HTTP/1.1 request: {error}")
        if self._is_refused:
            return
        if self._in_headers and not self.transport.is_closing():
            self._header_bytes += len(data)
            if self._header_bytes > self._limits.header_bytes or len(self.headers or ()) > MOST_HEADERS:
                self._headers_are_long()
            elif self._timer is None:
                self._arm(self._limits.header_s, self._headers_are_late)
        elif self._is_in_body:
            self._bodiless_bytes += len(data)  # on_body resets it: trailers and chunk extensions add up
            if self._bodiless_bytes > self._limits.header_bytes + len(data):
                self._refuse(431, f"the trailers have more than {format_bytes(self._limits.header_bytes)}")

    def on_message_begin(self) -> None:
        """A request begins; headers follow."""
        super().on_message_begin()
        self._in_headers = True
        self._header_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; trailers are dropped."""
        if not self._in_headers:
            return
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Start the request, unless its headers are too long or too many requests wait before it."""
        self._in_headers = False
        if self._is_refused:
            return
        self._disarm()
        most = self._limits.header_bytes
        may_be_long = self._header_bytes + self._come_bytes > most
        if len(self.headers) > MOST_HEADERS or (
            may_be_long and len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > most
        ):
            self._headers_are_long()
        elif len(self.pipeline) >= MOST_PIPELINED:
            self._refuse(429, f"more than {MOST_PIPELINED} requests wait on this connection; read the answers first")
        elif self.parser.should_upgrade() and self.parser.get_method() != b"GET":
            # httptools would drop the body as the other protocol's.
            self._refuse(400, "this connection stays HTTP/1.1; send the request without Upgrade")
        else:
            super().on_headers_complete()
            self._body = BufferedBody(self.cycle, self._limits.body_bytes, self._in_flight)
            self._bodies[self.cycle] = self._body
            self._is_in_body, self._bodiless_bytes = True, 0

    def on_body(self, body: bytes) -> None:
        """Collect the body of a started request that is not answered yet."""
        self._bodiless_bytes = 0
        if not (self._is_refused or self.cycle.response_complete):
            self._body.add(body)

    def on_message_complete(self) -> None:
        """The body is complete."""
        self._is_in_body = False
        self._disarm()
        if not self._is_refused:
            super().on_message_complete()
            self._body.end()

    def on_response_complete(self) -> None:
        """Start the next request; the rest of one that was answered early is discarded."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        if self.cycle.response_complete and self.cycle.more_body:
            self._arm(self._limits.linger_s, self.transport.close)
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self._is_refused:
            self._send_refusal()
        else:
            self._idle_since = self.loop.time()
        if not self.pipeline:  # else each answer would admit thousands of further short requests
            self.flow.resume_reading()

    def pause_writing(self) -> None:
        """The client reads too slowly: watch its rate."""
        super().pause_writing()
        self._watch_stall()

    def resume_writing(self) -> None:
        """The client has caught up."""
        super().resume_writing()
        self._end_stall()

    def _look_at_idle(self) -> None:
        """Close a connection that was idle for the keep-alive time."""
        if self.transport.is_closing():
            return
        is_idle = not self._in_headers and self.cycle.response_complete
        left_s = self.timeout_keep_alive - (self.loop.time() - self._idle_since if is_idle else 0.0)
        if left_s > 0:
            self._idle_timer = self.loop.call_later(left_s, self._look_at_idle)
        else:
            self.transport.close()

    def _watch_stall(self) -> None:
        """Check every `body_s` that the client reads at the least rate; else drop it."""
        self._unsent_bytes = self.transport.get_write_buffer_size()

        def check() -> None:
            taken = self._unsent_bytes - self.transport.get_write_buffer_size()
            if taken >= self._limits.least_bytes_per_s * self._limits.body_s:
                self._watch_stall()
            else:
                self.transport.abort()

        self._stall = self.loop.call_later(self._limits.body_s, check)

    def _end_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
            self._in_flight.give_back(self._held_bytes)
            self._held_bytes = 0

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Like uvicorn's, with body and answer in one piece each, and a task that can be cancelled later."""
        self._answered = cycle
        task = self._running = self.loop.create_task(self._answer(cycle, app))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    async def _answer(self, cycle: RequestResponseCycle, app: Any) -> None:
        body, answer = self._bodies.pop(cycle), BufferedResponse(cycle)
        try:
            await app(cycle.scope, body, answer)
        except Exception:
            _logger.exception("%s %s was not answered", cycle.scope["method"], cycle.scope["path"])
            self.transport.close()
        finally:
            body.release()
            if self._stall is not None:  # an answer is held until its last byte is sent
                self._in_flight.give_back(self._held_bytes - answer.num_bytes)
                self._held_bytes = answer.num_bytes
            cycle.on_response = _do_nothing  # the bound method makes a cycle that only the garbage collector frees

    def _headers_are_long(self) -> None:
        self._refuse(431, f"the headers have more than {format_bytes(self._limits.header_bytes)}")

    def _headers_are_late(self) -> None:
        self._timer = None
        if self._in_headers and not self.transport.is_closing():
            if self._header_bytes:
                self._refuse(408, f"the headers did not arrive within {format_seconds(self._limits.header_s)}")
            else:
                self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        """Read no more, and close with this once earlier requests are answered: clients tell answers by their order."""
        self._is_refused = True
        self._disarm()
        body = orjson.dumps({"error": message})
        lines = (
            STATUS_LINE[status],
            b"content-type: application/json\r\n",
            b"content-length: %d\r\n" % len(body),
            b"connection: close\r\n\r\n",
        )
        self._refusal = b"".join((*lines, body))
        refused = self.cycle if self._is_in_body else None  # else it was not started
        if refused is not None and self.pipeline:
            self.pipeline.popleft()
            self._bodies.pop(refused).release()
        if self._answered is None or self._answered is refused or self._answered.response_complete:
            self._send_refusal()

    def _send_refusal(self) -> None:
        self.transport.write(self._refusal)
        self.transport.close()

    def _arm(self, seconds: float, late: Any) -> None:
        self._disarm()
        self._timer = self.loop.call_later(seconds, late)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _do_nothing() -> None:
    """The request is over."""


def uvicorn_config(edge: ServerContext, **settings: Any) -> Config:
    """Configuration of uvicorn: httptools, uvloop, no log and no headers of its own.

    `settings` are further ones of `uvicorn.Config` (TLS, timeouts), and override these.
    """
    ours: dict[str, Any] = {
        "http": partial(HttpConnection, edge=edge),
        "loop": "uvloop",
        "ws": "none",
        "lifespan": "off",
        "log_config": None,
        "access_log": False,
        "proxy_headers": False,
        "server_header": False,
        "date_header": False,
        "timeout_keep_alive": 75,
    }
    return Config(Application(edge), **(ours | settings))


class BufferedResponse:
    """ASGI's `send` for answers whose body comes in one piece, in place of uvicorn's.

    Headers are written without checks: none contains text from a client. Source: uvicorn 0.54,
    `RequestResponseCycle.send`, whose state this maintains.
    """

    __slots__ = ("_cycle", "_head", "num_bytes")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._head = b""
        self.num_bytes = 0
        """Size of the written body [bytes]."""

    async def __call__(self, message: dict[str, Any]) -> None:
        """Keep the head; with the body, write both."""
        cycle = self._cycle
        if message["type"] == "http.response.start":
            lines = [STATUS_LINE[message["status"]]]
            for name, value in message["headers"]:
                lines += (name, b": ", value, b"\r\n")
                if name == b"connection":
                    cycle.keep_alive = False  # the only value of our answers is `close`
            if not cycle.keep_alive and b"connection" not in lines:
                lines.append(b"connection: close\r\n")
            lines.append(b"\r\n")
            self._head = b"".join(lines)
            return
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        if cycle.disconnected:
            return
        cycle.response_started = cycle.response_complete = True
        cycle.waiting_for_100_continue = False
        body = b"" if cycle.scope["method"] == "HEAD" else message["body"]
        self.num_bytes = len(body)
        cycle.transport.writelines((self._head, body) if body else (self._head,))
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()

"""Sends an answer's head and body in one write: one system call, and where it fits one packet."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle


class WholeAnswer:
    """ASGI's `send` for answers whose body comes in one piece, in place of uvicorn's.

    Headers are written as they are: none of ours has anything in it that a client sent. Source: uvicorn 0.54,
    `RequestResponseCycle.send`, of which this keeps the state in order.
    """

    __slots__ = ("_cycle", "_head", "num_bytes")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._head = b""
        self.num_bytes = 0
        """Of the body that was written."""

    async def __call__(self, message: dict[str, Any]) -> None:
        """Keep the head; with the body, write both."""
        cycle = self._cycle
        if message["type"] == "http.response.start":
            self._head = self._head_of(message)
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

    def _head_of(self, message: dict[str, Any]) -> bytes:
        lines = [STATUS_LINE[message["status"]]]
        for name, value in message["headers"]:
            lines += (name, b": ", value, b"\r\n")
            if name == b"connection":
                self._cycle.keep_alive = False  # the only value that an answer has is `close`
        if not self._cycle.keep_alive and b"connection" not in lines:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        return b"".join(lines)

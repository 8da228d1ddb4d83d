"""Gathers a body as it comes in, and hands it over whole: joined once, and its task woken once."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class WholeBody:
    """ASGI's `receive` for an application that needs the whole body anyway, in place of uvicorn's.

    Uvicorn's holds a body up every 64 KiB and copies it twice more. Of a body with more than `most_bytes` no more than
    the piece that exceeds them is kept; the application is handed it as a part, and refuses it.
    """

    __slots__ = ("_cycle", "_has_news", "_most_bytes", "_num_bytes", "_pieces", "is_whole")

    def __init__(self, cycle: RequestResponseCycle, most_bytes: int) -> None:
        self._cycle = cycle
        self._most_bytes = most_bytes
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self.is_whole = False
        """Whether all of it is here."""
        self._has_news = asyncio.Event()

    def add(self, piece: bytes) -> None:
        """A piece has come."""
        if self._num_bytes <= self._most_bytes:
            self._pieces.append(piece)
            self._num_bytes += len(piece)
            if self._num_bytes > self._most_bytes:
                self._has_news.set()

    def end(self) -> None:
        """It was the last piece."""
        self.is_whole = True
        self._has_news.set()

    async def __call__(self) -> dict[str, Any]:
        """The body, or so much of it as is too much."""
        cycle = self._cycle
        if cycle.waiting_for_100_continue and not cycle.transport.is_closing():
            cycle.transport.write(_CONTINUE)
            cycle.waiting_for_100_continue = False
        if not self.is_whole:
            await self._has_news.wait()
        body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces = []
        return {"type": "http.request", "body": body, "more_body": not self.is_whole}

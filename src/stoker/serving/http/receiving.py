"""Gathers a body as it comes in, in one buffer, and hands it over whole: its task is woken once."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from stoker.serving.in_flight import InFlight
from stoker.serving.problems import Crowded

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class WholeBody:
    """ASGI's `receive` for an application that needs the whole body anyway, in place of uvicorn's.

    Uvicorn's holds a body up every 64 KiB and copies it twice more. Of a body with more than `most_bytes` no more than
    the piece that exceeds them is kept; the application is handed it as a part, and refuses it. What is kept is counted
    in `in_flight` until `release`.
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
        self._refusal: Crowded | None = None
        self.is_whole = False
        """Whether all of it is here."""
        self._has_news = False
        self._awaited: asyncio.Event | None = None

    def add(self, piece: bytes) -> None:
        """A piece has come."""
        if self._num_bytes > self._most_bytes or self._refusal is not None:
            return
        try:
            self._in_flight.take(len(piece))
        except Crowded as refusal:
            self._refusal = refusal
            self.release()
            self._tell()
            return
        self._taken += len(piece)
        if not self._num_bytes:
            self._content = piece  # nearly always the only one, and not copied
        elif isinstance(self._content, bytes):
            self._content = bytearray(self._content + piece)
        else:
            self._content += piece  # a list of pieces of two bytes would take thirty times as much
        self._num_bytes += len(piece)
        if self._num_bytes > self._most_bytes:
            self._tell()

    def end(self) -> None:
        """It was the last piece."""
        self.is_whole = True
        self._tell()

    def release(self) -> None:
        """Forget what was kept: the request is over, or will not be answered."""
        self._in_flight.give_back(self._taken)
        self._content, self._taken = b"", 0

    async def __call__(self) -> dict[str, Any]:
        """The body, or so much of it as is too much.

        Raises:
            Crowded: there was no room for it among the bodies of others.
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
        """Have the application go on, whether it waits already or comes to it later."""
        self._has_news = True
        if self._awaited is not None:
            self._awaited.set()

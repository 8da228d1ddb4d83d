"""A server of an ASGI application that says when it answers: the live page, a pool."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn


class AnnouncedServer(uvicorn.Server):
    """A server that calls `announce` when it answers, and `leave` when it is to exit, before it waits for answers."""

    def __init__(
        self,
        config: uvicorn.Config,
        announce: Callable[[], None] = lambda: None,
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(config)
        self._announce, self._leave = announce, leave
        self._exits = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to answer, and say so."""
        await super().startup(sockets)
        if self.started:
            self._announce()

    async def main_loop(self) -> None:
        """Until it is to exit: uvicorn looks ten times a second, which is most of what an idle page costs."""
        self._loop = asyncio.get_running_loop()
        await self.on_tick(0)
        if not self.should_exit:
            await self._exits.wait()
        self._leave()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take a signal to exit."""
        super().handle_exit(sig, frame)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._exits.set)

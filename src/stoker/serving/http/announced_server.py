"""A server of an ASGI application that listens before it is made, and says when it answers: the live page, a pool."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from stoker.errors import BadRun


class AnnouncedServer(uvicorn.Server):
    """A server that calls `announce` when it answers, and `leave` when it is to exit, before it waits for answers."""

    def __init__(
        self, config: uvicorn.Config, announce: Callable[[], None], leave: Callable[[], None] = lambda: None
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


def bound_listener(host: str, port: int) -> socket.socket:
    """A socket bound to an address; port 0 takes any free one.

    Raises:
        BadRun: the port is taken, or the address is none of this machine.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as problem:
        listener.close()
        raise BadRun(
            f"cannot listen at {host}:{port}: {problem.strerror}",
            remedy="Give another port with --port (0: any free one).",
        ) from problem
    return listener

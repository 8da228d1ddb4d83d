"""Both edges over a service, on free ports, in a thread of their own: for clients that block."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn

from stoker.serving.grpc import server
from stoker.serving.http.connection import uvicorn_config
from stoker.serving.service import ServerContext


@dataclass(frozen=True)
class Running:
    """Where the edges listen, as `host:port`, and the loop they run in."""

    http: str
    grpc: str
    loop: asyncio.AbstractEventLoop

    @property
    def address(self) -> tuple[str, int]:
        """HTTP's, for a socket."""
        host, port = self.http.split(":")
        return host, int(port)

    def do(self, act: Callable[[], object]) -> None:
        """Run something in the servers' loop."""
        self.loop.call_soon_threadsafe(act)


@contextmanager
def running(edge: ServerContext, **settings: Any) -> Iterator[Running]:
    """Both edges, uvicorn with these settings; stopped at the end."""
    listening = socket.create_server(("127.0.0.1", 0))
    http = uvicorn.Server(uvicorn_config(edge, timeout_graceful_shutdown=2, **settings))
    http.install_signal_handlers = lambda: None
    started: list[Running] = []
    is_up = threading.Event()

    async def serve() -> None:
        grpc_server = server(edge)
        port = grpc_server.add_insecure_port("127.0.0.1:0")
        await grpc_server.start()
        where = f"127.0.0.1:{listening.getsockname()[1]}"
        started.append(Running(where, f"127.0.0.1:{port}", asyncio.get_running_loop()))
        is_up.set()
        await http.serve(sockets=[listening])
        await grpc_server.stop(grace=1)

    def run() -> None:
        with asyncio.Runner(loop_factory=http.config.get_loop_factory()) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run, name="edges")
    thread.start()
    try:
        assert is_up.wait(60), "the servers did not start"
        while not http.started:  # uvicorn sets it one step of its loop after the socket listens
            is_up.wait(0.001)
            threading.Event().wait(0.005)
        yield started[0]
    finally:
        http.should_exit = True
        thread.join(60)
        listening.close()
        assert not thread.is_alive(), "the servers did not stop"

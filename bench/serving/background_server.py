"""A server on a thread of this process, for tests and measurements."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, Self, TypeVar

import uvloop

from stoker.serving.server import Server, ServerOptions, ServerStarted

T = TypeVar("T")


class BackgroundServer:
    """A server on a thread of this process.

    ```
    with BackgroundServer(ServerOptions(places=(path,), http_port=0, grpc_port=0, admin_port=0)) as running:
        print(running.started.http)
    ```
    `unanswered` is the number of requests left when it ended. Entering raises what `Server.start` raises.
    """

    started: ServerStarted
    server: Server

    def __init__(self, options: ServerOptions) -> None:
        self.unanswered = 0
        self._options = options
        self._loop = uvloop.new_event_loop()
        self._stop = asyncio.Event()
        self._up = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="stoker-server", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._up.wait()
        if self._error is not None:
            self._thread.join()
            raise self._error
        return self

    def __exit__(self, _kind: object, error: object, _trace: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        if self._error is not None and error is None:
            raise self._error

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine run on the server's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            try:
                runner.run(self._main())
            except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
                self._error = error
            finally:
                self._up.set()

    async def _main(self) -> None:
        self.server = Server(self._options)
        self.started = await self.server.start()
        self._up.set()
        await self._stop.wait()
        self.unanswered = await self.server.stop(self._options.grace_s)

"""A server as a process of its own (`run`), or within another (`Running`)."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

import prometheus_client
import uvloop

from stoker.errors import ServiceError, StokerError
from stoker.serving.lifecycle import Server
from stoker.serving.options import ServerOptions, Started

T = TypeVar("T")
_log = logging.getLogger(__name__)


def run(options: ServerOptions, announce: Callable[[Started], None]) -> None:
    """Serve until SIGTERM or SIGINT, and then finish what was accepted; a second signal ends the process at once.

    SIGHUP reopens the access log, reads keys and certificate again and looks at the models' directories.

    Args:
        options: what to serve, and how.
        announce: is told once the server is up.

    Raises:
        StokerError: it could not start; see `Server.start`.
        ServiceError: requests were left unanswered when the grace was over.
    """
    # In all of the process, which is the server's own: nobody reads when a series began.
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        unanswered = runner.run(_serve(options, announce))
    if unanswered:
        raise ServiceError(
            f"{unanswered} requests were still unanswered after {options.grace_s:g} s of grace",
            remedy="Give a longer --grace.",
        )


async def _serve(options: ServerOptions, announce: Callable[[Started], None]) -> int:
    stop, reload = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):  # before anything else: a signal may come at any moment
        loop.add_signal_handler(number, _stop_or_end, stop, number)
    loop.add_signal_handler(signal.SIGHUP, reload.set)
    server = Server(options)
    starting = loop.create_task(server.start())
    stopped = loop.create_task(stop.wait())
    await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.wait({starting})
        return 0
    announce(starting.result())
    reloading = loop.create_task(_reload(server, reload))
    await stopped
    reloading.cancel()
    return await server.stop(options.grace_s)


async def _reload(server: Server, asked: asyncio.Event) -> None:
    """Reload whenever it is asked for; once for what was asked several times meanwhile, or during the start."""
    while True:
        await asked.wait()
        asked.clear()
        try:
            await server.reload()
        except StokerError as error:
            _log.warning("%s", error)
        except Exception:  # noqa: BLE001 - the next signal is to be followed as well
            _log.exception("the reload failed")


def _stop_or_end(stop: asyncio.Event, number: int) -> None:
    """The first signal stops the server, the second ends the process where it is."""
    if stop.is_set():
        os._exit(128 + number)
    stop.set()


class Running:
    """A server on a thread of this process, for tests and measurements.

    ```
    with Running(ServerOptions(places=(path,), http_port=0, grpc_port=0, admin_port=0)) as running:
        print(running.started.http)
    ```
    `unanswered` is how many requests were left when it ended. Entering raises what `Server.start` raises.
    """

    started: Started
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        if self._error is not None and error is None:
            raise self._error

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """The outcome of a coroutine on the server's event loop."""
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

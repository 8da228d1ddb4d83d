"""Doors of a server: sockets that are bound before anything is loaded, and the HTTP and gRPC servers behind them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn

from stoker.errors import ServiceError
from stoker.serving.access.tls import Tls
from stoker.serving.edge import Edge
from stoker.serving.grpc import server
from stoker.serving.http import uvicorn_config

BACKLOG = 2048
"""Connections that may wait to be accepted."""
_START_S = 10.0
_REFUSALS_S = 1.0
"""How long those whose requests are given up have to read that."""


def bind(host: str, port: int, what: str) -> socket.socket:
    """A socket bound to an address; nobody can connect until it listens.

    Raises:
        ServiceError: the port is taken or forbidden, or the host is none of this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise cannot_listen(host, port, what, error) from error
    bound.setblocking(False)
    return bound


def bind_all(*wanted: tuple[str, int | None, str]) -> list[socket.socket | None]:
    """A socket for each (host, port, name), None where there is no port; all of them, or none is left bound.

    Raises:
        ServiceError: see `bind`.
    """
    with contextlib.ExitStack() as bound:
        found = [None if port is None else bound.enter_context(bind(host, port, what)) for host, port, what in wanted]
        bound.pop_all()
    return found


def cannot_listen(host: str, port: int, what: str, error: Exception) -> ServiceError:
    """An address that cannot be listened at."""
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return ServiceError(
        f"cannot listen at {host}:{port} for {what}: {reason}",
        remedy=f"Give another port with --{what}-port (0: any free one), or stop what listens there.",
    )


class HttpDoor:
    """An HTTP server in the running event loop, which leaves signals to others."""

    def __init__(self, bound: socket.socket, edge: Edge, tls: Tls | None) -> None:
        host, port = bound.getsockname()[:2]
        self.address = f"{'https' if tls else 'http'}://{shown(host)}:{port}"
        config = uvicorn_config(edge, backlog=BACKLOG, log_level="error")
        if tls is not None:
            config.load()
            config.ssl = tls.context()
        self._server = _Quiet(config)
        self._task = asyncio.get_running_loop().create_task(self._server.serve(sockets=[bound]))

    async def opened(self) -> None:
        """Return once clients can connect."""
        async with asyncio.timeout(_START_S):
            while not self._server.started:
                if self._task.done():
                    self._task.result()
                await asyncio.sleep(0.001)

    async def close(self, within_s: float) -> int:
        """Accept nothing more, answer what came in; how many requests were still unanswered after `within_s`."""
        self._server.should_exit = True
        await asyncio.wait({self._task}, timeout=within_s)
        unanswered = set(self._server.server_state.tasks)
        if not self._task.done():
            for task in unanswered:
                task.cancel()
            if unanswered:
                await asyncio.wait(unanswered, timeout=_REFUSALS_S)
            self._server.force_exit = True
            for connection in list(self._server.server_state.connections):
                connection.transport.close()
        await self._task
        return len(unanswered)


class GrpcDoor:
    """A gRPC server in the running event loop.

    Raises:
        ServiceError: the port is taken.
    """

    def __init__(self, host: str, port: int, edge: Edge, tls: Tls | None) -> None:
        if port:
            bind(host, port, "grpc").close()  # gRPC itself would say less, and to standard error
        self._server = server(edge)
        address = f"{shown(host)}:{port}"
        try:
            if tls is None:
                opened = self._server.add_insecure_port(address)
            else:
                opened = self._server.add_secure_port(address, tls.credentials())
        except RuntimeError as error:
            raise cannot_listen(host, port, "grpc", error) from error
        self.address = f"{shown(host)}:{opened}"

    async def opened(self) -> None:
        """Return once clients can connect."""
        await self._server.start()

    async def close(self, within_s: float) -> None:
        """Accept nothing more, answer what came in; what is left after `within_s` is cancelled."""
        await self._server.stop(within_s)


class _Quiet(uvicorn.Server):
    """Uvicorn's server without its handlers of signals: the process has several servers and one way to stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


def shown(host: str) -> str:
    """A host as it stands in an address."""
    return f"[{host}]" if ":" in host else host

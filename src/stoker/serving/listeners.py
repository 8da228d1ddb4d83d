"""Doors of a server: sockets that are bound before anything is loaded, and the HTTP and gRPC servers behind them.

TLS for all doors, from one certificate and its key, which can be replaced while connections go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import grpc
import uvicorn

from stoker.errors import BadJob, ServiceError
from stoker.serving.grpc import server
from stoker.serving.http.connection import uvicorn_config
from stoker.serving.service import ServerContext

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


class HttpListener:
    """An HTTP server in the running event loop, which leaves signals to others."""

    def __init__(self, bound: socket.socket, edge: ServerContext, tls: Tls | None) -> None:
        host, port = bound.getsockname()[:2]
        self.address = f"{'https' if tls else 'http'}://{url_host(host)}:{port}"
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


class GrpcListener:
    """A gRPC server in the running event loop.

    Raises:
        ServiceError: the port is taken.
    """

    def __init__(self, host: str, port: int, edge: ServerContext, tls: Tls | None) -> None:
        if port:
            bind(host, port, "grpc").close()  # gRPC itself would say less, and to standard error
        self._server = server(edge)
        address = f"{url_host(host)}:{port}"
        try:
            if tls is None:
                opened = self._server.add_insecure_port(address)
            else:
                opened = self._server.add_secure_port(address, tls.credentials())
        except RuntimeError as error:
            raise cannot_listen(host, port, "grpc", error) from error
        self.address = f"{url_host(host)}:{opened}"

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


def url_host(host: str) -> str:
    """A host as it stands in an address."""
    return f"[{host}]" if ":" in host else host


class Tls:
    """A certificate chain and its private key: files in PEM, as they were when they were last read.

    Connections keep what they began with; those that are made later get what was read last.

    Raises:
        BadJob: see `read`.
    """

    def __init__(self, certificate: Path, key: Path) -> None:
        self._certificate = certificate
        self._key = key
        self.read()

    def read(self) -> None:
        """Take the files as they are now; where they cannot be used, those read before still hold.

        Raises:
            BadJob: a file cannot be read, or the key is not the certificate's.
        """
        try:
            pem = self._key.read_bytes(), self._certificate.read_bytes()
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.load_cert_chain(self._certificate, self._key, password=_no_password)
        except (OSError, ssl.SSLError) as error:
            raise BadJob(
                f"TLS cannot be set up with {self._certificate} and {self._key}: {error}",
                remedy="Give a certificate chain and its unencrypted private key, both in PEM.",
            ) from error
        self._context = context
        self._for_grpc = grpc.ssl_server_certificate_configuration([pem])

    def context(self) -> ssl.SSLContext:
        """For HTTP: TLS 1.2 and later, as Python's defaults choose ciphers."""
        context = self._context
        context.sni_callback = self._hand_over
        return context

    def credentials(self) -> grpc.ServerCredentials:
        """For gRPC, which asks for the certificate anew with each connection."""
        return grpc.dynamic_ssl_server_credentials(self._for_grpc, lambda: self._for_grpc)

    def _hand_over(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        """At the beginning of a connection: have it use the certificate that was read last."""
        connection.context = self._context


def read_tls(certificate: Path | None, key: Path | None) -> Tls | None:
    """TLS if both files are given, None if neither is.

    Raises:
        BadJob: only one is given, or they cannot be used.
    """
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise BadJob("--tls-cert and --tls-key belong together", remedy="Give both, or neither.")
    return Tls(certificate, key)


def _no_password() -> str:
    """Instead of asking on the terminal; an encrypted key then does not open."""
    return ""

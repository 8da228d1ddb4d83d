"""Listeners: sockets that are bound before models load, the HTTP and gRPC servers on them, and their TLS."""

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
"""Time for clients to read that their request was given up [s]."""


def bind(host: str, port: int, what: str) -> socket.socket:
    """A socket bound to an address; clients can connect once it listens.

    Raises:
        ServiceError: the port is taken or forbidden, or the host is not this machine's.
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


def bind_all(*addresses: tuple[str, int | None, str]) -> list[socket.socket | None]:
    """A socket for each (host, port, name), None without a port; if one fails, none stays bound.

    Raises:
        ServiceError: see `bind`.
    """
    with contextlib.ExitStack() as bound:
        sockets = [
            None if port is None else bound.enter_context(bind(host, port, what)) for host, port, what in addresses
        ]
        bound.pop_all()
    return sockets


def cannot_listen(host: str, port: int, what: str, error: Exception) -> ServiceError:
    """The error for an address that cannot be listened at."""
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return ServiceError(
        f"cannot listen at {host}:{port} for {what}: {reason}",
        remedy=f"Give another port with --{what}-port (0: any free one), or stop what listens there.",
    )


class HttpListener:
    """An HTTP server in the running event loop, without signal handlers."""

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
        """Accept nothing more, answer what arrived; number of requests [requests] still unanswered after `within_s`."""
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
            bind(host, port, "grpc").close()  # gRPC itself reports less, on standard error
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
        """Accept nothing more, answer what arrived; the rest is cancelled after `within_s`."""
        await self._server.stop(within_s)


class _Quiet(uvicorn.Server):
    """Uvicorn's server without its signal handlers: the process has several servers and one shutdown."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


def url_host(host: str) -> str:
    """A host in the form of a URL: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


class Tls:
    """A certificate chain and its private key: PEM files, as last read.

    New connections use what was read last; existing ones keep theirs.

    Raises:
        BadJob: see `read`.
    """

    def __init__(self, certificate: Path, key: Path) -> None:
        self._certificate = certificate
        self._key = key
        self.read()

    def read(self) -> None:
        """Read the files again; if they cannot be used, the earlier content still applies.

        Raises:
            BadJob: a file cannot be read, or the key is not the certificate's.
        """
        try:
            pem = self._key.read_bytes(), self._certificate.read_bytes()
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            # An empty password, instead of a prompt on the terminal: an encrypted key then fails.
            context.load_cert_chain(self._certificate, self._key, password=lambda: "")
        except (OSError, ssl.SSLError) as error:
            raise BadJob(
                f"TLS cannot be set up with {self._certificate} and {self._key}: {error}",
                remedy="Give a certificate chain and its unencrypted private key, both in PEM.",
            ) from error
        self._context = context
        self._for_grpc = grpc.ssl_server_certificate_configuration([pem])

    def context(self) -> ssl.SSLContext:
        """For HTTP: TLS 1.2 and later, as Python's defaults choose ciphers."""

        def use_latest(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            connection.context = self._context

        context = self._context
        context.sni_callback = use_latest  # called as each connection begins
        return context

    def credentials(self) -> grpc.ServerCredentials:
        """For gRPC, which asks for the certificate with each connection."""
        return grpc.dynamic_ssl_server_credentials(self._for_grpc, lambda: self._for_grpc)


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

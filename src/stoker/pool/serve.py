"""`stoker pool serve`: the control plane on an address, with TLS by the pool's own key."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import resource
import socket
import ssl
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import NameOID

from stoker.errors import BadJob, BadRun
from stoker.pool.control_plane import ControlPlane
from stoker.pool.events import Founded
from stoker.pool.keys import Key, own_key
from stoker.pool.request_limits import BoundedConnection, OpenConnections, TlsGate
from stoker.serving.http.announced_server import AnnouncedServer
from stoker.serving.http.listener import bound_listener
from stoker.store.files import write_atomic

if TYPE_CHECKING:
    from stoker.pool.contract.custody import ChainSettings

DEFAULT_PORT = 8430
_MOST_CONNECTIONS = 20_000
"""Connections at a time, where the system lets a process have so many. Each agent that waits for work holds one."""
_OWN_FILES = 256
"""Open files that are left for the log, and what else is no connection; and a blob for each connection."""


def serve_pool(  # noqa: PLR0913 - the command's options
    folder: Path,
    *,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    rules: Founded | None = None,
    has_tls: bool = False,
    chain: ChainSettings | None = None,
    is_p2p: bool = False,
    probe_every_s: float | None = None,
    announce: Callable[[str], None] = lambda _address: None,
) -> None:
    """Serve a pool until SIGINT or SIGTERM.

    Args:
        folder: of its log, blobs and key (`control.key`); made if it is not there.
        host: address to listen at; another than the loopback is served with TLS alone.
        port: 0: any free one.
        rules: of a new pool.
        has_tls: TLS on the loopback as well.
        chain: contract that gets the pool's roots, and has its money if the rules name it.
        is_p2p: peers meet at the UDP port of the same number and the next one (`stoker[p2p]`).
        probe_every_s: time between probes of idle devices at one moment [s]; None: there are none.
        announce: called with the pool's address once it answers.

    Raises:
        BadRun: the log is damaged or in use, the port is taken, or the contract is not the pool's.
        BadJob: the host is no address.
    """
    key = own_key("control", folder)
    try:
        is_local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        raise BadJob(f"--host {host}: wanted an IP address, such as 127.0.0.1 or 0.0.0.0") from None
    custody = None
    if chain is not None:
        from stoker.pool.contract.custody import Custody  # noqa: PLC0415 - an extra of its own

        custody = Custody(chain.connected(), key.public)
        custody.require_arbiter()
        if chain.has_money:
            rules = replace(rules or Founded(name="pool"), contract=custody.contract.account)
    for udp_port in (port, port + 1) if is_p2p and port else ():
        _require_free_udp(host, udp_port)
    listener = bound_listener(host, port)
    plane = ControlPlane(folder, key, rules, custody=custody, probe_every_s=probe_every_s)
    if is_p2p:
        from stoker.pool.rendezvous import PeerRendezvous  # noqa: PLC0415 - iroh, which few need

        plane.rendezvous = PeerRendezvous(plane, host, port)
    is_secure = has_tls or not is_local
    connections = OpenConnections(_most_connections())

    def connection(**given: Any) -> asyncio.Protocol:
        return BoundedConnection(connections=connections, **given)

    def secured(**given: Any) -> asyncio.Protocol:
        then = BoundedConnection(connections=connections, **given)
        return TlsGate(then, connections, context, partial(plane.count_address, way="TLS"))

    if is_secure:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(*_certificate(folder, key))
    config = uvicorn.Config(
        plane.application(),
        log_level="error",
        access_log=False,
        server_header=False,
        date_header=False,
        lifespan="on",
        timeout_graceful_shutdown=1,
        loop="asyncio",  # uvloop gives the first bytes of a connection to `TlsGate` before it could ask for TLS
        http=secured if is_secure else connection,  # type: ignore[arg-type]  # it is only called
        ws="none",
    )
    shown = f"[{host}]" if ":" in host else socket.gethostname() if host == "0.0.0.0" else host  # noqa: S104
    address = f"{'https' if is_secure else 'http'}://{shown}:{listener.getsockname()[1]}#{key.public}"
    AnnouncedServer(config, announce=lambda: announce(address)).run(sockets=[listener])


def _most_connections() -> int:
    """Connections that there can be: past the files that a process may open none is accepted, of whatever address."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * _MOST_CONNECTIONS + _OWN_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return _MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else max(2, (soft - _OWN_FILES) // 2)


def _require_free_udp(host: str, port: int) -> None:
    """Raises BadRun if a UDP port is taken."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as tried:
        try:
            tried.bind((host, port))
        except OSError as problem:
            raise BadRun(
                f"cannot listen at UDP port {port} of {host}: {problem.strerror}",
                remedy="--p2p takes the port of --port and the next one: give another one.",
            ) from problem


def _certificate(folder: Path, key: Key) -> tuple[Path, Path]:
    """Files of a certificate of the pool's key, made at each start, and of the key in the form TLS wants."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"stoker pool {key.public[:16]}")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=3650))
        .sign(key.private, None)
    )
    private = key.private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    paths = folder / "tls-certificate.pem", folder / "tls.key"
    before = os.umask(0o077)
    try:
        for path, content in zip(paths, (made.public_bytes(serialization.Encoding.PEM), private), strict=True):
            write_atomic(path, content, error=BadRun)
    finally:
        os.umask(before)
    return paths

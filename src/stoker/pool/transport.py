"""The seam between a pool's signed requests and the wire: HTTPS to a control plane, iroh to another key.

What: `Transport.exchange` carries one request and brings the head of its answer; the body is read from there. What is
asked, signed and checked stands in `client.py`, and is the same on every wire. `peer_link.py` is the other transport.
"""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, Protocol
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from stoker.errors import PlaceFailed, PlaceUnreachable

_SENT_BYTES = 256 << 10
"""Read of a file and sent at a time: half the CPU time of http.client's own 8 KiB."""


@dataclass
class PoolAnswer:
    """The answer to a request, as far as its head.

    Attributes:
        status: as in HTTP.
        num_bytes: of the body, as announced; None: not said.
        read: the next part of the body, of so many bytes at most; b"" at its end. Raises PlaceUnreachable if it broke
            off: a body is whole, or that is raised.
        close: gives the connection back; to be called once the answer is read, or not wanted any more.
    """

    status: int
    num_bytes: int | None
    read: Callable[[int], bytes]
    close: Callable[[], None]


class Transport(Protocol):
    """Carries requests to one other party, whose key it has checked. Threads may share it."""

    name: str
    """Where it leads, for people."""

    def exchange(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes | IO[bytes] | None, timeout_s: float
    ) -> PoolAnswer:
        """Send a request; the answer.

        Raises:
            PlaceUnreachable: no answer; whether the request arrived is not known.
            PlaceFailed: another key answers.
        """
        ...


class HttpsTransport:
    """Requests to a pool's control plane: TLS with its key pinned, or plain HTTP on this machine.

    Args:
        url: of the control plane.
        key: its public key (hex).
    """

    def __init__(self, url: str, key: str) -> None:
        self.name = f"the pool {url}"
        self._url, self._key, self._parts = url, key, urlsplit(url)

    def exchange(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes | IO[bytes] | None, timeout_s: float
    ) -> PoolAnswer:
        """See `Transport`."""
        connection = self._connected(timeout_s)
        try:
            connection.request(method, target, body, dict(headers))
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as problem:
            connection.close()
            raise PlaceUnreachable(
                f"{self.name} does not answer: {problem}", remedy="Is it running? Is the address right?"
            ) from problem

        def read(most_bytes: int) -> bytes:
            try:
                part = response.read1(most_bytes)  # what is there: who waits may want to stop
                if not part and response.length:  # `read1` ends without a word where it broke off
                    raise http.client.IncompleteRead(b"", response.length)
            except (OSError, http.client.HTTPException) as problem:
                raise PlaceUnreachable(f"{self.name} broke off: {problem}") from problem
            return part

        return PoolAnswer(response.status, response.length, read, connection.close)

    def _connected(self, timeout_s: float) -> http.client.HTTPConnection:
        host = self._parts.hostname or ""
        if self._parts.scheme == "http":
            return http.client.HTTPConnection(host, self._parts.port, timeout=timeout_s, blocksize=_SENT_BYTES)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the key is compared instead, below
        connection = http.client.HTTPSConnection(
            host, self._parts.port, timeout=timeout_s, context=context, blocksize=_SENT_BYTES
        )
        try:
            connection.connect()
            shown = certificate_key(connection.sock.getpeercert(binary_form=True))
        except (OSError, http.client.HTTPException) as problem:
            connection.close()
            raise PlaceUnreachable(f"{self.name} does not answer: {problem}") from problem
        if shown != self._key:
            connection.close()
            raise PlaceFailed(
                f"{self._url} shows the key {shown[:12] or 'none'}…, and the pool's is {self._key[:12]}…",
                remedy="Another server answers there, or someone is in between. Ask the operator for the address.",
            )
        return connection


def certificate_key(certificate: bytes | None) -> str:
    """The Ed25519 key (hex) in an X.509 certificate (DER); "" if it has another kind, or none was shown."""
    if certificate is None:
        return ""
    try:
        key = x509.load_der_x509_certificate(certificate).public_key()
    except ValueError:
        return ""
    return key.public_bytes_raw().hex() if isinstance(key, Ed25519PublicKey) else ""

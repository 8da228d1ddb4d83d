"""TLS for all doors, from one certificate and its key, which can be replaced while connections go on."""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc

from stoker.errors import BadJob


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

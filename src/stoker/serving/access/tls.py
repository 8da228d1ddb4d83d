"""TLS for both ports, from one certificate and its key."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from stoker.errors import BadJob


@dataclass(frozen=True, kw_only=True)
class Tls:
    """A certificate chain and its private key: files in PEM."""

    certificate: Path
    key: Path

    def context(self) -> ssl.SSLContext:
        """For HTTP: TLS 1.2 and later, as Python's defaults choose ciphers.

        Raises:
            BadJob: a file cannot be read, or the key is not the certificate's.
        """
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.certificate, self.key, password=_no_password)
        except (OSError, ssl.SSLError) as error:
            raise BadJob(
                f"TLS cannot be set up with {self.certificate} and {self.key}: {error}",
                remedy="Give a certificate chain and its unencrypted private key, both in PEM.",
            ) from error
        return context

    def pem(self) -> tuple[bytes, bytes]:
        """For gRPC: the key and the certificate chain.

        Raises:
            BadJob: a file cannot be read.
        """
        try:
            return self.key.read_bytes(), self.certificate.read_bytes()
        except OSError as error:
            raise BadJob(f"TLS cannot be set up: {error}") from error


def read_tls(certificate: Path | None, key: Path | None) -> Tls | None:
    """TLS if both files are given, None if neither is.

    Raises:
        BadJob: only one is given, or they cannot be used.
    """
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise BadJob("--tls-cert and --tls-key belong together", remedy="Give both, or neither.")
    tls = Tls(certificate=certificate, key=key)
    tls.context()
    return tls


def _no_password() -> str:
    """Instead of asking on the terminal; an encrypted key then does not open."""
    return ""

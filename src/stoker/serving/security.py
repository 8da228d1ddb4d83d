"""API keys (a file of names and keys), and protection of the admin port against requests from other sites' web pages.

A web page can make a browser send a POST to `127.0.0.1`, and read the answer through a host name that resolves there
(DNS rebinding). Headers that browsers add and pages cannot omit identify such requests.

Source: Fetch Standard, "`Origin` header"; Fetch Metadata Request Headers (W3C); RFC 9110, section 7.2 (`Host`).
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import logging
import re
from collections.abc import Mapping
from pathlib import Path

from stoker.errors import BadJob
from stoker.serving.refusals import Forbidden, Unauthorized, WrongFormat

_HEX = re.compile(r"(?:(key|sha256):)?([0-9a-fA-F]{64})")
"""64 hexadecimal digits: a key, as `openssl rand -hex 32` prints one, or the SHA-256 of one; a prefix says which."""
_LEAST_LETTERS = 16
_WANTED = "wanted one NAME:KEY or NAME:sha256:DIGEST in a line; 64 hexadecimal digits that are a key: NAME:key:DIGITS"
_log = logging.getLogger(__name__)


class KeyFile:
    """API keys of a file, as last read: one `NAME:KEY` or `NAME:sha256:DIGEST` per line.

    Empty lines and `#` comments are skipped. 64 hexadecimal digits alone are a digest, with a warning, since they could
    be a key; `NAME:key:DIGITS` is a key. A name may have several keys, so that a key can be replaced while the old one
    is still valid. Keys are kept as SHA-256 digests with the caller's name.

    Raises:
        BadJob: see `read`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.read()

    def read(self) -> None:
        """Read the file again; if it cannot be used, the earlier keys still apply.

        Raises:
            BadJob: the file cannot be read, has no key, a line of another form, or a key that is too short.
        """
        try:
            lines = self._path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise BadJob(f"the file of API keys {self._path} cannot be read: {error}") from error
        digests = tuple(
            _parse(line.strip(), f"{self._path}, line {number}")
            for number, line in enumerate(lines, 1)
            if line.strip() and not line.lstrip().startswith("#")
        )
        if not digests:
            raise BadJob(f"the file of API keys {self._path} has none", remedy=_WANTED)
        self._digests = digests

    def authorize(self, headers: Mapping[str, str]) -> str:
        """The caller's name, from the headers of a request or the metadata of a call; names in lower case.

        Every digest is compared, each in constant time, so that the time does not depend on the keys.

        Raises:
            Unauthorized: there is no key, or it is unknown.
        """
        key = headers.get("x-api-key", "").strip()
        if not key:
            scheme, _, bearer = headers.get("authorization", "").strip().partition(" ")
            key = bearer.strip() if scheme.lower() == "bearer" else ""
        if not key:
            raise Unauthorized("this server wants an API key: send `Authorization: Bearer KEY` or `X-API-Key: KEY`")
        # Headers are decoded as Latin-1, and clients send either that or UTF-8.
        contents = [key.encode("utf-8", "surrogateescape")]
        if not key.isascii():
            with contextlib.suppress(UnicodeEncodeError):
                contents.append(key.encode("latin-1"))
        caller = ""
        for content in contents:
            presented = hashlib.sha256(content).digest()
            for name, expected in self._digests:
                if hmac.compare_digest(presented, expected):
                    caller = name
        if not caller:
            raise Unauthorized("the API key is not known to this server")
        return caller


def _parse(line: str, where: str) -> tuple[str, bytes]:
    """Name and digest of a line. Messages never contain the key."""
    name, colon, key = (part.strip() for part in line.partition(":"))
    if not (name and colon and key):
        raise BadJob(f"{where}: no NAME:KEY", remedy=_WANTED)
    if digits := _HEX.fullmatch(key):
        kind, text = digits.groups()
        if kind == "key":
            return name, hashlib.sha256(text.encode()).digest()
        if kind is None:
            _log.warning(
                "%s: 64 hexadecimal digits are taken for the SHA-256 of the key of %r; write sha256: before them, or "
                "key: if they are the key itself",
                where,
                name,
            )
        return name, bytes.fromhex(text)
    if len(key) < _LEAST_LETTERS:
        raise BadJob(
            f"{where}: the key of {name!r} has {len(key)} letters, at least {_LEAST_LETTERS} are wanted",
            remedy='`python -c "import secrets; print(secrets.token_urlsafe(32))"` makes one.',
        )
    return name, hashlib.sha256(key.encode()).digest()


_FORMATS = frozenset({"application/json", "application/octet-stream", "application/x-www-form-urlencoded"})
"""Accepted content types; the last is `curl -d`'s default."""


def refuse_cross_site(headers: Mapping[bytes, bytes], *, has_keys: bool) -> None:
    """Refuse requests that a web page of another site may have sent.

    Args:
        headers: of the request, names in lower case.
        has_keys: whether callers need a key, which pages do not have; without one, the request's host must be an
            address or `localhost`.

    Raises:
        Forbidden: the origin is another site, or the host has another name.
        WrongFormat: the body has a type that pages may send and clients do not.
    """
    host = headers.get(b"host", b"").decode("latin-1")
    origin = headers.get(b"origin")
    if origin is not None and origin.decode("latin-1").partition("://")[2] != host:
        raise Forbidden("this port takes no requests from web pages of other sites (Origin)")
    if headers.get(b"sec-fetch-site", b"none") not in {b"none", b"same-origin"}:
        raise Forbidden("this port takes no requests from web pages of other sites (Sec-Fetch-Site)")
    if not has_keys and host and not is_own_host(host):
        raise Forbidden("this port is for this machine: ask it as localhost or 127.0.0.1, or give it --admin-keys")
    kind = headers.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
    if kind and kind not in _FORMATS:
        raise WrongFormat("this port takes bodies of the type application/json")


def is_own_host(host: str) -> bool:
    """Whether a `Host` is an address or localhost: other names can be made to resolve here."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.rpartition(":")[0] or host
    if name.lower() == "localhost":
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True

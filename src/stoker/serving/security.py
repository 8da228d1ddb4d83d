"""API keys: a file of names and keys, and the question whose key a request brought.

Whether a request to the admin door comes from a web page of another site, by way of its user's browser.

A page may have a browser send a POST to `127.0.0.1`, and with a name that it lets point there (DNS rebinding) also read
the answers. What browsers add, and pages cannot leave out, tells such requests from those of programs.

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
from dataclasses import dataclass
from pathlib import Path

from stoker.errors import BadJob
from stoker.serving.refusals import Forbidden, Unauthorized, WrongFormat

_HEX = re.compile(r"(?:(key|sha256):)?([0-9a-fA-F]{64})")
"""What 64 hexadecimal digits are, if it is said: a key, as `openssl rand -hex 32` prints one, or the SHA-256 of one."""
_LEAST_LETTERS = 16
_WANTED = "wanted one NAME:KEY or NAME:sha256:DIGEST in a line; 64 hexadecimal digits that are a key: NAME:key:DIGITS"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class KeyRing:
    """The keys that are accepted, as SHA-256 digests with the name of the caller each stands for."""

    digests: tuple[tuple[str, bytes], ...]

    def caller(self, key: str) -> str:
        """The name of the caller whose key this is.

        Every digest is compared, each in constant time, so that the time taken tells nothing of the keys.

        Raises:
            Unauthorized: it is empty, or nobody's.
        """
        if not key:
            raise Unauthorized("this server wants an API key: send `Authorization: Bearer KEY` or `X-API-Key: KEY`")
        found = ""
        for content in _contents(key):
            presented = hashlib.sha256(content).digest()
            for name, wanted in self.digests:
                if hmac.compare_digest(presented, wanted):
                    found = name
        if not found:
            raise Unauthorized("the API key is not known to this server")
        return found

    def authorize(self, headers: Mapping[str, str]) -> str:
        """The caller, from the headers of a request or the metadata of a call; names in lower case.

        Raises:
            Unauthorized: there is no key among them, or it is nobody's.
        """
        return self.caller(_presented(headers))


class KeyFile:
    """The keys in a file, as they were when it was last read.

    Raises:
        BadJob: see `read_keys`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ring = read_keys(path)

    def read(self) -> None:
        """Take the file's keys as they are now; where it cannot be used, those read before still hold.

        Raises:
            BadJob: see `read_keys`.
        """
        self._ring = read_keys(self._path)

    def authorize(self, headers: Mapping[str, str]) -> str:
        """The caller; see `KeyRing.authorize`."""
        return self._ring.authorize(headers)


def _presented(headers: Mapping[str, str]) -> str:
    """The key that the headers carry; empty if none does."""
    if key := headers.get("x-api-key", "").strip():
        return key
    scheme, _, key = headers.get("authorization", "").strip().partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _contents(key: str) -> tuple[bytes, ...]:
    """The bytes that a key may stand for: headers come decoded as Latin-1, and clients send either that or UTF-8."""
    if key.isascii():
        return (key.encode(),)
    both = [key.encode("utf-8", "surrogateescape")]
    with contextlib.suppress(UnicodeEncodeError):
        both.append(key.encode("latin-1"))
    return tuple(both)


def read_keys(path: Path) -> KeyRing:
    """The keys in a file: one `NAME:KEY` or `NAME:sha256:DIGEST` a line; empty lines and `#` comments are passed over.

    64 hexadecimal digits alone are a digest, with a warning, since they look like a key too; `NAME:key:DIGITS` is one.

    A name may have several keys, so that a key can be changed while the old one still holds.

    Raises:
        BadJob: it cannot be read, has no key, a line of another form, or a key that is too short.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadJob(f"the file of API keys {path} cannot be read: {error}") from error
    found = tuple(
        _parse(line.strip(), f"{path}, line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip() and not line.lstrip().startswith("#")
    )
    if not found:
        raise BadJob(f"the file of API keys {path} has none", remedy=_WANTED)
    return KeyRing(found)


def _parse(line: str, where: str) -> tuple[str, bytes]:
    """Name and digest of a line. Its content is never repeated in a message."""
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
                "key: if they are the key itself", where, name,
            )  # fmt: skip
        return name, bytes.fromhex(text)
    if len(key) < _LEAST_LETTERS:
        raise BadJob(
            f"{where}: the key of {name!r} has {len(key)} letters, at least {_LEAST_LETTERS} are wanted",
            remedy='`python -c "import secrets; print(secrets.token_urlsafe(32))"` makes one.',
        )
    return name, hashlib.sha256(key.encode()).digest()


_FORMATS = frozenset({"application/json", "application/octet-stream", "application/x-www-form-urlencoded"})
"""Types of bodies; the last is what `curl -d` says of any."""


def refuse_cross_site(headers: Mapping[bytes, bytes], *, has_keys: bool) -> None:
    """Refuse what a page of another site may have sent.

    Args:
        headers: of the request, names in lower case.
        has_keys: whether callers have to bring a key, which no page has; without, the request must be for this machine
            by its own name: an address, or `localhost`.

    Raises:
        Forbidden: its origin is another site, or it is for a host of another name.
        WrongFormat: its body is of a type that pages may send and clients do not.
    """
    host = headers.get(b"host", b"").decode("latin-1")
    origin = headers.get(b"origin")
    if origin is not None and origin.decode("latin-1").partition("://")[2] != host:
        raise Forbidden("this port takes no requests from web pages of other sites (Origin)")
    if headers.get(b"sec-fetch-site", b"none") not in {b"none", b"same-origin"}:
        raise Forbidden("this port takes no requests from web pages of other sites (Sec-Fetch-Site)")
    if not has_keys and host and not _is_own(host):
        raise Forbidden("this port is for this machine: ask it as localhost or 127.0.0.1, or give it --admin-keys")
    kind = headers.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
    if kind and kind not in _FORMATS:
        raise WrongFormat("this port takes bodies of the type application/json")


def _is_own(host: str) -> bool:
    """Whether a `Host` is an address, or localhost: names are what somebody else may point here."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.rpartition(":")[0] or host
    if name.lower() == "localhost":
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True

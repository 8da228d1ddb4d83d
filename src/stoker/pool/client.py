"""A pool's client: signs events and posts them, follows the log, sends and fetches blobs.

A pool's address has its public key: `https://host:port#KEY`. Over TLS the server shows a certificate of that key, and
no authority has to vouch for it; over plain HTTP, which is for this machine alone, receipts are checked with it.
An event whose answer was lost is posted again with the same nonce, and counts once.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, urlencode, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from stoker.errors import BadJob, PlaceFailed, PlaceUnreachable
from stoker.pool.events import Body, Event, Founded, Refused, canonical, draft_of, read_event
from stoker.pool.keys import Key, is_signed
from stoker.records.codec import JSON, from_json, parsed, to_json
from stoker.serving.security import is_own_host
from stoker.store.files import aside_path
from stoker.units import format_bytes

_RETRY_S = 1.0
_MOST_ANSWER_BYTES = 256 * 2**20


@dataclass(frozen=True)
class PoolAddress:
    """Where a pool's control plane is, and its public key (hex)."""

    url: str
    key: str

    @classmethod
    def parse(cls, text: str | None = None, environ: Mapping[str, str] = os.environ) -> PoolAddress:
        """The address in `text`, or in `$STOKER_POOL`.

        Raises:
            BadJob: there is none, it has another form, or is plain HTTP to another machine.
        """
        given = text or environ.get("STOKER_POOL", "")
        if not given:
            raise BadJob(
                "no pool is named", remedy="--pool https://HOST:PORT#KEY, or STOKER_POOL; its operator has it."
            )
        url, _, key = given.partition("#")
        parts = urlsplit(url)
        is_key = len(key) == 64 and not set(key) - set("0123456789abcdef")
        if parts.scheme not in ("http", "https") or not parts.hostname or not is_key:
            raise BadJob(f"the pool {given[:100]!r}: wanted https://HOST:PORT#KEY, the key with 64 hexadecimal digits")
        if parts.scheme == "http" and not _is_loopback(parts.hostname):
            raise BadJob(f"the pool {url} is on another machine and has no TLS", remedy="Use its https address.")
        return cls(url.rstrip("/"), key)

    def __str__(self) -> str:
        """As `parse` reads it."""
        return f"{self.url}#{self.key}"


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or (host.startswith("127.") and is_own_host(host))


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """The pool's signed word that an event is in its log, as number `seq` with that hash.

    Kept, it shows that a log which lacks the event was cut or rewritten.
    """

    seq: int
    hash: str
    signature: str


def receipt_message(pool: str, seq: int, event_hash: str) -> bytes:
    """What the pool signs in a receipt."""
    return b"stoker pool receipt 1\n" + canonical({"pool": pool, "seq": seq, "hash": event_hash})


def request_message(pool: str, key: str, method: str, target: str, time_s: float) -> bytes:
    """What is signed of a request that is no event; `target`: path with query."""
    return b"stoker pool request 1\n" + canonical(
        {"pool": pool, "key": key, "method": method, "target": target, "time_s": time_s}
    )


class PoolClient:
    """Talks to a pool's control plane. Threads may share it: every call has its own connection.

    Args:
        address: of the pool; text as `PoolAddress.parse` takes it.
        key: who acts; None: reads only.
        timeout_s: for one answer, waiting for news not counted [s].
        most_answer_bytes: of an answer that is JSON.
    """

    def __init__(
        self, address: PoolAddress | str, key: Key | None = None, *, timeout_s: float = 30.0,
        most_answer_bytes: int = _MOST_ANSWER_BYTES,
    ) -> None:  # fmt: skip
        self.address = address if isinstance(address, PoolAddress) else PoolAddress.parse(address)
        self.key = key
        self._timeout_s, self._most_answer_bytes = timeout_s, most_answer_bytes
        self._parts = urlsplit(self.address.url)

    # ---------------------------------------------------------------------------------------------------------- events

    def post(self, body: Body, *, patience_s: float = 0.0, nonce: str | None = None) -> Receipt:
        """Sign an event and post it.

        Args:
            body: what it says.
            patience_s: time to try again while the pool does not answer or is busy [s].
            nonce: of an earlier try: the event counts once, however often it is sent.

        Raises:
            Refused: the pool does not take it; the text says why.
            PlaceUnreachable: the pool does not answer; whether it has the event is not known. Post it again with the
                same nonce.
        """
        key = self._require_key()
        draft = draft_of(body, key, self.address.key, nonce=nonce)
        until = time.monotonic() + patience_s
        while True:
            try:
                answer = self._json("POST", "/v1/events", canonical(to_json(draft)))
                break
            except (PlaceUnreachable, _Busy):
                if time.monotonic() + _RETRY_S > until:
                    raise
                time.sleep(_RETRY_S)
                draft = draft_of(body, key, self.address.key, nonce=draft.nonce)  # its clock may be stale by now
        receipt = Receipt(seq=int(answer["seq"]), hash=str(answer["hash"]), signature=str(answer["signature"]))
        if not is_signed(
            self.address.key, receipt_message(self.address.key, receipt.seq, receipt.hash), receipt.signature
        ):
            raise PlaceFailed(f"{self.address.url} answers without the signature of the pool {self.address.key[:12]}…")
        return receipt

    def events(self, after: int = 0, *, wait_s: float = 0.0) -> list[Event]:
        """Events after number `after`, at most a thousand; waits up to `wait_s` for the first one."""
        answer = self._json("GET", f"/v1/events?{urlencode({'after': after, 'wait_s': wait_s})}", wait_s=wait_s)
        return [read_event(document) for document in answer["events"]]

    def state(self, what: str, **only: str) -> JSON:
        """`offers`, `leases`, `balances`, `records` or `pool`, as the control plane has them now.

        Args:
            what: which.
            only: of leases: `prefix` of the name, `renter`, `agent`, `unsettled` ("1": what is not final).
        """
        query = f"?{urlencode(only)}" if only else ""
        return self._json("GET", f"/v1/state/{quote(what)}{query}")

    def lease(self, lease_id: str) -> dict[str, Any]:
        """One lease; see `lease.Lease` for its fields, and `escrow` and `bond_held` for what is held."""
        answer: dict[str, Any] = self._json("GET", f"/v1/leases/{quote(lease_id)}")
        return answer

    def rules(self) -> Founded:
        """The pool's rules."""
        return from_json(self.state("pool")["rules"], Founded)

    def work(self, *, wait_s: float = 0.0, replays: bool = True) -> dict[str, Any]:
        """What waits for this client's key: `leases` to accept, `challenges` to replay, `ended` leases to stop.

        Asking is also how an agent shows that it is there, and whether it replays blocks of others.
        """
        key = self._require_key()
        query = urlencode({"agent": key.public, "wait_s": wait_s, "replays": int(replays)})
        target = f"/v1/work?{query}"
        answer: dict[str, Any] = self._json("GET", target, wait_s=wait_s)
        return answer

    # ----------------------------------------------------------------------------------------------------------- blobs

    def has_blob(self, digest: str) -> bool:
        """Whether the pool holds a blob."""
        try:
            self._request("HEAD", f"/v1/blobs/{digest}").close()
        except _Missing:
            return False
        return True

    def put_blob(self, source: bytes | Path) -> str:
        """Send bytes or a file, unless the pool has them; their SHA-256.

        Raises:
            Refused: it is too large, or this key may not send blobs.
        """
        if isinstance(source, bytes):
            digest, size = hashlib.sha256(source).hexdigest(), len(source)
        else:
            with source.open("rb") as file:
                digest, size = hashlib.file_digest(file, "sha256").hexdigest(), source.stat().st_size
        if self.has_blob(digest):
            return digest
        if isinstance(source, bytes):
            self._request("PUT", f"/v1/blobs/{digest}", source, size=size).close()
        else:
            with source.open("rb") as file:
                self._request("PUT", f"/v1/blobs/{digest}", file, size=size).close()
        return digest

    def get_blob(self, digest: str, target: Path, *, most_bytes: int | None = None) -> None:
        """Fetch a blob into a file, which is there whole or not at all.

        Args:
            digest: its SHA-256.
            target: the file.
            most_bytes: that are taken; None: any number.

        Raises:
            Refused: the pool does not have it, or this key may not read it.
            PlaceFailed: what came has another hash, or is larger.
        """
        connection = self._request("GET", f"/v1/blobs/{digest}")
        aside = aside_path(target)
        try:
            hashed, num_bytes = hashlib.sha256(), 0
            with aside.open("xb") as file:
                while part := connection.response.read(1 << 20):
                    num_bytes += len(part)
                    if most_bytes is not None and max(num_bytes, connection.response.length or 0) > most_bytes:
                        raise PlaceFailed(f"the blob {digest[:12]}… is larger than {format_bytes(most_bytes)}")
                    hashed.update(part)
                    file.write(part)
                _require_whole(connection.response)
                file.flush()
                os.fsync(file.fileno())
            if hashed.hexdigest() != digest:
                raise PlaceFailed(f"the blob {digest[:12]}… came with the hash {hashed.hexdigest()[:12]}…")
            aside.replace(target)
        except (OSError, http.client.HTTPException) as problem:
            raise PlaceUnreachable(f"the blob {digest[:12]}… broke off: {problem}") from problem
        finally:
            aside.unlink(missing_ok=True)
            connection.close()

    # ------------------------------------------------------------------------------------------------------- transport

    def _require_key(self) -> Key:
        if self.key is None:
            raise BadJob("this needs a key", remedy="stoker pool wallet makes one.")
        return self.key

    def _json(self, method: str, target: str, body: bytes | None = None, *, wait_s: float = 0.0) -> Any:
        connection = self._request(method, target, body, size=None if body is None else len(body), wait_s=wait_s)
        try:
            content = connection.response.read(self._most_answer_bytes + 1)
            if len(content) > self._most_answer_bytes:
                raise PlaceFailed(f"{self.address.url} answers with more than {format_bytes(self._most_answer_bytes)}")
            _require_whole(connection.response)
            return parsed(content)
        except (OSError, http.client.HTTPException) as problem:
            raise PlaceUnreachable(f"{self.address.url} broke off: {problem}") from problem
        except ValueError as problem:
            raise PlaceFailed(f"{self.address.url} answers what is no JSON: {problem}") from problem
        finally:
            connection.close()

    def _request(
        self, method: str, target: str, body: bytes | IO[bytes] | None = None, *, size: int | None = None,
        wait_s: float = 0.0,
    ) -> _Answer:  # fmt: skip
        headers = {"Accept": "application/json"}
        if body is not None:
            headers |= {"Content-Length": str(size), "Content-Type": "application/octet-stream"}
            if method == "POST":
                headers["Content-Type"] = "application/json"
        if self.key is not None and method != "POST":
            time_s = round(time.time(), 3)
            message = request_message(self.address.key, self.key.public, method, target, time_s)
            headers |= {
                "X-Stoker-Key": self.key.public, "X-Stoker-Time": repr(time_s),
                "X-Stoker-Signature": self.key.sign(message),
            }  # fmt: skip
        connection = self._connected(self._timeout_s + wait_s)
        try:
            connection.request(method, target, body, headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as problem:
            connection.close()
            raise PlaceUnreachable(
                f"the pool {self.address.url} does not answer: {problem}", remedy="Is it running? Is the address right?"
            ) from problem
        answer = _Answer(response, connection.close)
        if response.status >= 400:
            with_text = _failure_of(response)
            answer.close()
            raise with_text
        return answer

    def _connected(self, timeout_s: float) -> http.client.HTTPConnection:
        host = self._parts.hostname or ""
        if self._parts.scheme == "http":
            return http.client.HTTPConnection(host, self._parts.port, timeout=timeout_s)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the key is compared instead, below
        connection = http.client.HTTPSConnection(host, self._parts.port, timeout=timeout_s, context=context)
        try:
            connection.connect()
            shown = certificate_key(connection.sock.getpeercert(binary_form=True))
        except (OSError, http.client.HTTPException) as problem:
            connection.close()
            raise PlaceUnreachable(f"the pool {self.address.url} does not answer: {problem}") from problem
        if shown != self.address.key:
            connection.close()
            raise PlaceFailed(
                f"{self.address.url} shows the key {shown[:12] or 'none'}…, and the pool's is {self.address.key[:12]}…",
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


def _require_whole(response: http.client.HTTPResponse) -> None:
    """Raises IncompleteRead if an answer broke off: `read` of so many bytes ends without a word then."""
    if response.length:
        raise http.client.IncompleteRead(b"", response.length)


@dataclass
class _Answer:
    response: http.client.HTTPResponse
    close: Callable[[], None]


class _Missing(Refused):
    """The pool has no such thing."""

    http_status = 404


class _Busy(Refused):
    """The pool has too much to do just now: try again."""

    http_status = 503


def is_passing(problem: BaseException) -> bool:
    """Whether the same call may succeed later: the pool does not answer, is busy, or is starting."""
    return isinstance(problem, PlaceUnreachable | _Busy)


def _failure_of(response: http.client.HTTPResponse) -> Refused:
    """The error in an answer, as the pool words it."""
    try:
        document = parsed(response.read(1 << 16) or b"{}")
        text, remedy = str(document.get("error") or ""), document.get("remedy") or None
    except (OSError, ValueError, AttributeError, http.client.HTTPException):
        text, remedy = "", None
    kind = _Missing if response.status == 404 else _Busy if response.status in (429, 500, 502, 503, 504) else Refused
    return kind(text or f"the pool answers with status {response.status}", remedy=remedy)

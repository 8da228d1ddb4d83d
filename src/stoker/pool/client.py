"""A pool's client: signs events and posts them, follows the log, sends and fetches blobs.

A pool's address has its public key: `https://host:port#KEY`. Over TLS the server shows a certificate of that key, and
no authority has to vouch for it; over plain HTTP, which is for this machine alone, receipts are checked with it.
An event whose answer was lost is posted again with the same nonce, and counts once.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import quote, urlencode, urlsplit

from stoker.errors import BadJob, PlaceFailed, PlaceUnreachable, StokerError
from stoker.pool.answers import read_lease, read_leases, read_question, read_state, read_work
from stoker.pool.events import Body, Event, Founded, NotNow, Refused, canonical, draft_of, read_event
from stoker.pool.keys import Key, is_digest, is_signed
from stoker.pool.shown_lease import ShownLease
from stoker.pool.transport import HttpsTransport, PoolAnswer, Transport
from stoker.records.codec import JSON, from_json, parsed, to_json
from stoker.serving.security import is_own_host
from stoker.store.disk_errors import disk_errors
from stoker.store.files import aside_path
from stoker.units import format_bytes

if TYPE_CHECKING:
    from stoker.pool.peer import Peer

_RETRY_S = 1.0
_MOST_ANSWER_BYTES = 256 * 2**20
_PART_BYTES = 1 << 20
_MOST_BREAKS = 20
_PARTIAL = 206
FORWARDED_S = 600.0
"""How long is waited for a blob that its holder sends to the pool [s]."""
_AWAY_S = 180.0
"""How long is waited for a line that went away in the middle of a blob [s]."""
_SLOW_S, _LEAST_BYTES_PER_S = 60.0, 8192.0
"""A direct transfer that took so long [s], and is slower than that [bytes/s], goes on through the pool."""


class DiskFailed(PlaceFailed):
    """A blob cannot be written to the disk of this machine, which says nothing about the blob."""


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
        try:
            parts = urlsplit(url)
            scheme, host, _ = parts.scheme, parts.hostname, parts.port
        except ValueError:  # a port, or an IPv6 address, that is none
            scheme, host = "", None
        if scheme not in ("http", "https") or not host or not is_digest(key):
            raise BadJob(f"the pool {given[:100]!r}: wanted https://HOST:PORT#KEY, the key with 64 hexadecimal digits")
        if scheme == "http" and not _is_loopback(host):
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

    Attributes:
        peer: exchanges large blobs with other keys directly, where it can; None: all of them go through the pool.
    """

    def __init__(
        self,
        address: PoolAddress | str,
        key: Key | None = None,
        *,
        timeout_s: float = 30.0,
        most_answer_bytes: int = _MOST_ANSWER_BYTES,
    ) -> None:
        self.address = address if isinstance(address, PoolAddress) else PoolAddress.parse(address)
        self.key = key
        self.peer: Peer | None = None
        self._sent_bytes = 0
        self._timeout_s, self._most_answer_bytes = timeout_s, most_answer_bytes
        self._pool: Transport = HttpsTransport(self.address.url, self.address.key)

    # ---------------------------------------------------------------------------------------------------------- events

    def post(
        self, body: Body, *, patience_s: float = 0.0, nonce: str | None = None, answer_s: float | None = None
    ) -> Receipt:
        """Sign an event and post it.

        Args:
            body: what it says.
            patience_s: time to try again while the pool does not answer or is busy [s].
            nonce: of an earlier try: the event counts once, however often it is sent.
            answer_s: time for an answer [s]; None: the client's.

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
                answer = self._json("POST", "/v1/events", canonical(to_json(draft)), answer_s=answer_s)
                break
            except (PlaceUnreachable, _Busy):
                if time.monotonic() + _RETRY_S > until:
                    raise
                time.sleep(_RETRY_S)
                draft = draft_of(body, key, self.address.key, nonce=draft.nonce)  # its clock may be stale by now
        try:
            receipt = Receipt(seq=int(answer["seq"]), hash=str(answer["hash"]), signature=str(answer["signature"]))
        except (TypeError, ValueError, LookupError, OverflowError) as problem:
            raise PlaceFailed(f"{self.address.url} answers what is no receipt: {problem!r}") from problem
        if not is_signed(
            self.address.key, receipt_message(self.address.key, receipt.seq, receipt.hash), receipt.signature
        ):
            raise PlaceFailed(f"{self.address.url} answers without the signature of the pool {self.address.key[:12]}…")
        return receipt

    def events(self, after: int = 0, *, wait_s: float = 0.0) -> list[Event]:
        """Events after number `after`, at most a thousand; waits up to `wait_s` for the first one."""
        answer = self._json("GET", f"/v1/events?{urlencode({'after': after, 'wait_s': wait_s})}", wait_s=wait_s)
        try:
            return [read_event(document) for document in answer["events"]]
        except (TypeError, ValueError, LookupError) as problem:
            raise PlaceFailed(f"{self.address.url} answers what is no log: {problem}") from problem

    def state(self, what: str, **only: str) -> JSON:
        """`offers`, `links`, `balances`, `records`, `stopped` or `pool`, as the control plane has them now.

        Args:
            what: which.
            only: of runs that are stopped: `renter`.

        Raises:
            PlaceFailed: it answers something else.
        """
        answer = self._state(what, only)
        with self._reading():
            return read_state(what, answer)

    def _state(self, what: str, only: Mapping[str, str]) -> JSON:
        return self._json("GET", f"/v1/state/{quote(what)}{f'?{urlencode(only)}' if only else ''}")

    def leases(self, **only: str) -> list[ShownLease]:
        """Leases as the control plane has them now, without their blocks and replays.

        Args:
            only: those: `prefix` of the name, `renter`, `agent`, `unsettled` ("1": what is not final).

        Raises:
            PlaceFailed: it answers something else.
        """
        answer = self._state("leases", only)
        with self._reading():
            return read_leases(answer)

    def lease(self, lease_id: str) -> ShownLease:
        """One lease, whole."""
        answer = self._json("GET", f"/v1/leases/{quote(lease_id)}")
        with self._reading():
            return read_lease(answer, lease_id)

    def rules(self) -> Founded:
        """The pool's rules."""
        pool = self.state("pool")
        with self._reading():
            return from_json(pool["rules"], Founded)

    def work(
        self, *, wait_s: float = 0.0, replays: bool = True, probes: bool = False, answer_s: float | None = None
    ) -> dict[str, Any]:
        """What waits for this client's key: `leases` to accept, `challenges` to replay, `ended` leases to stop.

        Asking is also how an agent shows that it is there, and whether it replays blocks of others, and answers probes.
        `answer_s`: as in `post`, waiting for work not counted.
        """
        key = self._require_key()
        asked = {"agent": key.public, "wait_s": wait_s, "replays": int(replays), "probes": int(probes)}
        query = urlencode(asked)
        target = f"/v1/work?{query}"
        answer = self._json("GET", target, wait_s=wait_s, answer_s=answer_s)
        with self._reading():
            return read_work(answer)

    def probe(self, probe_id: str, offer_id: str, device: int, step: int, answer: dict[str, Any]) -> dict[str, Any]:
        """Send the answer to question number `step` of a probe; `step` and `question` of the next one, or `over`."""
        content = json.dumps(answer).encode()
        place = {"offer": offer_id, "device": device, "step": step, "sha256": hashlib.sha256(content).hexdigest()}
        said = self._json("PUT", f"/v1/probes/{quote(probe_id)}?{urlencode(place)}", content, wait_s=60.0)
        with self._reading():
            return read_question(said)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Name the pool where its answer is none of a pool."""
        try:
            yield
        except (ValueError, TypeError) as problem:
            raise PlaceFailed(
                f"{self.address.url} answers what no pool of this version does: {problem}",
                remedy="Is the address a pool's, and this Stoker as new as the pool's?",
            ) from problem

    # ----------------------------------------------------------------------------------------------------------- blobs

    def has_blob(self, digest: str) -> bool:
        """Whether the pool holds a blob."""
        try:
            self._request("HEAD", f"/v1/blobs/{digest}").close()
        except Missing:
            return False
        except Refused:
            self._request("GET", f"/v1/blobs/{digest}").close()  # for the reason: an answer to HEAD has no text
        return True

    def put_blob(self, source: bytes | Path, *, through_pool: bool = False, message_of: str = "") -> str:
        """Send bytes or a file, unless the pool has them; their SHA-256.

        With a `peer` a large file goes to the other side of the lease, or is kept for it; to the pool where there is
        no direct path, or with `through_pool`. `message_of`: the lease of a site whose message it is, which this key
        has got from there directly.

        Raises:
            Refused: it is too large, or this key may not send blobs.
        """
        if isinstance(source, bytes):
            digest, size = hashlib.sha256(source).hexdigest(), len(source)
        else:
            with source.open("rb") as file:
                digest, size = hashlib.file_digest(file, "sha256").hexdigest(), source.stat().st_size
            if self.peer is not None and not through_pool and self.peer.sent(digest, source, size):
                return digest
        if self.has_blob(digest):
            return digest
        self._sent_bytes += size
        target = f"/v1/blobs/{digest}" + (f"?{urlencode({'message_of': message_of})}" if message_of else "")
        if isinstance(source, bytes):
            self._request("PUT", target, source, size=size).close()
        else:
            with source.open("rb") as file:
                self._request("PUT", target, file, size=size).close()
        return digest

    @property
    def sent_bytes(self) -> int:
        """Bytes of blobs that were sent, to the pool and to peers, those of attempts that failed included [bytes]."""
        return self._sent_bytes + (0 if self.peer is None else self.peer.sent_bytes)

    def get_blob(
        self,
        digest: str,
        target: Path,
        *,
        most_bytes: int | None = None,
        patience_s: float = FORWARDED_S,
        is_over: threading.Event | None = None,
    ) -> None:
        """Fetch a blob into a file, which is there whole or not at all.

        An interrupted transfer goes on where it was, from any peer that has the blob.

        Args:
            digest: its SHA-256.
            target: the file.
            most_bytes: that are taken; None: any number.
            patience_s: how long is waited for a blob that its holder sends to the pool [s]; where a part of it
                has come, three minutes at least.
            is_over: once it is set, the blob is not wanted any more.

        Raises:
            Refused: the pool does not have it, or this key may not read it.
            PlaceUnreachable: the pool does not answer, or `is_over` was set.
            PlaceFailed: what came has another hash, or is larger.
            DiskFailed: the disk is full, or the file cannot be written.
        """
        aside = aside_path(target)
        is_over = is_over or threading.Event()
        breaks, is_direct = 0, True
        came_directly, is_left = False, False
        came_s = time.monotonic()
        try:
            with disk_errors(target, "a blob", error=DiskFailed), aside.open("x+b") as file:
                while True:
                    is_asked = self.peer is not None and is_direct and not is_left
                    direct = self.peer.route_to(digest) if self.peer is not None and is_asked else None
                    came_directly, had_bytes = came_directly or direct is not None, file.tell()
                    try:
                        self._receive(direct or self._pool, digest, file, most_bytes, is_over)
                        if (found := _sha256_of(file)) == digest:
                            break
                        if not came_directly:
                            raise WrongBlob(f"the blob {digest[:12]}… came with the hash {found[:12]}…")
                        came_directly, is_left = False, True  # from the pool alone, from its beginning
                        file.seek(0)
                        file.truncate()
                    except OnItsWay:
                        waits_s = max(patience_s, _AWAY_S) if file.tell() else patience_s
                        if time.monotonic() - came_s >= waits_s or is_over.wait(_RETRY_S):
                            raise
                        is_direct = True  # its holder may be in reach by now
                    except (PlaceUnreachable, Refused) as problem:
                        if is_over.is_set():
                            raise
                        is_left = is_left or isinstance(problem, _TooSlow)
                        has_come = file.tell() > had_bytes
                        breaks, came_s = breaks + has_come, time.monotonic() if has_come else came_s
                        is_away = is_passing(problem) and self.peer is not None and time.monotonic() - came_s < _AWAY_S
                        if direct is None and (breaks > _MOST_BREAKS or not (has_come or (is_away and file.tell()))):
                            if file.tell() and isinstance(problem, PlaceUnreachable):
                                raise PlaceUnreachable(
                                    f"the blob {digest[:12]}… broke off after {format_bytes(file.tell())}: "
                                    f"{problem.message}"
                                ) from problem
                            raise
                        if direct is None and not has_come:
                            is_over.wait(_RETRY_S)
                        is_direct = has_come or direct is None
                file.flush()
                os.fsync(file.fileno())
                aside.replace(target)
        finally:
            with suppress(OSError):  # such as where it could not be made
                aside.unlink()

    def _receive(
        self, transport: Transport, digest: str, file: IO[bytes], most_bytes: int | None, is_over: threading.Event
    ) -> None:
        """Write the rest of a blob to a file, which has its beginning."""
        had_bytes, began_s = file.tell(), time.monotonic()
        try:
            answer = self._request("GET", f"/v1/blobs/{digest}", transport=transport, start_bytes=had_bytes)
        except _PastEnd:  # it broke off after its end, or other bytes came, and more of them: its hash says which
            return
        try:
            if had_bytes and answer.status != _PARTIAL:
                file.seek(0)
                file.truncate()
            while part := answer.read(_PART_BYTES):
                if most_bytes is not None and max(file.tell() + len(part), answer.num_bytes or 0) > most_bytes:
                    raise PlaceFailed(f"the blob {digest[:12]}… is larger than {format_bytes(most_bytes)}")
                file.write(part)
                if is_over.is_set():
                    raise PlaceUnreachable(f"the blob {digest[:12]}… is not wanted any more")
                took_s = time.monotonic() - began_s
                if transport is not self._pool and took_s > max(_SLOW_S, file.tell() / _LEAST_BYTES_PER_S):
                    raise _TooSlow(f"{transport.name} gave {format_bytes(file.tell())} in {took_s:.0f} s")
        finally:
            answer.close()

    # -------------------------------------------------------------------------------------------------------- requests

    def _require_key(self) -> Key:
        if self.key is None:
            raise BadJob("this needs a key", remedy="stoker pool wallet makes one.")
        return self.key

    def _json(
        self,
        method: str,
        target: str,
        body: bytes | None = None,
        *,
        wait_s: float = 0.0,
        answer_s: float | None = None,
    ) -> Any:
        size = None if body is None else len(body)
        answer = self._request(method, target, body, size=size, wait_s=wait_s, answer_s=answer_s)
        try:
            content = _content(answer, self._most_answer_bytes + 1)
            if len(content) > self._most_answer_bytes:
                raise PlaceFailed(f"{self.address.url} answers with more than {format_bytes(self._most_answer_bytes)}")
            return parsed(content)
        except ValueError as problem:
            raise PlaceFailed(f"{self.address.url} answers what is no JSON: {problem}") from problem
        finally:
            answer.close()

    def _request(
        self,
        method: str,
        target: str,
        body: bytes | IO[bytes] | None = None,
        *,
        size: int | None = None,
        wait_s: float = 0.0,
        answer_s: float | None = None,
        transport: Transport | None = None,
        start_bytes: int = 0,
    ) -> PoolAnswer:
        headers = {"Accept": "application/json"}
        if start_bytes:
            headers["Range"] = f"bytes={start_bytes}-"
        if body is not None:
            headers |= {"Content-Length": str(size), "Content-Type": "application/octet-stream"}
            if method == "POST":
                headers["Content-Type"] = "application/json"
        if self.key is not None and method != "POST" and transport in (None, self._pool):  # peers know the key
            time_s = round(time.time(), 3)
            message = request_message(self.address.key, self.key.public, method, target, time_s)
            headers |= {
                "X-Stoker-Key": self.key.public,
                "X-Stoker-Time": repr(time_s),
                "X-Stoker-Signature": self.key.sign(message),
            }
        timeout_s = wait_s + (self._timeout_s if answer_s is None else answer_s)
        answer = (transport or self._pool).exchange(method, target, headers, body, timeout_s)
        if answer.status >= 400:
            with_text = _failure_of(answer)
            answer.close()
            raise with_text
        return answer


def _content(answer: PoolAnswer, most_bytes: int) -> bytes:
    """The body of an answer, of so many bytes at most; what is longer is cut."""
    content = bytearray()
    while len(content) < most_bytes and (part := answer.read(min(_PART_BYTES, most_bytes - len(content)))):
        content += part
    return bytes(content)


def _sha256_of(file: IO[bytes]) -> str:
    """SHA-256 of a file that is open for reading and writing, and stays at its end."""
    file.seek(0)
    return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]  # it is a file on the disk


class WrongBlob(PlaceFailed):
    """Other bytes came than those that were asked for, from the pool as well."""


class _TooSlow(PlaceUnreachable):
    """A peer gives a blob so slowly that it may never come."""


class _PastEnd(Refused):
    """A blob has no more bytes than those that are there."""


class Missing(Refused):
    """The pool has no such thing."""

    http_status = 404


class _Busy(Refused):
    """The pool has too much to do just now: try again."""

    http_status = 503


class OnItsWay(_Busy):
    """The blob is not here yet: the pool waits for it from a peer that holds it."""

    http_status = 425


def is_passing(problem: BaseException) -> bool:
    """Whether the same call may succeed later: the pool does not answer, is busy, or is starting."""
    return isinstance(problem, PlaceUnreachable | _Busy)


def _failure_of(answer: PoolAnswer) -> Refused:
    """The error in an answer, as the pool words it."""
    try:
        document = parsed(_content(answer, 1 << 16) or b"{}")
        text, remedy = str(document.get("error") or ""), document.get("remedy") or None
    except (StokerError, ValueError, AttributeError):
        text, remedy = "", None
    kind = _KINDS.get(answer.status, Refused)
    return kind(text or f"the pool answers with status {answer.status}", remedy=remedy)


_KINDS: dict[int, type[Refused]] = {
    416: _PastEnd,
    **{kind.http_status: kind for kind in (Missing, NotNow, OnItsWay)},
    **dict.fromkeys((429, 500, 502, 503, 504), _Busy),
}

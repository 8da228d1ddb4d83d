"""A key's direct exchange of large blobs with the other side of its leases, in a thread of its own.

What: a connection to the pool's rendezvous is kept open, and made again where it broke. A renter's peer keeps blobs
(its code and data, checkpoints that agents send it) and serves them to whom the pool announces; an agent's peer sends
checkpoints and results to its renter, and fetches what it needs from there. Everything that comes is held against its
SHA-256, its announced size and a quota. Where no direct path exists, `PoolClient` goes through the pool as without it.
Use when: the pool has a rendezvous (`stoker pool serve --p2p`), and `stoker[p2p]` is installed.
Costs: a renter's disk, for what it keeps: a week after it was used last, at most.

```
FOLDER/SHA256            a blob that is kept
       senders/SHA256    keys that have sent it, a line each
```
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import logging
import os
import random
import re
import shutil
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, TypeVar
from urllib.parse import urlsplit

from stoker.errors import BadRun, PlaceFailed, PlaceUnreachable, StokerError, first_line
from stoker.pool.client import PoolClient
from stoker.pool.escrow import short
from stoker.pool.events import Refused, canonical
from stoker.pool.keys import is_digest
from stoker.pool.pair_links import ASKED_S, MOST_BYTES, StatedLink, measured_path
from stoker.pool.peer_link import DIAL_S, PART_BYTES, STALLED_S, Body, Head, Incoming, NotAdmitted, PeerEndpoint
from stoker.pool.transport import PoolAnswer, Transport
from stoker.store.disk_errors import disk_errors
from stoker.store.files import append_line, is_aside, make_directories, sync_file, written_aside
from stoker.units import GIB, format_bytes

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

KEPT_S = 8 * 24 * 3600.0
"""A blob is kept so long after it was used last: longer than a result can be disputed [s]."""
_LEFT_S = 24 * 3600.0
"""After so long what is not whole was left by a process that was killed [s]."""
MOST_KEPT_BYTES = 64 * GIB
"""What a renter keeps for its leases at most [bytes]."""
_LEAST_FREE_BYTES = GIB
_EXPECTED_S = 600.0
"""How long an announced peer is expected [s]."""
_NO_PATH_S = 60.0
"""How long is waited before a direct path is tried again that was not there [s]."""
_MOST_ANNOUNCED, _MOST_SENDERS = 200, 16
"""Blobs of one message, and of one blob who sent it, the last ones."""
_AGAIN_S, _MOST_AGAIN_S, _REFUSED_S = 0.5, 10.0, 120.0
"""Pauses before the rendezvous is asked again: the first, the longest, and about that of one that it refused [s]."""
_ASK_S = 10.0
_TAKEN_S = 600.0
"""How long a renter has to put a blob on its disk, once it has come [s]."""
_TARGET = re.compile(r"/v1/blobs/([0-9a-f]{64})")
_RANGE = re.compile(r"bytes=(\d{1,15})-")
_FIRST_BYTES = re.compile(r"bytes=0-(\d{1,15})")


class Peer:
    """See the module.

    Args:
        client: of the pool, with the key; its `peer` is set.
        folder: of what is kept.
        keeps: whether blobs are kept and taken, as a renter does.
        most_kept_bytes: that they may have together.
        tell: receives a line of text about paths.

    Attributes:
        sent_bytes: of blobs, to other peers [bytes].
    """

    def __init__(
        self,
        client: PoolClient,
        folder: Path,
        *,
        keeps: bool = False,
        most_kept_bytes: int = MOST_KEPT_BYTES,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        assert client.key is not None
        self.network, self.bulk_bytes, self.sent_bytes = "", 0, 0
        self._client, self._folder, self._keeps, self._most_kept_bytes = client, folder, keeps, most_kept_bytes
        self._key, self._tell = client.key, tell
        self._expected: dict[tuple[str, str], tuple[str, int, float]] = {}
        self._no_path: dict[str, float] = {}
        self._forwarding: set[str] = set()
        self._unfetched: set[str] = set()
        self._on_its_way = 0
        self._loop = asyncio.new_event_loop()
        self._is_ready = threading.Event()
        self._endpoint = PeerEndpoint(self._key, self._serve, self._admits)
        self._attending: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        with disk_errors(folder, "blobs of the pool", error=BadRun):
            make_directories(folder / "senders")
            self._remove_old()
        self._thread = threading.Thread(target=self._run, name="stoker-peer", daemon=True)
        self._thread.start()
        client.peer = self

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until the pool knows where this peer is; whether it does."""
        return self._is_ready.wait(timeout_s)

    def leave(self) -> None:
        """Send to the pool what has not been fetched from here yet, and end."""
        for digest in sorted(self._unfetched):
            size = f"the blob {digest[:12]}…"
            try:
                size = format_bytes((self._folder / digest).stat().st_size)
                self._tell(f"sending {size} to the pool, which no agent has fetched yet")
                self._client.put_blob(self._folder / digest, through_pool=True)
            except (StokerError, OSError) as problem:
                self._tell(
                    f"{size}, which no agent has fetched yet, is not in the pool until `stoker attach`: {problem}"
                )
        self.close()

    def close(self) -> None:
        """End all connections; what is kept stays on the disk."""
        self._client.peer = None
        if self._attending is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._attending.cancel)
            self._thread.join(10)

    def _run(self) -> None:
        self._attending = self._loop.create_task(self._attend())
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._attending)
        self._loop.run_until_complete(self._end())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    async def _end(self) -> None:
        """End connections, and all that is under way: who waits for it gets an error, as in `_in_loop`."""
        await self._endpoint.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Let something go on whose failure is of no interest."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    # ------------------------------------------------------------------------------------------- what a client asks for

    def sent(self, digest: str, source: Path, size: int) -> bool:
        """Whether a large file needs not go to the pool: its renter keeps it, here or at the end of a direct path."""
        if not self._is_ready.is_set() or size < self.bulk_bytes:
            return False
        try:
            if self._keeps:
                return self._keep_copy(digest, source, size)
            for transport in self._paths({"op": "reach", "digest": digest, "num_bytes": size}):
                with source.open("rb") as file:
                    answer = transport.exchange(
                        "PUT", f"/v1/blobs/{digest}", {"Content-Length": str(size)}, file, _TAKEN_S
                    )
                answer.close()
                if answer.status < 300:
                    return True
        except StokerError as problem:
            self._tell(f"the blob {digest[:12]}… goes through the pool: {first_line(problem)}")
        return False

    def hold(self, digest: str, source: Path) -> Path | None:
        """Keep a large file of an agent for the other sites of its gang; None: it has to go through the pool."""
        size = source.stat().st_size
        if not self._is_ready.is_set() or size < self.bulk_bytes:
            return None
        try:
            with disk_errors(self._folder, "blobs of the pool", error=BadRun):
                self._remove_old()  # such as messages of a lease that ended before the pool had them
            self._keep_copy(digest, source, size)
        except StokerError as problem:
            self._tell(f"the message {digest[:12]}… goes through the pool: {first_line(problem)}")
            return None
        return self._folder / digest

    def release(self, digest: str) -> None:
        """A file of an agent is in the pool, and fetched from there."""
        self._unfetched.discard(digest)
        with suppress(StokerError):
            self._in_loop(self._ask({"op": "held", "blobs": {}, "gone": [digest]}), _ASK_S)
        for path in (self._folder / digest, self._folder / "senders" / digest):
            path.unlink(missing_ok=True)

    def measured_link(self, other: str, name: str) -> StatedLink:
        """Measure the direct path to another agent, as the pool has asked for by this name."""
        with suppress(StokerError):
            for transport in self._paths({"op": "link", "digest": name}):
                return measured_path(_LinkPath(transport, name), time.monotonic)
        self._tell(f"no direct path to {short(other)}")
        return StatedLink(upload_bytes_per_s=0.0, download_bytes_per_s=0.0, delay_s=0.0, at_s=0.0)

    def note_unfetched(self, *digests: str) -> None:
        """Blobs that the next agent will fetch, even if others have fetched them, as far as they are kept here."""
        self._unfetched |= {digest for digest in digests if digest and (self._folder / digest).is_file()}

    def route_to(self, digest: str) -> Transport | None:
        """A direct way to a blob: this disk, or the peer that holds it by the pool; None: there is none."""
        path = self._folder / digest
        if path.is_file():
            path.touch()
            return _Disk(path)
        if not self._is_ready.is_set():
            return None
        try:
            return next(iter(self._paths({"op": "find", "digest": digest})), None)
        except StokerError as problem:
            _log.debug("no direct way: %s", problem.message)
            return None

    def _paths(self, question: Head) -> list[_PeerTransport]:
        """Transports to the peers that the pool names in its answer to a question, as far as there are direct paths."""
        return self._in_loop(self._found(question), _ASK_S + DIAL_S)

    async def _found(self, question: Head) -> list[_PeerTransport]:
        paths = []
        answer = await self._ask(question)
        try:
            peers = [(str(one["key"]), [str(place) for place in one["addresses"]]) for one in answer.get("peers", ())]
        except (TypeError, LookupError, AttributeError) as problem:
            raise PlaceFailed(f"the rendezvous answers what are no peers: {problem!r}") from problem
        for key, addresses in peers:
            if time.monotonic() < self._no_path.get(key, 0.0):
                continue
            was_known = self._endpoint.connection(key) is not None
            try:
                await self._endpoint.meet(key, addresses)
            except PlaceUnreachable as problem:
                self._no_path[key] = time.monotonic() + _NO_PATH_S
                self._tell(f"{problem.message}: what is large goes through the pool")
                continue
            if not was_known:
                self._tell(f"direct path to {short(key)} at {self._endpoint.address_of(key)}")
            paths.append(_PeerTransport(self, key))
        return paths

    # --------------------------------------------------------------------------------------------------- the rendezvous

    async def _attend(self) -> None:
        """Keep the connection to the rendezvous; made again when it broke."""
        await self._endpoint.bind()
        again_s, said = _AGAIN_S, ""
        while True:
            pause_s = None
            try:
                await self._join()
                again_s = _AGAIN_S
                await self._endpoint.gone(self._client.address.key)
            except NotAdmitted as problem:
                pause_s = _REFUSED_S * random.uniform(0.5, 1.5)  # others behind its NAT have the same rate
                if problem.message != said:
                    said = problem.message
                    self._tell(f"large files go through the pool, whose rendezvous says: {said}")
            except Exception as problem:  # noqa: BLE001 - whatever it is, the pool is asked again, and without it all goes on
                _log.debug("the rendezvous is not reached: %s", problem)
            self._is_ready.clear()
            await asyncio.sleep(again_s if pause_s is None else pause_s)
            again_s = min(_MOST_AGAIN_S, 2 * again_s)

    async def _join(self) -> None:
        pool = await asyncio.to_thread(self._client.state, "pool")
        if not (found := pool.get("rendezvous")):
            raise PlaceUnreachable("the pool has no rendezvous")
        host = urlsplit(self._client.address.url).hostname or ""
        try:
            addresses = await self._loop.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
        except OSError as problem:
            raise PlaceUnreachable(f"{host} is not found: {problem}") from problem
        hosts = dict.fromkeys(f"[{one[4][0]}]" if one[0] == socket.AF_INET6 else str(one[4][0]) for one in addresses)
        await self._endpoint.meet(self._client.address.key, [f"{one}:{int(found['port'])}" for one in hosts])
        hello = await self._ask({"op": "hello", "local": self._endpoint.local_addresses()})
        mirror = hello["mirror"]
        with suppress(PlaceUnreachable):  # a firewall may be in front of the second port alone
            await self._endpoint.meet(str(mirror["key"]), [f"{one}:{int(mirror['port'])}" for one in hosts])
        self.network = str((await self._ask({"op": "mirrored"}))["network"])
        self._endpoint.drop(str(mirror["key"]))
        self.bulk_bytes = int(found["bulk_bytes"])
        if self._keeps:
            with suppress(Refused):  # more than the pool takes, or a key that pays for nothing: the rest goes on
                await self._announce([path.name for path in self._kept()])
        self._is_ready.set()

    async def _ask(self, question: Head) -> Head:
        """The rendezvous' answer to a question."""
        if (connection := self._endpoint.connection(self._client.address.key)) is None:
            raise PlaceUnreachable("the rendezvous is not connected")
        answer, _ = await self._endpoint.request(connection, question, timeout_s=_ASK_S)
        if "error" in answer:
            raise Refused(str(answer["error"]))
        return answer

    async def _announce(self, digests: Sequence[str]) -> None:
        """Say what is kept here, and who sent it."""
        for first in range(0, len(digests), _MOST_ANNOUNCED):
            blobs = {}
            for digest in digests[first : first + _MOST_ANNOUNCED]:
                with suppress(FileNotFoundError):
                    num_bytes = (self._folder / digest).stat().st_size
                    senders = reversed((self._folder / "senders" / digest).read_text().split())
                    blobs[digest] = [num_bytes, *list(dict.fromkeys(senders))[:_MOST_SENDERS]]
            await self._ask({"op": "held", "blobs": blobs})

    # -------------------------------------------------------------------------------------------------- what others ask

    def _admits(self, key: str, _: str) -> str:
        now, grants = time.monotonic(), self._expected.items()
        return "" if any(who == key and now < until for (who, _), (*_, until) in grants) else "not expected"

    async def _serve(self, key: str, head: Head, incoming: Incoming) -> tuple[Head, Body]:
        """Answer the pool, or a peer that it announced."""
        if key == self._client.address.key:
            return await self._serve_pool(head), b""
        try:
            match = _TARGET.fullmatch(str(head.get("target")))
            may, num_bytes, until = self._expected.get((key, match[1] if match else ""), ("", 0, 0.0))
            if match is None or time.monotonic() > until:
                raise PlaceFailed("the pool has not announced that")
            method = head.get("method")
            if may == "put" and method == "PUT":
                await self._take(match[1], incoming, num_bytes, key)
                return {"status": 200}, b""
            if may == "link" and method in ("PUT", "GET"):
                return await self._measured(key, match[1], num_bytes, head, incoming)
            if may == "get" and method == "GET":
                return self._given(self._folder / match[1], str(head.get("headers", {}).get("Range", "")))
            raise PlaceFailed(f"{str(method)[:10]} is not what the pool announced")
        except (StokerError, OSError) as problem:
            text = problem.message if isinstance(problem, StokerError) else str(problem)
            return {"status": 404}, canonical({"error": text[:1000]})

    async def _serve_pool(self, head: Head) -> Head:
        match head.get("op"):
            case "expect" if self._may_expect(head):
                now, key = time.monotonic(), str(head["key"])
                self._expected = {who: grant for who, grant in self._expected.items() if grant[2] > now}
                self._expected[key, str(head["digest"])] = str(head["may"]), int(head["num_bytes"]), now + _EXPECTED_S
                self._spawn(self._endpoint.meet(key, [str(one) for one in head["addresses"]]))
            case "forward" if is_digest(name := str(head["digest"])) and (path := self._folder / name).is_file():
                if path.name not in self._forwarding:
                    self._forwarding.add(path.name)
                    self._spawn(asyncio.to_thread(self._forward, path))
            case _:
                return {"ok": False}
        return {"ok": True}

    def _may_expect(self, head: Head) -> bool:
        """Whether what the pool announces is taken here."""
        if head["may"] == "link":
            return int(head["num_bytes"]) <= MOST_BYTES
        return head["may"] == "get" or (self._keeps and int(head["num_bytes"]) >= self.bulk_bytes)

    def _forward(self, path: Path) -> None:
        """Send a blob to the pool, for a peer that does not reach this one."""
        try:
            self._client.put_blob(path, through_pool=True)
        except (StokerError, OSError) as problem:
            self._tell(f"the blob {path.name[:12]}… is not forwarded: {problem}")
        finally:
            self._forwarding.discard(path.name)

    async def _measured(self, key: str, name: str, left: int, head: Head, incoming: Incoming) -> tuple[Head, Body]:
        """Take or give bytes without content, of which a measurement has `left` left [bytes].

        Raises:
            PlaceFailed: it asks for more, or sends more than it said.
        """
        headers = head.get("headers", {})
        asked = int(str(headers.get("Content-Length", "0"))) if head.get("method") == "PUT" else _first_bytes(headers)
        if not 0 <= asked <= left:
            raise PlaceFailed(f"a measurement has {left:,} bytes left")
        _, _, until = self._expected[key, name]
        self._expected[key, name] = "link", left - asked, until
        if head.get("method") == "GET":
            self.sent_bytes += asked
            return {"status": 200, "num_bytes": asked}, os.urandom(asked)
        came = 0
        while part := await incoming.read():
            came += len(part)
            if came > asked:
                raise PlaceFailed(f"more than the {asked:,} bytes that were announced")
        return {"status": 200}, b""

    def _given(self, path: Path, wanted: str) -> tuple[Head, Body]:
        size = path.stat().st_size
        start = int(match[1]) if (match := _RANGE.fullmatch(wanted)) and int(match[1]) <= size else 0
        path.touch()

        async def parts() -> AsyncIterator[bytes]:
            with path.open("rb") as file:
                file.seek(start)
                while part := await asyncio.to_thread(file.read, PART_BYTES):
                    self.sent_bytes += len(part)
                    yield part
            self._unfetched.discard(path.name)

        return {"status": 206 if start else 200, "num_bytes": size - start}, parts()

    async def _take(self, digest: str, incoming: Incoming, num_bytes: int, sender: str) -> None:
        """Keep a blob that an agent sends, and say so to the pool before the agent hears of it.

        It is read whole also if it is here already: that the agent has it, and not its hash alone, is to be known.
        """
        target, hashed, written = self._folder / digest, hashlib.sha256(), 0
        self._require_room(num_bytes)
        self._on_its_way += num_bytes
        try:
            with (
                disk_errors(target, "a blob", needed_bytes=num_bytes, error=BadRun),
                written_aside(target) as aside,
            ):
                with aside.open("xb") as file:
                    while part := await incoming.read():
                        written += len(part)
                        if written > num_bytes:
                            raise PlaceFailed(f"more than the {num_bytes:,} bytes that were announced")
                        await asyncio.to_thread(file.write, part)
                        hashed.update(part)
                if written != num_bytes or hashed.hexdigest() != digest:
                    raise PlaceFailed(f"{written:,} of {num_bytes:,} bytes came, or others than {digest[:12]}…")
                await asyncio.to_thread(self._note_sender, aside, digest, sender)
        finally:
            self._on_its_way -= num_bytes
        await self._announce([digest])

    # --------------------------------------------------------------------------------------------------------- the disk

    def _remove_old(self) -> None:
        """Remove what was used last so long ago that no one needs it."""
        for path in [path for path in self._folder.iterdir() if path.is_file()]:  # other processes may write here
            with suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > (_LEFT_S if is_aside(path) else KEPT_S):
                    path.unlink()
                    (self._folder / "senders" / path.name).unlink(missing_ok=True)

    def _kept(self) -> list[Path]:
        return [path for path in self._folder.iterdir() if is_digest(path.name)]

    def _require_room(self, num_bytes: int) -> None:
        """Refuse what would go over the quota, or fill the disk.

        Raises:
            PlaceFailed: it would.
        """
        kept = sum(path.stat().st_size for path in self._kept()) + self._on_its_way
        free = shutil.disk_usage(self._folder).free - _LEAST_FREE_BYTES - self._on_its_way
        if num_bytes > (room := min(self._most_kept_bytes - kept, free)):
            raise PlaceFailed(f"{format_bytes(num_bytes)} do not fit: {format_bytes(max(0, room))} are free here")

    def _keep_copy(self, digest: str, source: Path, size: int) -> bool:
        target = self._folder / digest
        if not target.is_file():
            self._require_room(size)
            with disk_errors(target, "a blob", needed_bytes=size, error=BadRun), written_aside(target) as aside:
                shutil.copyfile(source, aside)  # its owner may change the source
                self._note_sender(aside, digest, self._key.public)
        target.touch()
        self._in_loop(self._announce([digest]), _ASK_S)
        self._unfetched.add(digest)
        return True

    def _note_sender(self, aside: Path, digest: str, sender: str) -> None:
        """Note who has sent a blob, which is whole in `aside`, before it has its name."""
        sync_file(aside)
        append_line(self._folder / "senders" / digest, sender, error=BadRun, is_durable=True)

    # ---------------------------------------------------------------------------------------------------------- threads

    def _in_loop(self, work: Coroutine[Any, Any, _T], timeout_s: float) -> _T:
        """What something in the peer's thread comes to."""
        if not self._thread.is_alive():
            work.close()
            raise PlaceUnreachable("this peer has ended")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except concurrent.futures.CancelledError as problem:
            raise PlaceUnreachable("this peer has ended") from problem
        except TimeoutError as problem:
            future.cancel()
            raise PlaceUnreachable(f"no answer within {timeout_s:g} s") from problem


def _first_bytes(headers: Mapping[str, Any]) -> int:
    """Size of the range, from the beginning, that a request asks for [bytes]."""
    match = _FIRST_BYTES.fullmatch(str(headers.get("Range", "")))
    return int(match[1]) + 1 if match else 0


class _PeerTransport:
    """Requests to another key over a direct path."""

    def __init__(self, peer: Peer, key: str) -> None:
        self.name, self._peer, self._key = short(key), peer, key

    def exchange(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes | IO[bytes] | None, timeout_s: float
    ) -> PoolAnswer:
        """See `Transport`."""
        peer = self._peer
        head, incoming = peer._in_loop(  # noqa: SLF001 - two halves of one thing
            self._exchanged({"method": method, "target": target, "headers": dict(headers)}, body, timeout_s),
            7 * 86400.0,
        )
        status, num_bytes = head.get("status"), head.get("num_bytes")
        if not isinstance(status, int) or not (num_bytes is None or isinstance(num_bytes, int)):
            raise PlaceFailed(f"{self.name} answers what is no answer")
        left = num_bytes

        def read(most_bytes: int) -> bytes:
            nonlocal left
            part = peer._in_loop(incoming.read(most_bytes), STALLED_S + 1.0)  # noqa: SLF001
            left = None if left is None else left - len(part)
            if not part and left:
                raise PlaceUnreachable(f"{self.name} broke off {left:,} bytes before the end")
            return part

        def close() -> None:
            with suppress(PlaceUnreachable):
                peer._in_loop(incoming.stop(), 1.0)  # noqa: SLF001

        return PoolAnswer(status, num_bytes, read, close)

    async def _exchanged(self, head: Head, body: bytes | IO[bytes] | None, timeout_s: float) -> tuple[Head, Incoming]:
        endpoint = self._peer._endpoint  # noqa: SLF001
        if (connection := endpoint.connection(self._key)) is None:
            raise PlaceUnreachable(f"{self.name} is not connected any more")

        async def parts() -> AsyncIterator[bytes]:
            assert body is not None
            assert not isinstance(body, bytes)
            while part := await asyncio.to_thread(body.read, PART_BYTES):
                self._peer.sent_bytes += len(part)
                yield part

        sent: Body = b"" if body is None else body if isinstance(body, bytes) else parts()
        self._peer.sent_bytes += len(sent) if isinstance(sent, bytes) else 0
        return await endpoint.request(connection, head, sent, timeout_s)


class _LinkPath:
    """A path to another agent while it is measured, for no longer than the pool waits; see `DirectPath`."""

    def __init__(self, transport: _PeerTransport, name: str) -> None:
        self._transport, self._target = transport, f"/v1/blobs/{name}"
        self._until_s = time.monotonic() + ASKED_S / 2

    def send(self, num_bytes: int) -> None:
        """Send so many bytes, and wait for the answer."""
        self._exchanged("PUT", {"Content-Length": str(num_bytes)}, os.urandom(num_bytes)).close()

    def fetch(self, num_bytes: int) -> None:
        """Fetch so many bytes."""
        answer = self._exchanged("GET", {"Range": f"bytes=0-{num_bytes - 1}"}, None)
        left = num_bytes
        while left > 0 and (part := answer.read(PART_BYTES)):
            left -= len(part)
            self._require_time()
        answer.close()
        if left:
            raise PlaceFailed(f"{num_bytes - left:,} of {num_bytes:,} bytes came")

    def _exchanged(self, method: str, headers: dict[str, str], body: bytes | None) -> PoolAnswer:
        self._require_time()
        answer = self._transport.exchange(method, self._target, headers, body, _ASK_S)
        if answer.status >= 300:
            answer.close()
            raise PlaceFailed(f"{self._transport.name} answers with status {answer.status}")
        return answer

    def _require_time(self) -> None:
        if time.monotonic() > self._until_s:
            raise PlaceUnreachable(f"{self._transport.name} takes too long")


class _Disk:
    """A blob on this disk, in the place of a peer that has it."""

    def __init__(self, path: Path) -> None:
        self.name, self._path = str(path), path

    def exchange(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes | IO[bytes] | None, timeout_s: float
    ) -> PoolAnswer:
        """See `Transport`."""
        match = _RANGE.fullmatch(headers.get("Range", ""))
        try:
            file = self._path.open("rb")
        except OSError as problem:
            raise PlaceUnreachable(f"{self._path} cannot be read: {problem}") from problem
        start = file.seek(int(match[1]) if match else 0)
        return PoolAnswer(206 if start else 200, self._path.stat().st_size - start, file.read, file.close)

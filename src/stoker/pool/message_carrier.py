"""Messages between the sites of a gang, carried between the box of a job without a network and the pool.

What: the job writes its messages into a folder of its box and waits there for those of the others
(`stepping.message_folder`). The agent sends each of them as a blob, and names it in an event that it signs; what the
others' agents have named it fetches, and writes into the folder. Blobs are held against their digests, and a message
against the site, update and fragment that its agent signed for. What is in it the agent does not look at.
Large messages go directly where the site has a measured path to each other one (`pair_links`): the agent keeps the file
for them, signs for it, and sends the pool its copy once the exchange is over. The pool takes no block before it has all
messages that the block rests on; an agent that has got one from another which does not send it sends it itself.
Rule: of an exchange nothing is brought before the site's own message is sent. So none is left unsent at a job's end, no
block rests on an exchange whose own message was not compared, and messages of exchanges that the job does not make cost
no transfer.
A message that its agent signed for and that is not to be had, or is none, is waited for like one that was not sent: the
site's lease is not closed for it, and where it has waited for long it leaves without a mark (`gang.has_waited`).
Costs: while a job waits for a message, up to two requests a second for each site. A message is copied on the disk,
three times at most, and is never read into memory.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from stoker.errors import BadRun, PlaceFailed, StokerError
from stoker.pool import events as on
from stoker.pool.client import PoolClient, WrongBlob, is_passing
from stoker.pool.isolation import is_owners
from stoker.pool.job_box import MESSAGES, MOST_MESSAGE_BYTES, JobBox
from stoker.pool.lease import SENT_OTHERWISE
from stoker.pool.shown_lease import ShownLease
from stoker.store.foreign_files import parts_below
from stoker.store.site_message import MessageHead, check_message, message_name, parse_name

_LOOK_S, _MOST_LOOK_S = 0.5, 5.0
"""Time between two looks, and while nothing comes for long [s]."""
_OTHERS_S = 20.0
"""Time that others have to send the pool their messages, before who has got them does [s]."""


@dataclass(frozen=True, kw_only=True)
class KnownMessage:
    """A message that `agent` (a key) has signed for in a lease: which one, and the blob with its file."""

    site: int
    update: int
    fragment: int
    blob: str
    agent: str = ""
    lease_id: str = ""

    @property
    def name(self) -> str:
        """Name of its file."""
        return message_name(self.update, self.fragment, self.site)

    @property
    def exchange(self) -> tuple[int, int]:
        """Which exchange it is of: update and fragment."""
        return self.update, self.fragment


def known_messages(client: PoolClient, lease: ShownLease) -> list[KnownMessage]:
    """All messages of a lease's gang, of all of its leases so far."""
    found = []
    for site, names in enumerate(lease.gang_leases):
        for name in names:
            one = lease if name == lease.lease_id else client.lease(name)
            found += [
                KnownMessage(
                    site=site,
                    update=message.update,
                    fragment=message.fragment,
                    blob=message.blob,
                    agent=one.agent,
                    lease_id=name,
                )
                for message in one.messages
            ]
    return found


def needed_from(messages: Iterable[KnownMessage], begin: int) -> list[KnownMessage]:
    """Messages that a site needs which goes on after `begin` updates, in the order of updates.

    Those made since, and of each fragment and site the last one before: it may be on its way.
    """
    ordered = sorted(messages, key=lambda one: one.update)
    last = {(one.site, one.fragment): one for one in ordered if one.update < begin}
    return [*last.values(), *(one for one in ordered if one.update >= begin)]


def require_signed(path: Path, message: KnownMessage, own: MessageHead | None = None) -> None:
    """Refuse a message's file, as it was fetched, that is not the one that its agent signed for (`BadRun`).

    `own`: of the site's own message of that exchange: a job fails that reads one of another job, or of another length.
    """
    try:
        with path.open("rb") as file:
            head = check_message(file)
    except ValueError as problem:
        raise BadRun(f"the message {message.name} of site {message.site} is none: {problem}") from problem
    if head.name != message.name:
        raise BadRun(f"site {message.site} has sent {head.name} as its message {message.name}")
    if own is not None and head != replace(own, site=message.site, sha256=head.sha256):
        raise BadRun(f"the message {message.name} of site {message.site} is of another job, or of another length")


class MessageCarrier(threading.Thread):
    """Carries the messages of one lease, in a thread of its own.

    Args:
        lease_id: of the lease.
        site: of its job.
        box: of the job.
        client: of the pool, with the agent's key.
        fetch: the file with a blob, which is removed once it is in the box.
        tell: receives a line of text.
        most_bytes: of a file that is taken out of the box [bytes].

    Attributes:
        problem: why it has ended before `close`; None: it has not.
        has_sent: whether all that the job has written by the last look was sent, and is at the pool.
        waited_s: for how long another site's message of an exchange has been waited for by then; 0.0: for none [s].
    """

    def __init__(
        self,
        lease_id: str,
        site: int,
        box: JobBox,
        client: PoolClient,
        fetch: Callable[[str], Path],
        tell: Callable[[str], None] = lambda _: None,
        *,
        most_bytes: int = MOST_MESSAGE_BYTES,
    ) -> None:
        super().__init__(name="stoker-messages", daemon=True)
        self._lease_id, self._site, self._box = lease_id, site, box
        self._client, self._fetch, self._tell = client, fetch, tell
        self._most_bytes = min(most_bytes, MOST_MESSAGE_BYTES)
        self._is_over = threading.Event()
        self._sent: set[str] = set()
        self._needs, self._pause_s = 0, _LOOK_S
        self._own: dict[str, tuple[Path, float, str]] = {}
        self._copied: list[tuple[str, float]] = []
        self._brought: list[tuple[KnownMessage, Path, float]] = []
        self._missed: set[str] = set()
        self._no_messages: set[str] = set()
        self._heads: dict[tuple[int, int], MessageHead] = {}
        self._waits_since_s: float | None = None
        self.problem: StokerError | None = None
        self.has_sent = False

    def close(self) -> None:
        """End it."""
        self._is_over.set()

    @property
    def waited_s(self) -> float:
        """See above."""
        return 0.0 if self._waits_since_s is None else time.monotonic() - self._waits_since_s

    def run(self) -> None:
        """Carry messages until `close`, or until one cannot be."""
        try:
            self._carry_on()
        finally:  # own messages that have no copy at the pool are left for the others
            self._release(math.inf)
            for _, path, _ in self._brought:
                path.unlink(missing_ok=True)

    def _carry_on(self) -> None:
        while not self._is_over.wait(self._pause_s):
            try:
                self.carry()
            except StokerError as problem:
                if self._is_over.is_set():
                    return
                if not is_passing(problem):
                    self.problem = problem
                    return
                self._tell(f"{self._lease_id}: messages are carried once the pool answers: {problem.message}")
            except Exception as problem:  # noqa: BLE001 - whatever the job left there does not end the agent
                is_here = isinstance(problem, OSError) and is_owners(problem)
                self.problem = (
                    PlaceFailed(f"this machine fails: {problem}")
                    if is_here
                    else BadRun(f"its messages cannot be used: {problem!r}")
                )
                return

    def carry(self) -> None:
        """Send what the job has written, and bring what it waits for.

        Raises:
            StokerError: something cannot be sent, fetched or written.
        """
        places = {name: place for name in self._box.message_names() if (place := parse_name(name)) is not None}
        mine = {name: place for name, place in sorted(places.items()) if place[2] == self._site}
        is_waiting = any(self._lacks(place, places) for place in mine.values())
        if not is_waiting:
            self._waits_since_s = None
        elif self._waits_since_s is None:
            self._waits_since_s = time.monotonic()
        has_signed = self._sent >= mine.keys()
        self.has_sent = has_signed and not self._own
        self._pause_s = min(1.2 * self._pause_s, _MOST_LOOK_S) if is_waiting else _LOOK_S
        if has_signed and not is_waiting:
            self._copy_to_pool(is_over=True)
            self._clear(places)
            return
        lease = self._client.lease(self._lease_id)
        known = known_messages(self._client, lease)
        is_direct = len(lease.direct) == self._box.order.sites - 1
        own = {one.name: one for one in known if one.site == self._site}
        for name, place in mine.items():
            if name not in self._sent:
                self._send(name, place, own.get(name), is_direct=is_direct)
                self._sent.add(name)
        self.has_sent = not self._own
        exchanges = {place[:2] for place in mine.values()}
        try:
            for message in known:
                is_needed = message.exchange in exchanges and message.name not in places
                if is_needed and message.site != self._site and message.blob not in self._no_messages:
                    self._bring(message, is_direct=bool(lease.direct))
                    self._pause_s = _LOOK_S
        finally:  # blocks of the others wait for it, also where a message that one holds back cannot be fetched
            self._copy_to_pool(is_over=False)

    def _bring(self, message: KnownMessage, *, is_direct: bool) -> None:
        try:
            path = self._fetch(message.blob)
        except (on.Refused, WrongBlob) as problem:  # who signed for it does not give it: as one that has sent nothing
            if is_passing(problem):
                raise
            if message.name not in self._missed:
                self._missed.add(message.name)
                self._tell(f"{self._lease_id}: {message.name} is not to be had yet: {problem.message}")
            return
        is_kept = False
        try:
            try:
                require_signed(path, message, self._heads.get(message.exchange))
            except BadRun as problem:  # who signed for it answers for it: a copy for the pool shows it, and it stands
                self._no_messages.add(message.blob)
                self._tell(f"{self._lease_id}: {problem.message}: it is waited for in vain")
            else:
                self._box.write_message(message.name, path)
            is_kept = is_direct
        finally:
            if not is_kept:
                path.unlink(missing_ok=True)  # the box has it, until the job needs it no more
        if is_kept:
            self._brought.append((message, path, time.monotonic() + _OTHERS_S))

    def _copy_to_pool(self, *, is_over: bool) -> None:
        """Send the pool what went directly: the site's own messages, and those of others that do not do it.

        `is_over`: the job waits for no message; else the line is left to the others for a while.
        """
        now = time.monotonic()
        for digest, (path, from_s, first) in list(self._own.items()):
            if is_over or now >= from_s:
                self._client.put_blob(path, through_pool=True, message_of=first)
                del self._own[digest]
                self._copied.append((digest, now + _OTHERS_S))  # others may still be fetching it here
        self._release(now)
        while self._brought and now >= self._brought[0][2]:
            message, path, _ = self._brought[0]
            self._client.put_blob(path, through_pool=True, message_of=message.lease_id)
            self._brought.pop(0)
            path.unlink(missing_ok=True)

    def _release(self, now_s: float) -> None:
        """Keep no longer what the pool has, and others have had time to fetch."""
        while self._copied and now_s >= self._copied[0][1]:
            digest, _ = self._copied.pop(0)
            if self._client.peer is not None:
                self._client.peer.release(digest)

    def _clear(self, places: dict[str, tuple[int, int, int]]) -> None:
        """Remove messages that the job will not read again, by its own note; the pool has them."""
        needs = self._box.needs_from()
        if needs <= self._needs:
            return
        self._needs = needs
        for name, place in places.items():
            if place[0] < self._needs:
                self._box.remove_message(name)
                self._heads.pop(place[:2], None)

    def _lacks(self, own: tuple[int, int, int], places: dict[str, tuple[int, int, int]]) -> bool:
        """Whether a message of this site is there, and one of another site of the same exchange is not."""
        sites = self._box.order.sites
        return any(message_name(own[0], own[1], site) not in places for site in range(sites))

    def _send(
        self, name: str, place: tuple[int, int, int], known: KnownMessage | None, *, is_direct: bool = False
    ) -> None:
        """Send a message, unless the site has sent it before it went on here; `is_direct`: the others fetch it here.

        Raises:
            PlaceFailed: it has sent another one: this machine does not compute the same bits.
        """
        copy = self._box.aside / "message"
        try:
            if not self._box.copy_message(name, copy, self._most_bytes):
                return
            with copy.open("rb") as file:
                self._heads[place[:2]] = check_message(file)  # it is renamed when it is complete: else it is none
                file.seek(0)
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if known is not None and known.blob != digest:
                raise PlaceFailed(
                    f"{SENT_OTHERWISE.partition(': ')[2]} after update {place[0] + 1:,} than this machine makes: "
                    f"{known.blob[:12]}…, here {digest[:12]}…"
                )
            peer = self._client.peer if is_direct else None
            first = "" if known is None else known.lease_id  # in whose name the others read it
            if peer is not None and (kept := peer.hold(digest, copy)) is not None:
                self._own[digest] = kept, time.monotonic() + _OTHERS_S, first
            else:  # also one that was sent before: the pool may have deleted it while the run stood still
                self._client.put_blob(copy, through_pool=True, message_of=first)
            if known is None:
                self._client.post(on.Sent(lease_id=self._lease_id, update=place[0], fragment=place[1], blob=digest))
        finally:
            copy.unlink(missing_ok=True)


def differing_messages(run: Path, own: Iterable[KnownMessage]) -> Iterator[KnownMessage]:
    """Messages of a site that it has sent otherwise than its run, made again in `run`, has written them."""
    for message in own:
        made = hashlib.sha256()
        with suppress(FileNotFoundError):
            for part in parts_below(run, f"{MESSAGES}/{message.name}", MOST_MESSAGE_BYTES):
                made.update(part)
            if made.hexdigest() != message.blob:
                yield message

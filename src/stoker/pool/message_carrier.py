"""Messages between the sites of a gang, carried between the box of a job without a network and the pool.

What: the job writes its messages into a folder of its box and waits there for those of the others
(`stepping.message_folder`). The agent sends each of them as a blob, and names it in an event that it signs; what the
others' agents have named it fetches, and writes into the folder. Blobs are held against their digests, and a message
against the site, update and fragment that its agent signed for. What is in it the agent does not look at.
Costs: while a job waits for a message, up to two requests a second for each site.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.errors import BadRun, PlaceFailed, StokerError
from stoker.pool import events as on
from stoker.pool.client import PoolClient, is_passing
from stoker.pool.job_box import MESSAGES, MOST_MESSAGE_BYTES, JobBox
from stoker.store.foreign_files import read_below
from stoker.store.site_message import decode_message, message_name, parse_name

_LOOK_S, _MOST_LOOK_S = 0.5, 5.0
"""Time between two looks, and while nothing comes for long [s]."""


@dataclass(frozen=True, kw_only=True)
class KnownMessage:
    """A message that an agent has signed for: which one, and the blob with its file."""

    site: int
    update: int
    fragment: int
    blob: str

    @property
    def name(self) -> str:
        """Name of its file."""
        return message_name(self.update, self.fragment, self.site)


def known_messages(client: PoolClient, lease: dict[str, Any]) -> list[KnownMessage]:
    """All messages of a lease's gang, of all of its leases so far."""
    found = []
    for site, names in enumerate(lease["gang_leases"]):
        for name in names:
            one = lease if name == lease["lease_id"] else client.lease(str(name))
            for message in one.get("messages", ()):
                place = {"update": int(message["update"]), "fragment": int(message["fragment"])}
                found.append(KnownMessage(site=site, blob=str(message["blob"]), **place))
    return found


def needed_from(messages: Iterable[KnownMessage], begin: int) -> list[KnownMessage]:
    """Messages that a site needs which goes on after `begin` updates, in the order of updates.

    Those made since, and of each fragment and site the last one before: it may be on its way.
    """
    ordered = sorted(messages, key=lambda one: one.update)
    last = {(one.site, one.fragment): one for one in ordered if one.update < begin}
    return [*last.values(), *(one for one in ordered if one.update >= begin)]


def checked_message(path: Path, message: KnownMessage) -> bytes:
    """The content of a message's file, as it was fetched.

    Raises:
        BadRun: it is not the message that its agent signed for.
    """
    content = path.read_bytes()
    try:
        head, _ = decode_message(content)
    except ValueError as problem:
        raise BadRun(f"the message {message.name} of site {message.site} is none: {problem}") from problem
    if head.name != message.name:
        raise BadRun(f"site {message.site} has sent {head.name} as its message {message.name}")
    return content


class MessageCarrier(threading.Thread):
    """Carries the messages of one lease, in a thread of its own.

    Args:
        lease_id: of the lease.
        site: of its job.
        begin: updates that the job goes on after [updates].
        box: of the job.
        client: of the pool, with the agent's key.
        fetch: the file with a blob.
        tell: receives a line of text.

    Attributes:
        problem: why it has ended before `close`; None: it has not.
        is_idle: whether all that the job has written by the last look was sent.
    """

    def __init__(
        self,
        lease_id: str,
        site: int,
        begin: int,
        box: JobBox,
        client: PoolClient,
        fetch: Callable[[str], Path],
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        super().__init__(name="stoker-messages", daemon=True)
        self._lease_id, self._site, self._begin, self._box = lease_id, site, begin, box
        self._client, self._fetch, self._tell = client, fetch, tell
        self._is_over = threading.Event()
        self._sent: set[str] = set()
        self._needs, self._pause_s = 0, _LOOK_S
        self.problem: StokerError | None = None
        self.is_idle = False

    def close(self) -> None:
        """End it."""
        self._is_over.set()

    def run(self) -> None:
        """Carry messages until `close`, or until one cannot be."""
        while not self._is_over.wait(self._pause_s):
            try:
                self.carry()
            except StokerError as problem:
                if not is_passing(problem):
                    self.problem = problem
                    return
                self._tell(f"{self._lease_id}: messages are carried once the pool answers: {problem.message}")
            except Exception as problem:  # noqa: BLE001 - whatever the job left there does not end the agent
                self.problem = BadRun(f"its messages cannot be used: {problem!r}")
                return

    def carry(self) -> None:
        """Send what the job has written, and bring what it waits for.

        Raises:
            StokerError: something cannot be sent, fetched or written.
        """
        places = {name: place for name in self._box.message_names() if (place := parse_name(name)) is not None}
        mine = sorted(name for name, place in places.items() if place[2] == self._site)
        is_waiting = any(self._lacks(places[name], places) for name in mine)
        self.is_idle = not is_waiting and self._sent >= set(mine)
        self._pause_s = min(1.2 * self._pause_s, _MOST_LOOK_S) if is_waiting else _LOOK_S
        if self.is_idle:
            self._clear(places)
            return
        known = known_messages(self._client, self._client.lease(self._lease_id))
        own = {one.name: one for one in known if one.site == self._site}
        for name in mine:
            if name not in self._sent:
                self._send(name, places[name], own.get(name))
                self._sent.add(name)
        for message in needed_from((one for one in known if one.site != self._site), self._begin):
            if message.name not in places and message.update >= self._needs:
                self._box.write_message(message.name, checked_message(self._fetch(message.blob), message))
                self._pause_s = _LOOK_S

    def _clear(self, places: dict[str, tuple[int, int, int]]) -> None:
        """Remove messages that the job will not read again, by its own note; the pool has them."""
        note = self._box.read_message(f"{self._site:04d}.needs")
        if note is None or not note.isdigit() or int(note) <= self._needs:
            return
        self._needs = int(note)
        for name, place in places.items():
            if place[0] < self._needs:
                self._box.remove_message(name)

    def _lacks(self, own: tuple[int, int, int], places: dict[str, tuple[int, int, int]]) -> bool:
        """Whether a message of this site is there, and one of another site of the same exchange is not."""
        sites = self._box.order.sites
        return any(message_name(own[0], own[1], site) not in places for site in range(sites))

    def _send(self, name: str, place: tuple[int, int, int], known: KnownMessage | None) -> None:
        """Send a message, unless the site has sent it before it went on here.

        Raises:
            PlaceFailed: it has sent another one: this machine does not compute the same bits.
        """
        content = self._box.read_message(name)
        if content is None:
            return
        decode_message(content)  # it is renamed when it is complete: else it is none
        digest = hashlib.sha256(content).hexdigest()
        if known is None:
            self._client.post(
                on.Sent(
                    lease_id=self._lease_id,
                    update=place[0],
                    fragment=place[1],
                    blob=self._client.put_blob(content, through_pool=True),
                )
            )
        elif known.blob != digest:
            raise PlaceFailed(
                f"site {self._site} has sent another message after update {place[0] + 1:,} than this machine makes: "
                f"{known.blob[:12]}…, here {digest[:12]}…"
            )


def differing_messages(run: Path, own: Iterable[KnownMessage]) -> Iterator[KnownMessage]:
    """Messages of a site that it has sent otherwise than its run, made again in `run`, has written them."""
    for message in own:
        content = read_below(run, f"{MESSAGES}/{message.name}", MOST_MESSAGE_BYTES)
        if content is not None and hashlib.sha256(content).hexdigest() != message.blob:
            yield message

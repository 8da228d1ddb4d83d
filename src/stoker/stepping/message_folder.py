"""Exchanges of sites through a folder of files, where no network joins their hosts.

What: each site writes its message about a fragment as a file, and reads those of the others when it needs them. The
folder may be shared between hosts, or somebody carries the files from one host's folder to the others'.
Use when: hosts share a disk and nothing else; a job has no network, as in a sandbox; a site is to be replayed alone,
from the messages that it got.
Costs: a file for each exchange and site. All sites have to run; none goes on without the others. Messages hold no times
and no signals, so that a site that is made again sends the same bytes: a site that went back to its checkpoint reads
what was sent in between, and the others wait for it.
Does not combine with: sites that leave or join; several processes in one site.

A file (`store.site_message`) that is not complete counts as on its way.

```
FOLDER/000000009-0000-0001.message     after update 9 (from 0), fragment 0, of site 1
       0001.needs                      the first update whose messages site 1 still needs
```
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from stoker.activity import doing
from stoker.errors import BadJob, RunFailed
from stoker.store.disk_errors import disk_errors
from stoker.store.files import make_directories, write_atomic
from stoker.store.site_message import MOST_HEAD_BYTES, MessageHead, decode_message, encode_message, parse_name
from stoker.units import format_seconds

PATIENCE_S = 3600.0
"""Time that a site waits for the message of another one, unless another patience is given [s]."""
MOST_SITES = 1024
_SITE = re.compile(r"(\d{1,4})/(\d{1,4})")
_SLEEP_S = (0.005, 0.25)


def parse_site(text: str) -> tuple[int, int]:
    """A site's number, from 0, and how many there are: `0/2`.

    Raises:
        BadJob: it is none.
    """
    match = _SITE.fullmatch(text.strip())
    site, sites = (int(match[1]), int(match[2])) if match else (0, 0)
    if not (0 <= site < sites and 2 <= sites <= MOST_SITES):
        raise BadJob(
            f"site {text!r}: wanted a number from 0 and how many sites there are, 2 to {MOST_SITES}",
            remedy="Of two sites: --site 0/2 in one place, --site 1/2 in the other.",
        )
    return site, sites


class BadMessage(RunFailed):
    """Another site's message did not come, or is none of this exchange: no site can go on from it."""


class StoppedWaiting(Exception):
    """Asked to stop while it waited for another site, in the middle of an update: the last checkpoint counts."""


class MessageFolder:
    """The exchanges of one site.

    Args:
        folder: of the messages; made if it is not there.
        site, num_sites: which of how many sites this is, from 0.
        job: digest of the job's identity.
        patience_s: longest wait for another site's message [s].
        clock, sleep: time [s] and a pause of so many seconds.

    Attributes:
        is_alive: called while it waits.
        is_stopping: asked while it waits; True ends the wait.
    """

    def __init__(
        self,
        folder: Path,
        site: int,
        num_sites: int,
        *,
        job: str,
        patience_s: float = PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.folder, self.site, self.num_sites, self.job = folder, site, num_sites, job
        self.patience_s, self._clock, self._sleep = patience_s, clock, sleep
        self.is_alive: Callable[[], None] = lambda: None
        self.is_stopping: Callable[[], bool] = lambda: False
        with disk_errors(folder, "the folder of messages", error=RunFailed, option="--exchange DIR"):
            make_directories(folder)

    def send(self, update: int, fragment: int, message: torch.Tensor) -> PendingFiles:
        """Write this site's message (uint8) of the exchange after `update`; one that is there already is compared.

        Raises:
            RunFailed: another message is there in its place, or it cannot be written.
        """
        content = message.cpu().numpy().tobytes()
        head = MessageHead(
            job=self.job,
            sites=self.num_sites,
            site=self.site,
            update=update,
            fragment=fragment,
            num_bytes=len(content),
            sha256=hashlib.sha256(content).hexdigest(),
        )
        path = self.folder / head.name
        known = self._known(path, head)
        if known is None:
            write_atomic(path, encode_message(head, content), what=f"the message {path.name}")
        elif known != content:
            raise RunFailed(
                f"{path} is there already, and is not the message that site {self.site} of {self.num_sites} has made: "
                f"{hashlib.sha256(known).hexdigest()[:12]}… instead of {head.sha256[:12]}…",
                remedy="Give each start of a job a folder of its own (--exchange), and each site one process. A site "
                "that goes on on other hardware does not make the same bits.",
            )
        return PendingFiles(self, head, message)

    def receive(self, head: MessageHead, site: int) -> bytes:
        """The message of another site of the same exchange as `head`; waits for it.

        Raises:
            BadMessage: it does not come in time, or is of another job or exchange.
            StoppedWaiting: `is_stopping` says so.
        """
        path = self.folder / replace(head, site=site).name
        until, pause_s = self._clock() + self.patience_s, _SLEEP_S[0]
        with doing(f"waiting for site {site}", is_long=True):
            while True:
                content, problem = self._read(path, head, site)
                if content is not None:
                    return content
                if self.is_stopping():
                    raise StoppedWaiting(
                        f"asked to stop while waiting for site {site} after update {head.update + 1:,}"
                    )
                if self._clock() >= until:
                    raise BadMessage(
                        f"no message of site {site} after update {head.update + 1:,} has come to {self.folder} for "
                        f"{format_seconds(self.patience_s)}{problem}",
                        remedy=f"Start site {site}/{self.num_sites} again with the same folder; the same command here "
                        "goes on from the last checkpoint.",
                    )
                self.is_alive()
                self._sleep(pause_s)
                pause_s = min(1.5 * pause_s, _SLEEP_S[1])

    def needs_from(self, update: int) -> None:
        """Delete this site's messages that none needs: this site goes back to no update before `update`."""
        needs = self.folder / f"{self.site:04d}.needs"
        write_atomic(needs, str(update), what=f"the note {needs.name}")
        first = update
        for site in range(self.num_sites):
            try:
                first = min(first, int((self.folder / f"{site:04d}.needs").read_text()))
            except (OSError, ValueError):  # it has saved nothing yet, or the note is being carried
                return
        with disk_errors(self.folder, "the folder of messages", error=RunFailed, option="--exchange DIR"):
            for path in self.folder.iterdir():
                place = parse_name(path.name)
                if place is not None and place[0] < first and place[2] == self.site:
                    path.unlink(missing_ok=True)

    def _known(self, path: Path, head: MessageHead) -> bytes | None:
        """The message that this site sent before it went back to a checkpoint; None: there is none that is complete."""
        with suppress(OSError, ValueError):
            there, content = decode_message(_content(path, head.num_bytes))
            self._require_same(path, there, head, self.site)
            return content
        return None

    def _read(self, path: Path, head: MessageHead, site: int) -> tuple[bytes | None, str]:
        """The message in a file, or what keeps it from being one."""
        try:
            there, content = decode_message(_content(path, head.num_bytes))
        except FileNotFoundError:
            return None, ""
        except OSError as problem:
            return None, f": {path.name} cannot be read: {problem.strerror}"
        except ValueError as problem:  # it is being written or carried
            return None, f": {path.name} is not complete: {problem}"
        self._require_same(path, there, head, site)
        return content, ""

    def _require_same(self, path: Path, there: MessageHead, head: MessageHead, site: int) -> None:
        """Refuse a message of another job, another number of sites, or another exchange."""
        expected = asdict(head) | {"site": site, "sha256": there.sha256}
        differing = {name: value for name, value in asdict(there).items() if value != expected[name]}
        if differing:
            wrong = (f"{name} {value} instead of {expected[name]}" for name, value in differing.items())
            raise BadMessage(
                f"{path} does not belong to this exchange: {', '.join(wrong)}",
                remedy="Run the same job file with the same settings at every site, each start in a folder of its own.",
            )


@dataclass(frozen=True)
class PendingFiles:
    """An exchange through a folder: this site's message is there, and those of the others may be."""

    folder: MessageFolder
    head: MessageHead
    message: torch.Tensor

    def received(self) -> Sequence[torch.Tensor]:
        """The messages by site; waits for all of them.

        Raises:
            RunFailed, StoppedWaiting: as `MessageFolder.receive`.
        """
        received = list[torch.Tensor]()
        for site in range(self.folder.num_sites):
            if site == self.head.site:
                received.append(self.message)
            else:
                content = bytearray(self.folder.receive(self.head, site))
                received.append(torch.frombuffer(content, dtype=torch.uint8).to(self.message.device))
        return received


def _content(path: Path, num_bytes: int) -> bytes:
    """The content of a message's file; of one that is too large no more than shows that."""
    with path.open("rb") as file:
        return file.read(num_bytes + MOST_HEAD_BYTES + 2)

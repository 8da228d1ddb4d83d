"""A lease on the side of the agent: the job in its box, its beats, its commitments, its results.

What: `LeasedJob.tick` is called a few times a second and does what is due. The job runs on whatever the control plane
does: where that does not answer, beats are missed, and what was not committed is committed later. Nothing of the box is
believed: what comes out of it is read without following links, within limits, and as JSON or safetensors alone.

A job that ends is `finished` with its results; or `closed` with a reason: `reclaimed: …` and `lost: …` may go on at
another agent, and so does `refused: …`, which this machine, or its network, has no room for; `failed: …` would fail
there as well.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stoker.errors import BadRun, PlaceFailed, PlaceUnreachable, StokerError
from stoker.launching.at_place import HostState
from stoker.pool import events as on
from stoker.pool.blob_tree import TreeLimits, pack_folder, plain_names, unpack
from stoker.pool.client import FORWARDED_S, DiskFailed, PoolClient, is_passing
from stoker.pool.commitment import Block, keep_block
from stoker.pool.isolation import HOST_FULL, LEAST_FREE_BYTES, Host, IsolatedProcess, is_owners, remove_tree
from stoker.pool.job_box import JobBox, PoolOrder, read_order
from stoker.pool.keys import is_digest
from stoker.pool.lease import BEAT_S, METERED, MOST_BLOCK_S, MOST_UNPAID, SAVES_NOTHING, WAITED
from stoker.pool.message_carrier import MessageCarrier
from stoker.pool.sealing import unseal
from stoker.records.codec import loads, printable
from stoker.store import CheckpointStore
from stoker.store.checkpoint_store import order_of_name
from stoker.store.disk_errors import disk_errors
from stoker.store.files import sync_file, written_aside
from stoker.store.foreign_files import read_below
from stoker.units import format_bytes, format_seconds

MOST_STATE_BYTES = 1 << 20
INDEX_BYTES = 32 << 20
"""What a blob may have beyond the files in it [bytes]."""
_RENTERS_FREE_BYTES = 256 << 20
"""Disk that stays free where a renter fetches blobs [bytes]."""
_OTHER_DISK = "STOKER_CACHE (a renter), or --folder DIR (an agent)"
_NOT_HOME = frozenset({"launch", "lock", "lock.held", "lock.taking", "started.json", "launch.json"})
_MOST_TRIES = 5
_FETCH_TRIES, _RETRY_S = 60, 10.0
"""Tries to fetch what a job needs while the pool does not answer, and time between two [s]."""
_MOST_OUTPUT_BYTES = 4096
_ENDS_S = 5.0
"""How long a thread of a lease that is over is waited for [s]."""
_BEAT_AGAIN_S = 2.0
"""Time until a beat that was not taken is sent again [s]."""
_LEAST_BLOCK_S = 0.1
"""Time between two commitments at least [s], whatever the order says: the pool takes 20 events a second of an agent."""
_LOOK_S = 1.0
"""Time between two looks whether all sites of a gang are there [s]."""


class BlobCache:
    """Blobs of a pool, fetched into a folder when they are first read; a part of the disk stays free.

    Args:
        most_bytes: the largest that an agent fetches; None: any, as a renter does.
        patience_s, is_over: see `PoolClient.get_blob`.

    Raises:
        DiskFailed: its folder cannot be made, or the disk is full.
    """

    def __init__(
        self,
        client: PoolClient,
        folder: Path,
        most_bytes: int | None = None,
        *,
        patience_s: float = FORWARDED_S,
        is_over: threading.Event | None = None,
    ) -> None:
        self._client, self._folder, self._most_bytes = client, folder, most_bytes
        self._patience_s, self._is_over = patience_s, is_over

    def put(self, content: bytes | Path) -> str:
        """Send a blob, unless the pool has it; its SHA-256."""
        return self._client.put_blob(content)

    def aside(self) -> Path:
        """A file for what is made before it is sent."""
        self._make_folder()
        return self._folder / f"sending-{os.getpid()}"

    def fetch(self, sha256: str, most_bytes: int | None = None, *, seal: str = "") -> Path:
        """The file with a blob; decrypted with `seal`, the key that the commitment to it states.

        Raises:
            PlaceFailed: it is larger than is taken, or what is asked for is no SHA-256.
            BadRun: `seal` is no key.
        """
        if not is_digest(sha256):  # it becomes the name of a file
            raise PlaceFailed(f"{sha256[:80]!r} names no blob: wanted the SHA-256, 64 hexadecimal digits")
        if seal and not is_digest(seal):
            raise BadRun(f"the key {seal[:80]!r} of the blob {sha256[:12]}… is none: wanted 64 hexadecimal digits")
        # Whoever has a blob can commit to it once more, with another key, which must not change what the first one is.
        path = self._folder / (f"{sha256}-{seal}" if seal else sha256)
        if path.exists():
            return path
        room, most = self._make_folder(), most_bytes or self._most_bytes
        with (
            disk_errors(path, "what comes from the pool", error=DiskFailed, option=_OTHER_DISK),
            written_aside(path) as aside,  # other processes may fetch it as well
        ):
            self._client.get_blob(
                sha256,
                aside,
                most_bytes=room if most is None else min(most, room),
                patience_s=self._patience_s,
                is_over=self._is_over,
            )
            if seal:
                unseal(aside, seal)
                sync_file(aside)
        return path

    def _make_folder(self) -> int:
        """Make the folder; bytes that may be written to it.

        Raises:
            DiskFailed: it cannot be made, or there are none.
        """
        with disk_errors(self._folder, "what comes from the pool", error=DiskFailed, option=_OTHER_DISK):
            self._folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self._folder).free
        stays_free = _RENTERS_FREE_BYTES if self._most_bytes is None else LEAST_FREE_BYTES
        if free <= stays_free:
            raise DiskFailed(
                f"{self._folder}: {format_bytes(free)} of the disk are free, and {format_bytes(stays_free)} stay free",
                remedy=f"Free some space there, or choose another place with {_OTHER_DISK}.",
            )
        return free - stays_free

    def whole(self, sha256: str, most_bytes: int) -> bytes:
        """A small blob.

        Raises:
            BadRun, PlaceFailed: it is larger.
        """
        path = self.fetch(sha256, most_bytes)
        if path.stat().st_size > most_bytes:
            raise BadRun(f"the blob {sha256[:12]} has more than {most_bytes:,} bytes")
        return path.read_bytes()

    def clear(self) -> None:
        """Remove what was fetched."""
        shutil.rmtree(self._folder, ignore_errors=True)


class _Upload(threading.Thread):
    """Packs and sends something in a thread, so that beats do not wait for it.

    Attributes:
        what: `block` or `results`.
        place: of the checkpoint in its run.
        made: what came of it; problem: why nothing did.
        is_over: whether it has ended; `news` is called then.
    """

    def __init__(
        self, what: str, make: Callable[[], Any], news: Callable[[], None], place: tuple[int, int] | None = None
    ) -> None:
        super().__init__(name=f"stoker-send-{what}", daemon=True)
        self.what, self.place, self._make, self._news = what, place, make, news
        self.is_over = False
        self.made: Any = None
        self.problem: Exception | None = None
        self.start()

    def run(self) -> None:
        """Send it."""
        try:
            self.made = self._make()
        except Exception as problem:  # noqa: BLE001 - raised again where it is waited for
            self.problem = problem
        self.is_over = True
        self._news()


class LeasedJob:
    """The job of one lease.

    Args:
        lease_id: of the lease.
        order_digest: SHA-256 of the order.
        folder: of this lease, on the agent's disk.
        client: of the pool, with the agent's key.
        host: where the job runs, and what it may take.
        beat_s: time between beats [s].
        tell: receives a line of text about each step.
        is_checked: whether only what was committed is paid; see `Lease.payable_s`.

    Attributes:
        is_over: nothing is left to do for the lease.
        news: called when `tick` has something to do before its next turn, from any thread.
    """

    box_type = JobBox

    def __init__(
        self,
        lease_id: str,
        order_digest: str,
        folder: Path,
        client: PoolClient,
        *,
        host: Host,
        beat_s: float = 10.0,
        tell: Callable[[str], None] = lambda _: None,
        is_checked: bool = False,
    ) -> None:
        self.lease_id, self.is_over = lease_id, False
        self._order_digest, self._folder, self._client = order_digest, folder, client
        self._host = host
        self._beat_s, self._tell, self._is_checked = beat_s, tell, is_checked
        self.news: Callable[[], None] = lambda: None
        self._is_ending = threading.Event()
        self._blobs = BlobCache(client, folder / "blobs", host.limits.disk_bytes + INDEX_BYTES, is_over=self._is_ending)
        self._taken = TreeLimits(num_bytes=host.limits.disk_bytes)
        self._sent = TreeLimits(num_bytes=host.limits.disk_bytes, has_links=True)
        self._box: JobBox | None = None
        self._process: IsolatedProcess | None = None
        self._preparing: threading.Thread | None = None
        self._problem: StokerError | None = None
        self._is_prepared = False
        self._began = self._ran_before_s = 0.0
        self._ended_s: float | None = None
        self._next_beat, self._beat_index, self._samples = 0.0, 0, 0
        self._num_blocks, self._previous, self._update, self._committed_at = 0, "", 0, 0.0
        self._committed_ran_s = self._beaten_s = 0
        self._away_from_s: int | None = None
        self._away_s = 0
        self._seen: tuple[int, int] | None = None
        self._refused: tuple[int, int] | None = None
        self._upload: _Upload | None = None
        self._kept: tuple[tuple[int, int], Block] | None = None
        self._result, self._sends_from = "", 0.0
        self._notice: on.Reclaiming | None = None
        self._leaving = ""
        self._tries = 0
        self._carrier: MessageCarrier | None = None
        self._looks_at: float = 0.0

    @property
    def _made_box(self) -> JobBox:
        """Its box, once it was made."""
        assert self._box is not None
        return self._box

    @property
    def order(self) -> PoolOrder:
        """What it runs, once it was read."""
        return self._made_box.order

    def read_order(self) -> PoolOrder:
        """Fetch the order.

        Raises:
            BadJob: it is none.
        """
        return read_order(self._blobs.whole(self._order_digest, 4 << 20))

    def begin(
        self, order: PoolOrder, *, beats: int = 0, ran_s: float = 0.0, samples: int = 0, blocks: Sequence[Block] = ()
    ) -> None:
        """Fetch what the job needs, in a thread; `tick` starts it then.

        Args:
            order: what to run.
            beats: number of beats of the lease so far, where this agent was started again.
            ran_s: time that the job ran before [s].
            samples: how far it was by its last beat [samples].
            blocks: what was committed before.
        """
        self._beat_index, self._ran_before_s, self._committed_ran_s = beats, ran_s, int(ran_s)
        self._beaten_s = int(ran_s)
        self._samples = samples
        self._take_over(blocks, order)

        def prepare() -> None:
            try:
                self._box = self.box_type.make(self._folder, order, self._fetch, self._sent)
                if order.resume and not (self._box.run / "run.json").exists():
                    self._resume(order)
                self._blobs.clear()
                self._is_prepared = True
            except StokerError as problem:
                self._problem = problem
            except OSError as problem:
                self._problem = PlaceFailed(f"the job cannot be prepared here: {problem!r}")
            except Exception as problem:  # noqa: BLE001 - whatever a stranger sends does not end the agent
                self._problem = BadRun(f"the job cannot be prepared: {problem!r}")
            if self._is_ending.is_set():  # `_finish` may not have waited for it
                remove_tree(self._folder)
            self.news()

        self._preparing = threading.Thread(target=prepare, name="stoker-prepare", daemon=True)
        self._preparing.start()

    def _fetch(self, sha256: str, *, seal: str = "") -> Path:
        """Fetch a blob, again and again where the pool is away for a while."""
        for _ in range(_FETCH_TRIES):
            try:
                return self._blobs.fetch(sha256, seal=seal)
            except StokerError as problem:
                if not is_passing(problem) or self._is_ending.is_set():
                    raise
                self._tell(f"{self.lease_id}: fetched again in a while: {problem.message}")
            self._is_ending.wait(_RETRY_S)
        return self._blobs.fetch(sha256, seal=seal)

    def _take_over(self, blocks: Sequence[Block], order: PoolOrder) -> None:
        self._num_blocks = len(blocks)
        self._previous = blocks[-1].state if blocks else ""
        self._update = blocks[-1].update if blocks else order.resume_update

    def _resume(self, order: PoolOrder) -> None:
        """Put the block that the order goes on from into the run's directory."""
        run, aside = self._made_box.run, self._folder / "resume"
        shutil.rmtree(aside, ignore_errors=True)
        unpack(self._fetch(order.resume, seal=order.resume_seal), aside, self._taken)
        remove_tree(run)
        aside.rename(run)

    def _start(self) -> None:
        program = self._made_box.training(self._host)
        self._process = self._host.isolation.start(program, most_output_bytes=_MOST_OUTPUT_BYTES)
        self._began, self._ended_s = time.monotonic(), None
        self._tell(f"{self.lease_id}: {self.order.run} runs in {self._host.isolation.name}")

    # ------------------------------------------------------------------------------------------------------ what is due

    def tick(self) -> None:
        """Do what is due now; an answer that does not come is waited for until the next tick."""
        if self.is_over:
            return
        try:
            try:
                self._do_what_is_due()
            except (PlaceUnreachable, on.Refused):
                raise
            except StokerError as problem:  # what the job left cannot be sent, or cannot be started again
                self._close(_reason(problem))
            except Exception as problem:  # noqa: BLE001 - whatever the job left does not end the agent
                if isinstance(problem, OSError) and is_owners(problem):
                    self._close(f"refused: this machine fails: {problem}")
                else:
                    self._close(f"failed: its files cannot be used: {problem!r}")
        except PlaceUnreachable as problem:
            self._tell(f"{self.lease_id}: the pool does not answer, the job goes on: {problem.message}")
        except on.Refused as refused:
            self._tell(f"{self.lease_id}: {refused.message}")
            if not is_passing(refused):
                self._reconcile()
        except StokerError as problem:  # such as a pool without its signature
            self._tell(f"{self.lease_id}: {problem.message}")

    def _do_what_is_due(self) -> None:
        if self._problem is not None:
            self._close(_reason(self._problem))
            return
        if self._process is None and self._leaving:
            self._close(self._leaving)
            return
        if self._process is None and self._is_prepared and self._is_gang_here():
            self._start()  # here, since a child of a thread would end with the thread
        if self._carrier is not None and self._carrier.problem is not None:
            self._close(_reason(self._carrier.problem))
            return
        if self._notice is not None:
            self._client.post(self._notice)
            self._notice = None
        if time.monotonic() >= self._next_beat:
            self._post_beat()
        if self._process is None:
            return
        has_ended = self._process.poll() is not None
        if problem := self._unpaid():
            self._close(problem)
            return
        if has_ended and self._ended_s is None:
            self._ended_s = time.monotonic()
        if self._sends_blocks(is_last=has_ended) and has_ended:
            self._conclude()

    def _is_gang_here(self) -> bool:
        """Whether the agents of all sites have accepted, so that messages are carried; a single lease has no others."""
        order, box = self.order, self._made_box
        if not order.sites or self._carrier is not None:
            return True
        if time.monotonic() < self._looks_at:
            return False
        self._looks_at = time.monotonic() + _LOOK_S
        if not self._client.lease(self.lease_id).is_gang_begun:
            return False
        box.message_names()  # made before the job starts, whose user it will belong to
        messages = BlobCache(
            self._client,
            self._folder / "messages",
            self._host.limits.disk_bytes + INDEX_BYTES,
            patience_s=BEAT_S,  # then the site's own messages are looked after
            is_over=self._is_ending,
        )
        self._carrier = MessageCarrier(
            self.lease_id,
            order.site,
            box,
            self._client,
            messages.fetch,
            self._tell,
            most_bytes=self._host.limits.disk_bytes + INDEX_BYTES,
        )
        self._carrier.start()
        return True

    def reclaim(self, notice_s: float, why: str) -> None:
        """The owner needs the device: give notice, let the run save and leave within it."""
        if self._leaving or self.is_over:
            return
        self._leaving = f"reclaimed: {why}"
        self._notice = on.Reclaiming(lease_id=self.lease_id, by_s=time.time() + notice_s)
        try:
            self._client.post(self._notice)
            self._notice = None
        except PlaceUnreachable as problem:
            self._tell(f"{self.lease_id}: the notice is given once the pool answers: {problem.message}")
        except StokerError as problem:
            self._notice = None
            self._tell(f"{self.lease_id}: the pool does not take the notice: {problem.message}")
        self._tell(f"{self.lease_id}: {why}; the job saves and leaves within {notice_s:.0f} s")
        if self._box is not None:
            with contextlib.suppress(OSError, BadRun):
                self._box.write_word("stop")
        timer = threading.Timer(notice_s, self._kill_unless_over)
        timer.daemon = True
        timer.start()

    def end(self, why: str) -> None:
        """The lease is over for the pool: nothing of the job is left here."""
        self._tell(f"{self.lease_id}: {why}")
        self._finish()

    def kill(self) -> None:
        """End the job now."""
        if self._process is not None:
            self._process.kill()

    def _kill_unless_over(self) -> None:
        if not self.is_over:
            self.kill()

    @property
    def running_s(self) -> int:
        """Whole seconds in which the job has run."""
        if self._process is None:
            return int(self._ran_before_s)
        until = time.monotonic() if self._ended_s is None else self._ended_s
        return int(self._ran_before_s + until - self._began)

    @property
    def cpu_s(self) -> float:
        """CPU time that the job has taken [s]."""
        return 0.0 if self._process is None else self._process.cpu_s

    @property
    def pids(self) -> set[int]:
        """The job's processes, by their numbers on this machine."""
        return set() if self._process is None else self._process.pids

    def _post_beat(self) -> None:
        """Say how long the job has run."""
        now = time.monotonic()
        self._next_beat = now + min(self._beat_s, _BEAT_AGAIN_S)
        state = self._host_state()
        self._samples = max(self._samples, 0 if state is None else state.samples)
        running_s = self.running_s
        beat = on.Beat(
            lease_id=self.lease_id,
            index=self._beat_index,
            running_s=running_s,
            samples=self._samples,
            state=self._previous,
        )
        try:
            self._client.post(beat, answer_s=BEAT_S)  # a line that hangs costs one beat
        except StokerError as problem:
            if is_passing(problem) and self._away_from_s is None:
                self._away_from_s = self._beaten_s
            raise
        if self._away_from_s is not None:
            self._away_s, self._away_from_s = self._away_s + running_s - self._away_from_s, None
        self._beat_index, self._beaten_s = self._beat_index + 1, running_s
        self._next_beat = now + self._beat_s

    def _unpaid(self) -> str:
        """Why the job is not worked on any longer, as words: it saves nothing that could be committed, and is not paid.

        What is on its way, or could not be sent, is waited for; so is a job whose blocks were long so far. Time in
        which the pool did not answer counts neither against the job nor against other sites.
        """
        if self._away_from_s is not None:
            return ""
        block_s = self._committed_ran_s / max(1, self._num_blocks)
        unpaid_s = self.running_s - self._committed_ran_s - self._away_s
        if not self._is_checked or unpaid_s <= MOST_UNPAID * max(MOST_BLOCK_S, block_s):
            return ""
        if self._upload is not None:
            return ""
        if self._carrier is not None and self._carrier.waited_s > unpaid_s / 2:
            return f"{WAITED} for {format_seconds(self._carrier.waited_s)}"
        if self._kept is not None or self._sends_from:
            return ""
        return f"{SAVES_NOTHING} for {format_seconds(unpaid_s)}"

    def _sends_blocks(self, *, is_last: bool) -> bool:
        """Send and commit checkpoints, as they are due; whether none is on its way."""
        upload = self._upload
        if upload is not None and upload.what == "block":
            if not upload.is_over:
                return False
            self._upload = None
            if isinstance(upload.problem, BadRun):  # it was removed while it was read, or is being changed
                if is_last:
                    self._tell(f"{self.lease_id}: a checkpoint cannot be committed: {upload.problem.message}")
                    self._seen = upload.place
            elif upload.problem is not None:
                self._sends_from = time.monotonic() + self._beat_s
                if isinstance(upload.problem, on.Refused):
                    self._note(upload.problem, upload.place)
                raise upload.problem
            else:
                assert upload.place is not None
                self._kept, self._sends_from = (upload.place, upload.made), 0.0
        if self._kept is not None:
            if time.monotonic() < self._sends_from:
                return False
            self._commit(*self._kept)
        if self._upload is None and (due := self._due(is_last=is_last)) is not None:
            if time.monotonic() < self._sends_from:
                return False
            place, name = due
            number, head = self._num_blocks, self._previous or self.order.resume_head
            self._upload = _Upload("block", lambda: self._keep(name, number, head), self.news, place)
            return False
        return True

    def _due(self, *, is_last: bool) -> tuple[tuple[int, int], str] | None:
        """Place and name of the newest checkpoint, if it is a new one and a block's time has passed."""
        if not is_last and time.monotonic() - self._committed_at < max(0.5 * self.order.block_s, _LEAST_BLOCK_S):
            return None
        try:
            names = CheckpointStore(self._made_box.run / "checkpoints").names()
        except StokerError:
            return None
        known = [(place, name) for name in names if (place := order_of_name(name)) is not None]
        return max(known) if known and max(known)[0] != self._seen else None

    def _commit(self, place: tuple[int, int], block: Block) -> None:
        """Post a commitment; where the pool does not answer, it is posted at the next tick."""
        if block.update > self._update:
            if self._is_checked and self.running_s > self._beaten_s:  # a commitment is paid up to the beat before it
                self._post_beat()
            try:
                self._client.post(
                    on.Committed(
                        lease_id=self.lease_id,
                        block=block.block,
                        update=block.update,
                        state=block.state,
                        blob=block.blob,
                        previous=self._previous,
                        seal=block.seal,
                    )
                )
            except on.Refused as refused:
                if is_passing(refused):  # such as until others have sent their messages; each try has a beat before it
                    self._sends_from = time.monotonic() + self._beat_s
                self._note(refused, place)
                raise
            self._num_blocks, self._previous, self._update = block.block + 1, block.state, block.update
            self._committed_at, self._committed_ran_s, self._away_s = time.monotonic(), self.running_s, 0
        self._seen, self._kept, self._sends_from = place, None, 0.0

    def _note(self, refused: on.Refused, place: tuple[int, int] | None) -> None:
        """After a refusal a checkpoint is tried once more, when what the log says has been taken over."""
        if not is_passing(refused):
            self._seen = place if self._refused == place else self._seen
            self._kept, self._refused = None, place

    def _keep(self, name: str, number: int, head: str) -> Block:
        """Store a checkpoint as the block `number`, after `head`; sealed, where its renter may get it first."""
        return keep_block(
            self._made_box.run,
            name,
            number,
            head,
            put=self._blobs.put,
            limits=self._taken,
            aside=self._made_box.aside,
            is_sealed=self._client.peer is not None,
        )

    def _conclude(self) -> None:
        """The job has ended: results, or the reason."""
        assert self._process is not None
        state, code = self._host_state(), self._process.poll()
        if self._process.exceeded.startswith(HOST_FULL):
            self._close(f"refused: {self._process.exceeded}")
        elif self._process.exceeded:
            self._close(f"failed: {self._process.exceeded}")
        elif state is not None and state.phase == "finished":
            if self._is_checked and not self._previous and not self.order.resume:
                self._close("failed: it ended without a checkpoint that could be committed")
                return
            if self._carrier is None or self._carrier.has_sent:  # the others wait for its last message
                self._send_results()
        elif self._leaving:
            self._close(self._leaving)
        elif state is not None and state.phase == "failed":
            self._close(f"failed: {state.why}: {state.evidence}")
        elif self._tries < _MOST_TRIES:
            self._tries += 1
            self._ran_before_s = self.running_s
            self._tell(f"{self.lease_id}: the job ended with exit code {code} and is started again")
            self._start()
        else:
            self._close(f"failed: it ended {self._tries} times with exit code {code}: {self._last_output()}")

    def _send_results(self) -> None:
        upload = self._upload
        if upload is None and not self._result and time.monotonic() >= self._sends_from:
            self._upload = _Upload("results", self._results, self.news)
        elif upload is not None and upload.is_over:
            self._upload, problem = None, upload.problem
            if isinstance(problem, on.Refused) and not is_passing(problem):
                raise BadRun(f"the pool does not take the results: {problem.message}")
            if problem is not None:
                self._sends_from = time.monotonic() + self._beat_s
                raise problem
            self._result = upload.made
        if self._result:
            self._client.post(on.Finished(lease_id=self.lease_id, result=self._result))
            self._tell(f"{self.lease_id}: finished")
            self._finish()

    def _results(self) -> str:
        """Store the run's directory, as it goes home; the blob."""
        run, copy = self._made_box.run, self._made_box.aside / "results"
        names = [name for name in plain_names(run) if name.split("/")[0] not in _NOT_HOME]
        try:
            pack_folder(run, names, copy, self._taken)
            return self._blobs.put(copy)
        finally:
            copy.unlink(missing_ok=True)

    def _close(self, reason: str) -> None:
        reason = printable(reason)[:900]
        self._client.post(on.Closed(lease_id=self.lease_id, reason=reason))
        self._tell(f"{self.lease_id}: {reason}")
        self._finish()

    def _finish(self) -> None:
        self.is_over = True
        self._is_ending.set()
        if self._carrier is not None:
            self._carrier.close()
        self.kill()
        if self._process is not None:
            with contextlib.suppress(TimeoutError):
                self._process.wait(30)
        for thread in (self._preparing, self._upload, self._carrier):
            if thread is not None:
                thread.join(_ENDS_S)
        remove_tree(self._folder)

    def _reconcile(self) -> None:
        """After a refusal: take over what the log says of this lease."""
        try:
            lease = self._client.lease(self.lease_id)
        except StokerError:
            return
        if lease.state not in METERED:
            self.end(f"the lease is {lease.state}: {lease.reason}")
            return
        self._beat_index = lease.beat_index + 1
        self._samples = max(self._samples, lease.samples)
        self._num_blocks, self._previous = len(lease.commitments), ""
        if lease.commitments:
            self._previous, self._update = lease.commitments[-1].state, lease.commitments[-1].update

    def _host_state(self) -> HostState | None:
        """What the run says of itself; None where it says nothing that can be read."""
        if self._box is None:
            return None
        with contextlib.suppress(StokerError, ValueError):
            content = read_below(self._box.run, "launch/host-0.json", MOST_STATE_BYTES)
            state = None if content is None else loads(content, HostState)
            return state if state is None or 0 <= state.samples < 1 << 53 else replace(state, samples=0)
        return None

    def _last_output(self) -> str:
        lines = b"" if self._process is None else self._process.stderr.strip()
        return lines.decode(errors="replace").rpartition("\n")[2]


def _reason(problem: StokerError) -> str:
    """Why a lease ends: what is wrong with this machine does not end the run elsewhere."""
    is_here = isinstance(problem, PlaceFailed | on.Refused)
    return f"{'refused' if is_here else 'failed'}: {problem.message}"

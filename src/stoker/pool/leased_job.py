"""A lease on the side of the agent: the job in its box, its beats, its commitments, its results.

What: `LeasedJob.tick` is called a few times a second and does what is due. The job runs on whatever the control plane
does: where that does not answer, beats are missed, and what was not committed is committed later. Nothing of the box is
believed: what comes out of it is read without following links, within limits, and as JSON or safetensors alone.

A job that ends is `finished` with its results; or `closed` with a reason: `reclaimed: …` and `lost: …` may go on at
another agent, `failed: …` would fail there as well, `refused: …` never began.
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

from stoker.errors import BadRun, PlaceFailed, PlaceUnreachable, StokerError
from stoker.launching.at_place import HostState
from stoker.pool import events as on
from stoker.pool.blob_tree import TreeLimits, pack_folder, plain_names, unpack
from stoker.pool.client import PoolClient
from stoker.pool.commitment import Block, keep_block
from stoker.pool.isolation import Host, IsolatedProcess
from stoker.pool.job_box import JobBox, PoolOrder, read_order
from stoker.records.codec import loads
from stoker.store import CheckpointStore
from stoker.store.checkpoint_store import order_of_name
from stoker.store.foreign_files import read_below

MOST_STATE_BYTES = 1 << 20
_NOT_HOME = frozenset({"launch", "lock", "lock.held", "lock.taking", "started.json", "launch.json"})
_MOST_TRIES = 5


class BlobCache:
    """Blobs of a pool, fetched into a folder when they are first read."""

    def __init__(self, client: PoolClient, folder: Path) -> None:
        self._client, self._folder = client, folder

    def put(self, content: bytes | Path) -> str:
        """Send a blob, unless the pool has it; its SHA-256."""
        return self._client.put_blob(content)

    def aside(self) -> Path:
        """A file for what is made before it is sent."""
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder / f"sending-{os.getpid()}"

    def fetch(self, sha256: str) -> Path:
        """The file with a blob."""
        path = self._folder / sha256
        if not path.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            self._client.get_blob(sha256, path)
        return path

    def whole(self, sha256: str, most_bytes: int) -> bytes:
        """A small blob.

        Raises:
            BadRun: it is larger.
        """
        path = self.fetch(sha256)
        if path.stat().st_size > most_bytes:
            raise BadRun(f"the blob {sha256[:12]} has more than {most_bytes:,} bytes")
        return path.read_bytes()

    def clear(self) -> None:
        """Remove what was fetched."""
        shutil.rmtree(self._folder, ignore_errors=True)


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

    Attributes:
        is_over: nothing is left to do for the lease.
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
    ) -> None:
        self.lease_id, self.is_over = lease_id, False
        self._order_digest, self._folder, self._client = order_digest, folder, client
        self._host = host
        self._beat_s, self._tell = beat_s, tell
        self._blobs = BlobCache(client, folder / "blobs")
        self._taken = TreeLimits(num_bytes=host.limits.disk_bytes)
        self._sent = TreeLimits(num_bytes=host.limits.disk_bytes, has_links=True)
        self._box: JobBox | None = None
        self._process: IsolatedProcess | None = None
        self._preparing: threading.Thread | None = None
        self._problem: StokerError | None = None
        self._is_prepared = False
        self._began = self._ran_before_s = 0.0
        self._next_beat, self._beat_index, self._samples = 0.0, 0, 0
        self._num_blocks, self._previous, self._update, self._committed_at = 0, "", 0, 0.0
        self._seen: tuple[int, int] | None = None
        self._leaving = ""
        self._tries = 0

    @property
    def order(self) -> PoolOrder:
        """What it runs, once it was read."""
        assert self._box is not None
        return self._box.order

    def read_order(self) -> PoolOrder:
        """Fetch the order.

        Raises:
            BadJob: it is none.
        """
        return read_order(self._blobs.whole(self._order_digest, 4 << 20))

    def begin(self, order: PoolOrder, *, beats: int = 0, ran_s: float = 0.0, blocks: Sequence[Block] = ()) -> None:
        """Fetch what the job needs, in a thread; `tick` starts it then.

        Args:
            order: what to run.
            beats: number of beats of the lease so far, where this agent was started again.
            ran_s: time that the job ran before [s].
            blocks: what was committed before.
        """
        self._beat_index, self._ran_before_s = beats, ran_s
        self._take_over(blocks, order)

        def prepare() -> None:
            try:
                self._box = self.box_type.make(self._folder, order, self._blobs.fetch, self._sent)
                if order.resume and not (self._box.run / "run.json").exists():
                    self._resume(order)
                self._blobs.clear()
                self._is_prepared = True
            except StokerError as problem:
                self._problem = problem
            except OSError as problem:
                self._problem = PlaceFailed(f"the job cannot be prepared here: {problem}")

        self._preparing = threading.Thread(target=prepare, name="stoker-prepare", daemon=True)
        self._preparing.start()

    def _take_over(self, blocks: Sequence[Block], order: PoolOrder) -> None:
        self._num_blocks = len(blocks)
        self._previous = blocks[-1].state if blocks else ""
        self._update = blocks[-1].update if blocks else order.resume_update

    def _resume(self, order: PoolOrder) -> None:
        """Put the block that the order goes on from into the run's directory."""
        assert self._box is not None
        run, aside = self._box.run, self._folder / "resume"
        shutil.rmtree(aside, ignore_errors=True)
        unpack(self._blobs.fetch(order.resume), aside, self._taken)
        shutil.rmtree(run, ignore_errors=True)
        aside.rename(run)

    def _start(self) -> None:
        assert self._box is not None
        program = self._box.training(self._host)
        with (self._folder / "output.log").open("ab") as output:
            self._process = self._host.isolation.start(program, stderr=output)
        self._began = time.monotonic()
        self._tell(f"{self.lease_id}: {self.order.run} runs in {self._host.isolation.name}")

    # ------------------------------------------------------------------------------------------------------ what is due

    def tick(self) -> None:
        """Do what is due now; an answer that does not come is waited for until the next tick."""
        if self.is_over:
            return
        try:
            if self._problem is not None:
                self._close(f"failed: {self._problem.message}")
                return
            if self._process is None and self._is_prepared:
                self._start()  # here, since a child of a thread would end with the thread
            if self._process is None:
                self._beat()
                return
            has_ended = self._process.poll() is not None
            self._commit_newest(is_last=has_ended)
            if has_ended:
                self._conclude()
            else:
                self._beat()
        except PlaceUnreachable as problem:
            self._tell(f"{self.lease_id}: the pool does not answer, the job goes on: {problem.message}")
        except on.Refused as refused:
            self._tell(f"{self.lease_id}: {refused.message}")
            self._reconcile()
        except StokerError as problem:  # what the job left cannot be sent, or cannot be started again
            with contextlib.suppress(PlaceUnreachable):
                self._close(f"failed: {problem.message}")

    def reclaim(self, notice_s: float, why: str) -> None:
        """The owner needs the device: give notice, let the run save and leave within it."""
        if self._leaving or self.is_over:
            return
        self._leaving = f"reclaimed: {why}"
        with contextlib.suppress(StokerError):
            self._client.post(on.Reclaiming(lease_id=self.lease_id, by_s=time.time() + notice_s))
        self._tell(f"{self.lease_id}: {why}; the job saves and leaves within {notice_s:.0f} s")
        if self._box is not None:
            with contextlib.suppress(OSError, PlaceFailed):
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
        return int(self._ran_before_s + time.monotonic() - self._began)

    @property
    def cpu_s(self) -> float:
        """CPU time that the job has taken [s]."""
        return 0.0 if self._process is None else self._process.cpu_s

    def _beat(self) -> None:
        now = time.monotonic()
        if now < self._next_beat:
            return
        self._next_beat = now + self._beat_s
        state = self._host_state()
        self._samples = max(self._samples, 0 if state is None else state.samples)
        self._client.post(on.Beat(lease_id=self.lease_id, index=self._beat_index, running_s=self.running_s,
                                  samples=self._samples, state=self._previous))  # fmt: skip
        self._beat_index += 1

    def _commit_newest(self, *, is_last: bool) -> None:
        """Commit to the newest checkpoint, if it is a new one and a block's time has passed."""
        assert self._box is not None
        is_early = time.monotonic() - self._committed_at < 0.5 * self.order.block_s
        if is_early and not is_last:
            return
        try:
            names = CheckpointStore(self._box.run / "checkpoints").names()
        except StokerError:
            return
        known = [(place, name) for name in names if (place := order_of_name(name)) is not None]
        if not known or max(known)[0] == self._seen:
            return
        place, name = max(known)
        try:
            block = self._keep(name)
        except BadRun as problem:  # it was removed while it was read, or is being changed
            if is_last:
                self._tell(f"{self.lease_id}: the last checkpoint cannot be committed: {problem.message}")
                self._seen = place
            return
        self._seen = place
        if block.update <= self._update:
            return
        self._client.post(on.Committed(lease_id=self.lease_id, block=block.block, update=block.update,
                                       state=block.state, blob=block.blob, previous=self._previous))  # fmt: skip
        self._num_blocks, self._previous, self._update = block.block + 1, block.state, block.update
        self._committed_at = time.monotonic()

    def _keep(self, name: str) -> Block:
        """Store a checkpoint as the next block."""
        assert self._box is not None
        head = self._previous or self.order.resume_head
        return keep_block(self._box.run, name, self._num_blocks, head, put=self._blobs.put, limits=self._taken,
                          aside=self._box.aside)  # fmt: skip

    def _conclude(self) -> None:
        """The job has ended: results, or the reason."""
        assert self._process is not None
        state, code = self._host_state(), self._process.poll()
        if self._process.exceeded:
            self._close(f"failed: {self._process.exceeded}")
        elif state is not None and state.phase == "finished":
            self._client.post(on.Finished(lease_id=self.lease_id, result=self._results()))
            self._tell(f"{self.lease_id}: finished")
            self._finish()
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

    def _results(self) -> str:
        """Store the run's directory, as it goes home; the blob."""
        assert self._box is not None
        run = self._box.run
        names = [name for name in plain_names(run) if name.split("/")[0] not in _NOT_HOME]
        copy = self._box.aside / "results"
        try:
            pack_folder(run, names, copy, self._taken)
            return self._blobs.put(copy)
        finally:
            copy.unlink(missing_ok=True)

    def _close(self, reason: str) -> None:
        self._client.post(on.Closed(lease_id=self.lease_id, reason=reason[:900]))
        self._tell(f"{self.lease_id}: {reason}")
        self._finish()

    def _finish(self) -> None:
        self.is_over = True
        self.kill()
        if self._preparing is not None:
            self._preparing.join()
            self.kill()
        if self._process is not None:
            with contextlib.suppress(TimeoutError):
                self._process.wait(30)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _reconcile(self) -> None:
        """After a refusal: take over what the log says of this lease."""
        try:
            lease = self._client.lease(self.lease_id)
        except StokerError:
            return
        if lease["state"] not in ("running", "suspect", "reclaiming"):
            self.end(f"the lease is {lease['state']}: {lease.get('reason', '')}")
            return
        self._beat_index = int(lease["beat_index"]) + 1
        commitments = lease["commitments"]
        self._num_blocks = len(commitments)
        self._previous = str(commitments[-1]["state"]) if commitments else ""
        if commitments:
            self._update = int(commitments[-1]["update"])

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
        with contextlib.suppress(OSError), (self._folder / "output.log").open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
            lines = file.read().decode(errors="replace").strip().splitlines()
            return lines[-1] if lines else ""
        return ""

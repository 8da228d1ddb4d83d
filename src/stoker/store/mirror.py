"""The mirror of a run: its records and checkpoints at a URL, sent in the background while it trains.

What: a thread sends what is new after each checkpoint: first the checkpoint's files and then its manifest, so that a
kill between parts leaves the one before; then records that changed, and the piece of the log that was added; then it
deletes what the run itself does not keep any more. Use when: the machine may go away (`--keep URL`).
Costs: the network, and a thread that mostly waits; figures in docs/training.md. Training never waits for it but at the
end, for a bounded time. An error is reported once, and sending is retried with growing pauses as long as the run lasts.
Does not do: two machines that train one run at once, since each would delete what the other keeps. The one that began
last is kept: `sender.json` there names it, and a mirror that is named no more sends nothing more.
"""

from __future__ import annotations

import json
import platform
import random
import re
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Self

from stoker.errors import BadRun, StokerError, first_line
from stoker.records import CheckpointManifest, Event, Run, loads
from stoker.store.checkpoint_store import BEST, MANIFEST, CheckpointStore, order_of_name
from stoker.store.remote_runs import LOG_PIECE, RECORDS, RemoteRuns, event_pieces
from stoker.store.run_directory import RunDirectory
from stoker.units import format_count, format_seconds

_WAKING = frozenset({"started", "checkpointed", "settled", "replanned", "stopped", "finished"})
"""Events after which there is something to send."""
_LOG_EVERY_S = 60.0
"""The log is sent at least as often, while it grows [s]."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 120.0
_MOST_PIECES = 64
"""From so many small pieces on, they are sent again as few large ones."""
_MOST_PIECE_BYTES = 1 << 26
"""A piece of the log is not larger [bytes]; one of half of it and more is large, and is not sent again."""
_COMPARED_BYTES = 1 << 16
"""The log here goes on from the one there if so much of its end there is the same here [bytes]."""
_SENDER = "sender.json"
"""Who sent the run last: machine and directory, a token, when it began and, after an orderly end, when it ended."""
_MOST_SENDER_CHARACTERS = 500
LEAST_WAIT_S = 60.0
"""The end of a run waits for the last upload for so long [s], or for four times the longest one if that is more."""


class _TakenOver(Exception):
    """Another process has begun to send the run since."""


def _utc_now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


@dataclass
class Mirror:
    """Sends a run to a URL, in a thread; as a context manager it begins, and at the end sends the rest.

    Args:
        directory: the run's, locked by this process.
        remote: where it is kept.
        warn: receives what went wrong, and what it means.
        note: receives what is good to know.
        most_s: the longest wait at the end now [s]; None: no other limit than the mirror's own.
    """

    directory: RunDirectory
    remote: RemoteRuns
    warn: Callable[[str], None]
    note: Callable[[str], None]
    most_s: Callable[[], float | None] = lambda: None
    sent_bytes: int = field(default=0, init=False)
    longest_s: float = field(default=0.0, init=False)
    """The longest upload of a checkpoint so far, of what had come together [s]."""
    kept_samples: int | None = field(default=None, init=False)
    """Position of the newest whole checkpoint there [samples]."""

    def __post_init__(self) -> None:
        self._name = self.directory.name
        self._wake, self._closing, self._done = threading.Event(), threading.Event(), threading.Event()
        self._there: dict[str, int] = {}
        self._whole: set[str] = set()
        self._sent: dict[str, tuple[int, int]] = {}
        self._is_log_known = False
        self._taken_over = ""
        self._followed = ""
        """The token of the process that this one takes over from: what it still writes does not count."""
        where = f"{platform.node()}:{self.directory.path.resolve()}"
        self._sender = {"who": where, "began_at": _utc_now(), "token": uuid.uuid4().hex}
        self._thread = threading.Thread(target=self._work, name="stoker-mirror", daemon=True)

    def __call__(self, event: Event) -> None:
        """Take in an event of the run; returns at once."""
        if event.kind in _WAKING:
            self._wake.set()

    def __enter__(self) -> Self:
        """Look at what is there, and begin.

        Raises:
            BadRun: another job's run of this name is there, or it cannot be read.
        """
        try:
            self._there = self.remote.files(self._name)
            theirs = loads(self.remote.read(self._name, "run.json"), Run) if "run.json" in self._there else None
            before = self._sender_there()
        except Exception as problem:
            raise BadRun(
                f"{self.remote.url}/{self._name} cannot be read: {type(problem).__name__}: {first_line(problem)}",
                remedy="The same command tries again.",
            ) from problem
        if theirs is not None and theirs.spec_digest != self.directory.read_run().spec_digest:
            raise BadRun(
                f"{self.remote.url} has a run {self._name} of another job, which is not replaced.",
                remedy="Choose another --run-dir, or another --keep.",
            )
        self._followed = before.get("token", "")
        try:
            self._sender_changes(self._sender)
        except Exception as problem:
            raise BadRun(
                f"{self.remote.url}/{self._name} cannot be written: {type(problem).__name__}: {first_line(problem)}",
                remedy="The same command tries again.",
            ) from problem
        if before and "ended_at" not in before and before["who"] != self._sender["who"]:
            self.note(
                f"{before['who']} sent {self._name} to {self.remote.url} from {before['began_at']} on, and did not say "
                "that it ended: if it still trains, what it does from now on is not kept there"
            )
        self._thread.start()
        return self

    def _sender_there(self) -> dict[str, str]:
        """Who sends the run, as it is noted there; empty if it is not noted, or cannot be read."""
        try:
            sender = json.loads(self.remote.read(self._name, _SENDER))
        except (FileNotFoundError, ValueError):
            return {}
        texts = list(sender.values()) if isinstance(sender, dict) and sender.keys() >= self._sender.keys() else [None]
        is_usable = all(isinstance(t, str) and t.isprintable() and len(t) < _MOST_SENDER_CHARACTERS for t in texts)
        return sender if is_usable else {}

    def _sender_changes(self, sender: dict[str, str]) -> None:
        """Note who sends the run."""
        self.remote.put(self._name, _SENDER, json.dumps(sender).encode())

    def _require_sender(self) -> None:
        """Raise `_TakenOver` if another process has begun to send the run since this one did.

        What is not noted was deleted, as with a bucket that was made again. The note of the process before this one is
        an older one, of a store that answers late, or that of its end, which it wrote while this one began.
        """
        sender = self._sender_there()
        if not sender or sender["token"] == self._followed:
            self._sender_changes(self._sender)
        elif sender["token"] != self._sender["token"]:
            self._taken_over = f"{sender['who']}, which began at {sender['began_at']}"
            raise _TakenOver

    def __exit__(self, *_: object) -> None:
        """Send the rest, for a bounded time; the run itself is safe on the disk here."""
        self._closing.set()
        self._wake.set()
        wait_s = max(LEAST_WAIT_S, 4 * self.longest_s)
        if (limit := self.most_s()) is not None:
            wait_s = max(1.0, min(wait_s, limit))
        if not self._done.wait(min(2.0, wait_s)):
            self.note(f"waiting for the last upload to {self.remote.url}, {format_seconds(wait_s)} at most")
            self._done.wait(wait_s - 2.0)
        kept = (
            "nothing" if self.kept_samples is None else f"the checkpoint at {format_count(self.kept_samples)} samples"
        )
        if not self._done.is_set():
            self.warn(
                f"{self.remote.url} did not take all of {self._name} in {format_seconds(wait_s)}: it last took {kept}; "
                f"the rest is in {self.directory.path}, and the same command with --keep sends it"
            )

    def _work(self) -> None:
        """Send what is new, in a loop; an error is reported once, and sending retried after a pause."""
        pause_s, failures = _LOG_EVERY_S, 0
        jitter = random.Random()  # the global generator is the run's: this thread may not draw from it
        while True:
            self._wake.wait(pause_s)
            self._wake.clear()  # first: a close that comes now wakes the next round
            is_last = self._closing.is_set()
            try:
                self._send()
                if is_last:
                    self._require_sender()  # an upload may have taken minutes
                    self._sender_changes(self._sender | {"ended_at": _utc_now()})
            except _TakenOver:
                self._say(
                    self.warn,
                    f"{self._name} is sent to {self.remote.url} by {self._taken_over}: from here nothing more is. "
                    "Training goes on, in two places; stop one of them",
                )
                self._done.set()
                return
            except Exception as problem:  # noqa: BLE001 - whatever a store does, the run goes on
                failures += 1
                self._there, self._whole, self._is_log_known = {}, set(), False
                if failures == 1:
                    self._say(
                        self.warn,
                        f"{self.remote.url} does not take the run: {type(problem).__name__}: "
                        f"{first_line(problem)}. Training goes on, and sending is tried again",
                    )
                pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (failures - 1)) * jitter.uniform(0.5, 1.0)
                pause_s = min(pause_s, 5.0) if is_last else pause_s
                if is_last:
                    time.sleep(pause_s)
                else:
                    self._closing.wait(pause_s)
                self._wake.set()
                continue
            if failures:
                self._say(self.note, f"{self.remote.url} takes the run again, after {failures} failed attempts")
            pause_s, failures = _LOG_EVERY_S, 0
            if is_last:
                self._done.set()
                return

    def _say(self, tell: Callable[[str], None], text: str) -> None:
        with suppress(StokerError):  # the log cannot be written: training says so
            tell(text)

    def _send(self) -> None:
        """Send what is new, and delete what the run does not keep."""
        self._require_sender()
        if not self._there:
            self._there = self.remote.files(self._name)
        store = CheckpointStore(self.directory.checkpoints)
        names = store.names()  # before the records: a checkpoint goes on under the plans in them
        for pattern in RECORDS:
            for path in sorted(self.directory.path.glob(pattern)):
                self._send_changed(path, path.relative_to(self.directory.path).as_posix())
        self._send_log()
        for name in reversed(names):
            self._send_checkpoint(store, name)
        self._send_changed(self.directory.checkpoints / BEST, f"checkpoints/{BEST}")
        self._delete_old(set(store.names()))

    def _send_changed(self, path: Path, file: str) -> None:
        """Send a record whose size or time of change differs from what was sent; kept weights are never changed."""
        try:
            status = path.stat()
        except FileNotFoundError:
            return
        stamp = status.st_size, status.st_mtime_ns
        if self._sent.get(file) == stamp or (file.startswith("weights/") and self._there.get(file) == status.st_size):
            return
        self._put(file, path, status.st_size)
        self._sent[file] = stamp

    def _send_log(self) -> None:
        """Send the whole lines that were added to the log, in pieces; of many small pieces make large ones."""
        pieces, sent = event_pieces(self._there), []
        try:
            with self.directory.events_path.open("rb") as log:
                kept = pieces
                if pieces and not self._is_log_known:  # by another process: is this log its continuation?
                    last, offset, size = pieces[-1]
                    start = max(0, size - _COMPARED_BYTES)
                    log.seek(offset + start)
                    if log.read(size - start) != b"".join(self.remote.blocks(self._name, last, start, size)):
                        kept = []
                large = list(takewhile(lambda piece: piece[2] >= _MOST_PIECE_BYTES // 2, kept))
                if len(kept) - len(large) >= _MOST_PIECES:
                    kept = large
                end = kept[-1][1] + kept[-1][2] if kept else 0
                log.seek(end)
                while content := log.read(_MOST_PIECE_BYTES):
                    num_bytes = content.rfind(b"\n") + 1
                    if not num_bytes and len(content) < _MOST_PIECE_BYTES:
                        break
                    content = content[: num_bytes or len(content)]
                    sent.append(f"events/{end:015d}.jsonl")
                    self._put(sent[-1], content, len(content))
                    end += len(content)
                    log.seek(end)
        except FileNotFoundError:
            return
        self._is_log_known = True
        if sent and kept != pieces:
            known = {*(file for file, _, _ in kept), *sent}
            self._remove([file for file in self._there if LOG_PIECE.fullmatch(file) and file not in known])

    def _send_checkpoint(self, store: CheckpointStore, name: str) -> None:
        """Send a checkpoint that is not complete there; one that is removed here during the copy is left out."""
        if name in self._whole:
            return
        started, folder = time.monotonic(), f"checkpoints/{name}"
        try:
            path, manifest = store.named(name)
            text = (path / MANIFEST).read_bytes()
            if not self._is_there(folder, manifest, text):
                self._require_sender()  # another process may send one of the same name
                self._remove([file for file in self._there if file == f"{folder}/{MANIFEST}"])
                for entry in manifest.files:
                    self._put(f"{folder}/{entry.name}", path / entry.name, entry.num_bytes)
                self._require_sender()
                self._put(f"{folder}/{MANIFEST}", text, len(text))
                self.longest_s = max(self.longest_s, time.monotonic() - started)
        except (BadRun, FileNotFoundError):
            if name in store.names():
                raise
            return
        self._whole.add(name)
        self.kept_samples = max(self.kept_samples or 0, manifest.position.samples)

    def _is_there(self, folder: str, manifest: CheckpointManifest, text: bytes) -> bool:
        sizes = {f"{folder}/{entry.name}": entry.num_bytes for entry in manifest.files} | {
            f"{folder}/{MANIFEST}": len(text)
        }
        if any(self._there.get(file) != size for file, size in sizes.items()):
            return False
        return self.remote.read(self._name, f"{folder}/{MANIFEST}") == text

    def _delete_old(self, kept: set[str]) -> None:
        """Delete checkpoints that the run does not keep, their manifests first; never the last one that is whole."""
        if not kept & self._whole:
            return
        folders: dict[str, list[str]] = {}
        for file in self._there:
            match = re.fullmatch(r"checkpoints/([^/]+)/.+", file)
            if match and match[1] not in kept and order_of_name(match[1]) is not None:
                folders.setdefault(match[1], []).append(file)
        if folders:
            self._require_sender()
        for name, files in folders.items():
            self._remove(sorted(files, key=lambda file: not file.endswith(f"/{MANIFEST}")))
            self._whole.discard(name)

    def _put(self, file: str, source: Path | bytes, num_bytes: int) -> None:
        self.remote.put(self._name, file, source)
        self._there[file] = num_bytes
        self.sent_bytes += num_bytes

    def _remove(self, files: list[str]) -> None:
        self.remote.delete(self._name, files)
        for file in files:
            self._there.pop(file, None)

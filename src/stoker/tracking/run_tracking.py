"""Sending runs to trackers: while they train, in threads so that training never waits, or afterwards."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from stoker.errors import RunFailed, StokerError
from stoker.records import Event
from stoker.store import RunDirectory, find_run, runs_root
from stoker.tracking.base import TrackerTarget, parse_tracker
from stoker.tracking.upload import RunUpload


@dataclass(frozen=True)
class Sent:
    """The result of sending a run: the number of events sent, and where users find the run."""

    run: str
    tracker: str
    events: int
    where: str


@contextmanager
def tracked(
    directory: RunDirectory, targets: Sequence[TrackerTarget], tell: Callable[[str], None]
) -> Iterator[tuple[Callable[[Event], None], ...]]:
    """Sinks of events through which trackers follow a run; at the end of the block they have all of it."""
    if not targets:
        yield ()
        return
    following = BackgroundUploads([RunUpload(directory, target.word, target.open) for target in targets], tell)
    try:
        yield (following,)
    finally:
        following.close()


def track(run: str, to: str) -> Sent:
    """Send the part of a run that a tracker does not have yet; the run may be finished.

    Args:
        run: its name, the start of one, `latest`, or a path.
        to: a tracker: `tensorboard`, `mlflow=http://host:5000`, `wandb=project`, `trackio`, `csv`.

    Raises:
        BadJob: there is no such tracker, or its package is missing.
        BadRun: there is no such run, or it cannot be read.
        RunFailed: the tracker failed; the same call sends the rest.
    """
    target, directory = parse_tracker(to), find_run(runs_root(), run)
    upload = RunUpload(directory, target.word, target.open)
    try:
        events = upload.send()
        upload.close()
    except StokerError:
        raise
    except Exception as problem:
        raise RunFailed(
            f"{target.name} did not take the run: {type(problem).__name__}: {problem}",
            remedy="Nothing is lost; the same command sends what is left.",
        ) from problem
    return Sent(directory.name, target.name, events, upload.where or "")


PATIENCE_S = 15.0
"""How long the end of a run waits for a tracker [s]."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
"""Pause between two attempts at a failing tracker, doubled each time [s]."""


class BackgroundUploads:
    """A sink of events that wakes one thread for each tracker.

    A failing tracker is reported once, and tried again with growing pauses. What is not sent in the end stays in the
    run, and `stoker runs track` sends it.

    Args:
        uploads: the run, for each tracker.
        tell: receives messages about failing trackers in the training thread, at the next event or at the end.
        pause_s: least time between two uploads [s].
    """

    def __init__(self, uploads: Sequence[RunUpload], tell: Callable[[str], None], *, pause_s: float = 1.0) -> None:
        self._messages: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._uploaders = [_Uploader(upload, self._messages.put, pause_s) for upload in uploads]
        self._tell = tell

    def __call__(self, event: Event) -> None:
        """Wake the threads, since the log has a new event, and pass their messages on."""
        for uploader in self._uploaders:
            uploader.news.set()
        self._pass_on()

    def close(self, patience_s: float = PATIENCE_S) -> None:
        """Send the rest, as far as time allows [s for each tracker]."""
        for uploader in self._uploaders:
            uploader.end()
        for uploader in self._uploaders:
            uploader.thread.join(timeout=patience_s)
        if not all(uploader.upload.directory.is_run for uploader in self._uploaders):
            return  # the run failed before it kept anything: there is nothing to send later, and no log for a message
        self._pass_on()
        for uploader in self._uploaders:
            if uploader.thread.is_alive() or uploader.problem is not None:
                why, upload = uploader.problem or f"it did not answer for {patience_s:g} s", uploader.upload
                self._tell(
                    f"{upload.name} was not sent everything ({why}); nothing is lost: "
                    f"`stoker runs track {upload.directory.name} --to {upload.name}` sends the rest"
                )

    def _pass_on(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._tell(self._messages.get_nowait())


class _Uploader:
    """One tracker and its thread; `problem` is why the last attempt failed."""

    def __init__(self, upload: RunUpload, tell: Callable[[str], None], pause_s: float) -> None:
        self.upload, self._tell, self._pause_s = upload, tell, pause_s
        self.news, self._over = threading.Event(), threading.Event()
        self.problem: str | None = None
        self._is_reported = False
        # A daemon: a library that hangs must not keep a finished run from ending.
        self.thread = threading.Thread(target=self._run, name=f"tracker {upload.name}", daemon=True)
        self.thread.start()

    def end(self) -> None:
        """Send once more, and stop."""
        self._over.set()
        self.news.set()

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._over.is_set():
            self.news.wait()
            self.news.clear()
            if self._attempt(self.upload.send):
                pause_s = _FIRST_PAUSE_S
                self._over.wait(self._pause_s)
            else:
                self._over.wait(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                self.news.set()
        if self._attempt(self.upload.send):
            self._attempt(self.upload.close)

    def _attempt(self, what: Callable[[], object]) -> bool:
        try:
            what()
        except Exception as error:  # noqa: BLE001 - other people's libraries raise anything, and a run goes on
            self.problem = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            if not self._is_reported:
                self._is_reported = True
                self._tell(f"{self.upload.name} cannot be reached, the run goes on ({self.problem})")
            return False
        self.problem = None
        return True

"""Sending runs to trackers: while they train, or afterwards.

Sending a run's events while it trains, in threads of their own: training never waits for a tracker.
"""

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
    """What was sent of a run: so many events, and where people find it there."""

    run: str
    tracker: str
    events: int
    where: str


@contextmanager
def tracked(
    directory: RunDirectory, targets: Sequence[TrackerTarget], tell: Callable[[str], None]
) -> Iterator[tuple[Callable[[Event], None], ...]]:
    """Within the block, what events are to be given to so that trackers follow a run; afterwards they have them all."""
    if not targets:
        yield ()
        return
    following = BackgroundUploads([RunUpload(directory, one.word, one.open) for one in targets], tell)
    try:
        yield (following,)
    finally:
        following.close()


def track(run: str, to: str) -> Sent:
    """Send what a tracker does not have yet of a run, which may be over.

    Args:
        run: its name, the start of one, `latest`, or a path.
        to: a tracker: `tensorboard`, `mlflow=http://host:5000`, `wandb=project`, `trackio`, `csv`.

    Raises:
        BadJob: there is no such tracker, or its package is missing.
        BadRun: there is no such run, or it cannot be read.
        RunFailed: the tracker did not take it; the same call goes on.
    """
    target, directory = parse_tracker(to), find_run(runs_root(), run)
    shipment = RunUpload(directory, target.word, target.open)
    try:
        events = shipment.send()
        shipment.close()
    except StokerError:
        raise
    except Exception as problem:
        raise RunFailed(
            f"{target.name} did not take the run: {type(problem).__name__}: {problem}",
            remedy="Nothing is lost; the same command sends what is left.",
        ) from problem
    return Sent(directory.name, target.name, events, shipment.where or "")


PATIENCE_S = 15.0
"""How long the end of a run waits for a tracker [s]."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
"""Between two attempts at a tracker that fails: doubled each time [s]."""


class BackgroundUploads:
    """A sink of events that wakes one thread for each tracker.

    A tracker that fails is told of once, and tried again with growing pauses. Whatever is not sent in the end stays in
    the run, and `stoker runs track` sends it.

    Args:
        shipments: the run with each tracker.
        tell: told a sentence about a tracker that fails, in the thread that trains: at the next event, or at the end.
        pause_s: the least time between two sendings [s].
    """

    def __init__(self, shipments: Sequence[RunUpload], tell: Callable[[str], None], *, pause_s: float = 1.0) -> None:
        self._words: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._followers = [_Uploader(one, self._words.put, pause_s) for one in shipments]
        self._tell = tell

    def __call__(self, event: Event) -> None:
        """Note that there is something new in the log, and tell what the threads have to say."""
        for one in self._followers:
            one.news.set()
        self._tell_what_came()

    def close(self, patience_s: float = PATIENCE_S) -> None:
        """Send what is left, as far as it can be done in time."""
        for one in self._followers:
            one.end()
        for one in self._followers:
            one.thread.join(timeout=patience_s)
        if not all(one.shipment.directory.is_run for one in self._followers):
            return  # it failed before it kept anything: there is nothing to send later, and no log to say so in
        self._tell_what_came()
        for one in self._followers:
            if one.thread.is_alive() or one.problem is not None:
                why = one.problem or f"it did not answer for {patience_s:g} s"
                self._tell(
                    f"{one.shipment.name} was not sent everything ({why}); nothing is lost: "
                    f"`stoker runs track {one.shipment.directory.name} --to {one.shipment.name}` sends the rest"
                )

    def _tell_what_came(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._tell(self._words.get_nowait())


class _Uploader:
    """One tracker and its thread; `problem` is why the last sending failed."""

    def __init__(self, shipment: RunUpload, tell: Callable[[str], None], pause_s: float) -> None:
        self.shipment, self._tell, self._pause_s = shipment, tell, pause_s
        self.news, self._over = threading.Event(), threading.Event()
        self.problem: str | None = None
        self._is_told = False
        # A daemon: a library that hangs must not keep a finished run from ending.
        self.thread = threading.Thread(target=self._follow, name=f"tracker {shipment.name}", daemon=True)
        self.thread.start()

    def end(self) -> None:
        """Send once more, and stop."""
        self._over.set()
        self.news.set()

    def _follow(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._over.is_set():
            self.news.wait()
            self.news.clear()
            if self._sent():
                pause_s = _FIRST_PAUSE_S
                self._over.wait(self._pause_s)
            else:
                self._over.wait(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                self.news.set()
        if self._sent():
            self._attempt(self.shipment.close)

    def _sent(self) -> bool:
        return self._attempt(self.shipment.send)

    def _attempt(self, what: Callable[[], object]) -> bool:
        try:
            what()
        except Exception as error:  # noqa: BLE001 - other people's libraries raise anything, and a run goes on
            self.problem = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            if not self._is_told:
                self._is_told = True
                self._tell(f"{self.shipment.name} cannot be reached, the run goes on ({self.problem})")
            return False
        self.problem = None
        return True

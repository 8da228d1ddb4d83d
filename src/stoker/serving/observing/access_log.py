"""A line of JSON for every request, written by a thread of its own so that a slow disk holds nobody up."""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from stoker.errors import BadJob, first_line
from stoker.serving.edge import Access

MOST_CHARS = 1000
"""Of a path, of a request's id, and of what it calls its model and version."""
MOST_WAITING = 10_000
"""Lines that may wait for the disk; beyond them lines are dropped, and counted."""


class AccessLog:
    """Takes records from any thread and never blocks; a file is reopened by `reopen`, after someone rotated it.

    Args:
        path: the file to append to, made if absent; None: standard error.

    Raises:
        BadJob: the file cannot be opened.
    """

    def __init__(self, path: Path | None, *, wall_clock: Callable[[], float] = time.time) -> None:
        self.dropped = 0
        """Lines that were not written: the disk was too slow, or refused them."""
        self._path = path
        self._wall_clock = wall_clock
        self._file = self._opened()
        self._waiting: queue.Queue[tuple[float, Access] | _Order] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._write_all, name="stoker-access-log", daemon=True)
        self._thread.start()

    def __call__(self, access: Access) -> None:
        """Queue a line; what a client chose to make long is cut, since many lines may wait."""
        if len(access.path) + len(access.id) + len(access.model) + len(access.version) > MOST_CHARS:
            access = _shortened(access)
        try:
            self._waiting.put_nowait((self._wall_clock(), access))
        except queue.Full:
            self.dropped += 1

    def reopen(self) -> None:
        """Open the file by its name again, behind the lines that wait."""
        self._waiting.put(_REOPEN)

    def close(self) -> None:
        """Write what waits, and end."""
        self._waiting.put(_CLOSE)
        self._thread.join()
        if self._path is not None:
            self._file.close()

    def _opened(self) -> TextIO:
        if self._path is None:
            return sys.stderr
        try:
            return self._path.open("a", encoding="utf-8")
        except OSError as error:
            raise BadJob(f"the access log {self._path} cannot be written: {first_line(error)}") from error

    def _write_all(self) -> None:
        while (one := self._waiting.get()) is not _CLOSE:
            try:
                if isinstance(one, _Order):
                    self._reopen()
                    continue
                self._file.write(_line(*one))
                if self._waiting.empty():  # whoever reads along sees whole lines as soon as there is nothing to do
                    self._file.flush()
            except OSError:
                self.dropped += 1

    def _reopen(self) -> None:
        """Go on in a new file; in the old one if there can be none."""
        if self._path is None:
            return
        try:
            fresh = self._opened()
        except BadJob:
            self.dropped += 1
            return
        self._file.close()
        self._file = fresh


def _shortened(access: Access) -> Access:
    chosen = {name: getattr(access, name)[:MOST_CHARS] for name in ("path", "id", "model", "version")}
    return replace(access, **chosen)


def _line(at_s: float, access: Access) -> str:
    """When, and all of the record that says something."""
    told = {name: value for name, value in asdict(access).items() if value not in {"", 0}}
    at = datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds")
    return json.dumps({"at": at, **told, "seconds": round(access.seconds, 6)}, ensure_ascii=False) + "\n"


class _Order:
    """What the writing thread is told between lines."""


_REOPEN, _CLOSE = _Order(), _Order()

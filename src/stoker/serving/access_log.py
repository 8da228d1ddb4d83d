"""A line of JSON for every request, written by a thread of its own so that no disk and no reader holds it up."""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stoker.errors import BadJob, first_line
from stoker.serving.service import AccessEntry

MOST_CHARS = 1000
"""Of a path, of a request's id, and of what it calls its model and version."""
_AT_ONCE = 100
"""Lines that are written together, at most."""
MOST_WAITING = 10_000
"""Lines that may wait to be written; beyond them lines are dropped, and counted."""
_CLOSING_S = 1.0
"""How long `close` waits for lines to be written: nobody may read the other end of a pipe."""
_REOPEN, _CLOSE = object(), object()


class LineWriter:
    """Writes lines on a thread of its own; takes them from any thread and never blocks, whatever the reader does.

    Args:
        path: the file to append to, made if absent; None: standard error.
        render: makes a line, with its end, of what `put` was given; on the writing thread.

    Raises:
        BadJob: the file cannot be opened.
    """

    def __init__(self, path: Path | None, render: Callable[[Any], str] = str) -> None:
        self.dropped = 0
        """Lines that were not written: the disk or the reader was too slow, or refused them."""
        self._path = path
        self._render = render
        self._descriptor = self._opened()
        self._waiting: queue.Queue[Any] = queue.Queue(MOST_WAITING)
        self._is_to_reopen = False
        self._thread = threading.Thread(target=self._write_all, name="stoker-log", daemon=True)
        self._thread.start()

    def put(self, line: object) -> None:
        """Queue something for a line, or count it as dropped."""
        try:
            self._waiting.put_nowait(line)
        except queue.Full:
            self.dropped += 1

    def reopen(self) -> None:
        """Open the file by its name again, behind the lines that wait; where too many do, before them."""
        try:
            self._waiting.put_nowait(_REOPEN)
        except queue.Full:
            self._is_to_reopen = True

    def close(self) -> None:
        """Write what waits, as far as it is taken within a second, and end."""
        try:
            self._waiting.put(_CLOSE, timeout=_CLOSING_S)
        except queue.Full:
            return  # the thread waits for a reader; it ends with the process
        self._thread.join(_CLOSING_S)

    def _opened(self) -> int:
        """A descriptor of its own: one that a thread is stuck in must not be `sys.stderr`'s, which Python flushes."""
        try:
            if self._path is None:
                return os.dup(sys.__stderr__.fileno() if sys.__stderr__ is not None else 2)
            return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            where = "standard error" if self._path is None else f"the access log {self._path}"
            raise BadJob(f"{where} cannot be written: {first_line(error)}") from error

    def _write_all(self) -> None:
        lines: list[bytes] = []
        while (line := self._waiting.get()) is not _CLOSE:
            if line is _REOPEN or self._is_to_reopen:
                self._write(lines)
                self._is_to_reopen = False
                self._reopen()
            if line is not _REOPEN:
                lines.append(self._render(line).encode(errors="backslashreplace"))
            if self._waiting.empty() or len(lines) >= _AT_ONCE:  # whoever reads along sees lines without delay
                self._write(lines)
        self._write(lines)
        os.close(self._descriptor)

    def _write(self, lines: list[bytes]) -> None:
        """Write lines and forget them; what is refused is counted."""
        rest = memoryview(b"".join(lines))
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            self.dropped += len(lines)
        lines.clear()

    def _reopen(self) -> None:
        """Go on in a new file; in the old one if there can be none."""
        if self._path is None:
            return
        try:
            fresh = self._opened()
        except BadJob:
            self.dropped += 1
            return
        os.close(self._descriptor)
        self._descriptor = fresh


class AccessLog(LineWriter):
    """A line of JSON for every request; a file is reopened by `reopen`, after someone rotated it.

    Args:
        path: the file to append to, made if absent; None: standard error.

    Raises:
        BadJob: the file cannot be opened.
    """

    def __init__(self, path: Path | None, *, wall_clock: Callable[[], float] = time.time) -> None:
        super().__init__(path, _line)
        self._wall_clock = wall_clock

    def __call__(self, access: AccessEntry) -> None:
        """Queue a line; what a client chose to make long is cut, since many lines may wait."""
        if len(access.path) + len(access.id) + len(access.model) + len(access.version) > MOST_CHARS:
            access = _shortened(access)
        self.put((self._wall_clock(), access))


def _shortened(access: AccessEntry) -> AccessEntry:
    chosen = {name: getattr(access, name)[:MOST_CHARS] for name in ("path", "id", "model", "version")}
    return replace(access, **chosen)


def _line(entry: tuple[float, AccessEntry]) -> str:
    """When, and all of the record that says something; in ASCII, so that no client sends a terminal its commands."""
    seconds, access = entry
    told = {name: value for name, value in asdict(access).items() if value not in {"", 0}}
    at = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    return json.dumps({"at": at, **told, "seconds": round(access.seconds, 6)}) + "\n"

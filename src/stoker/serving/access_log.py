"""Access log: a line of JSON per request, written by a thread, so that no disk or reader blocks a request."""

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
"""Limit on each of a path, a request's id, and its model's and version's names."""
_AT_ONCE = 100
"""Most lines written together."""
MOST_WAITING = 10_000
"""Most lines waiting; further ones are dropped and counted."""
_CLOSING_S = 1.0
"""How long `close` waits [s]: a pipe may have no reader."""
_REOPEN, _CLOSE = object(), object()


class LineWriter:
    """Writes lines on its own thread; takes them from any thread and never blocks.

    Args:
        path: the file to append to, created if absent; None: standard error.
        render: turns an item given to `put` into a line with its end; on the writing thread.

    Raises:
        BadJob: the file cannot be opened.
    """

    def __init__(self, path: Path | None, render: Callable[[Any], str] = str) -> None:
        self.dropped = 0
        """Number of lines not written: the disk or the reader was too slow, or failed."""
        self._path = path
        self._render = render
        self._descriptor = self._opened()
        self._waiting: queue.Queue[Any] = queue.Queue(MOST_WAITING)
        self._is_to_reopen = False
        self._thread = threading.Thread(target=self._write_all, name="stoker-log", daemon=True)
        self._thread.start()

    def put(self, line: object) -> None:
        """Queue an item, or count it as dropped."""
        try:
            self._waiting.put_nowait(line)
        except queue.Full:
            self.dropped += 1

    def reopen(self) -> None:
        """Open the file by its name again, after the waiting lines; before them if the queue is full."""
        try:
            self._waiting.put_nowait(_REOPEN)
        except queue.Full:
            self._is_to_reopen = True

    def close(self) -> None:
        """Write the waiting lines, for at most a second, and end the thread."""
        try:
            self._waiting.put(_CLOSE, timeout=_CLOSING_S)
        except queue.Full:
            return  # the thread waits for a reader; it ends with the process
        self._thread.join(_CLOSING_S)

    def _opened(self) -> int:
        """A new descriptor: Python flushes `sys.stderr`, so a thread must not be stuck in that one."""
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
                if self._path is not None:
                    try:
                        fresh = self._opened()
                    except BadJob:  # go on in the old file
                        self.dropped += 1
                    else:
                        os.close(self._descriptor)
                        self._descriptor = fresh
            if line is not _REOPEN:
                lines.append(self._render(line).encode(errors="backslashreplace"))
            if self._waiting.empty() or len(lines) >= _AT_ONCE:  # a reader sees lines without delay
                self._write(lines)
        self._write(lines)
        os.close(self._descriptor)

    def _write(self, lines: list[bytes]) -> None:
        """Write lines and clear the list; on an error all are counted as dropped."""
        rest = memoryview(b"".join(lines))
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            self.dropped += len(lines)
        lines.clear()


class AccessLog(LineWriter):
    """A line of JSON per request; call `reopen` after the file was rotated.

    Args:
        path: the file to append to, created if absent; None: standard error.

    Raises:
        BadJob: the file cannot be opened.
    """

    def __init__(self, path: Path | None, *, wall_clock: Callable[[], float] = time.time) -> None:
        super().__init__(path, _line)
        self._wall_clock = wall_clock

    def __call__(self, access: AccessEntry) -> None:
        """Queue a line; long texts from clients are cut, since many lines may wait."""
        if len(access.path) + len(access.id) + len(access.model) + len(access.version) > MOST_CHARS:
            short = {name: getattr(access, name)[:MOST_CHARS] for name in ("path", "id", "model", "version")}
            access = replace(access, **short)
        self.put((self._wall_clock(), access))


def _line(entry: tuple[float, AccessEntry]) -> str:
    """Time and non-empty fields; in ASCII, so that a client cannot send control sequences to a terminal."""
    seconds, access = entry
    fields = {name: value for name, value in asdict(access).items() if value not in {"", 0}}
    time_text = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    return json.dumps({"at": time_text, **fields, "seconds": round(access.seconds, 6)}) + "\n"

"""A run's log of events as a file that grows, read by a page.

`RunLog.read` takes in what was appended since the last call: a long run costs no more to watch than a short one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import orjson

from stoker.records.codec import JSON
from stoker.records.progress import MOST, read_event
from stoker.reporting.folded_log import COLUMNS, FoldedLog, Kept, row_of
from stoker.reporting.run_documents import event_document
from stoker.store.foreign_files import open_below
from stoker.store.run_files import EVENTS

_SAMPLES = COLUMNS.index("samples")
_CHUNK_BYTES = 4 * 2**20
_LONGEST_LINE = 8 * 2**20
"""Bytes of a line; longer ones are passed over: no event of ours has a tenth of it."""


class RunLog(FoldedLog):
    """The log of one run.

    Attributes:
        offset: the byte after the last whole line that was taken in.
        size: bytes of the file when it was last looked at; what is between is still to be read.
        identity: device and inode of the file; another one means that the log was replaced, and is read from its start.
        lock: held while it is read, or a document is made of it, which then is of the log up to `offset`.
    """

    def __init__(self, root: Path, name: str) -> None:
        self._root, self._name = root, f"{name}/{EVENTS}"
        self.lock = threading.Lock()
        self.identity: tuple[int, int] | None = None
        self._forget()

    def _forget(self) -> None:
        super().__init__()
        self.offset = self.size = self.num_damaged = 0

    @property
    def is_whole(self) -> bool:
        """Whether all that was in the file has been read."""
        return self.offset >= self.size

    def read(self, most_bytes: int = 2**62) -> bool:
        """Take in at most about `most_bytes` of what is new; whether the log was replaced since the last call.

        Raises:
            OSError: it is there and cannot be read, or is a link.
        """
        was_replaced = False
        try:
            descriptor = open_below(self._root, self._name)
        except (FileNotFoundError, NotADirectoryError):
            if self.identity is not None:
                self.identity, was_replaced = None, True
                self._forget()
            return was_replaced
        try:
            status = os.fstat(descriptor)
            if self.identity != (status.st_dev, status.st_ino) or status.st_size < self.offset:
                was_replaced = self.identity is not None
                self._forget()
            self.identity, self.size = (status.st_dev, status.st_ino), status.st_size
            for content, num_bytes in _whole_lines(descriptor, self.offset, min(self.size, self.offset + most_bytes)):
                self._take(content)
                self.offset += num_bytes
                self.num_damaged += not content
            if self.size - self.offset < _LONGEST_LINE:  # what is left is a line that is being written
                rest = os.pread(descriptor, self.size - self.offset, self.offset)
                self.size = self.offset if b"\n" not in rest else self.size
        finally:
            os.close(descriptor)
        return was_replaced

    def _take(self, content: bytes) -> None:
        """Whole lines, which follow those before."""
        rows: list[list[float]] = []
        offset = self.offset
        for line in content.split(b"\n")[:-1]:
            offset += len(line) + 1
            try:
                document = orjson.loads(line)
                kind, fields = document["kind"], document["fields"]
                if kind == "progress":
                    row = row_of(document["at"], fields)
                    if not 0 <= row[_SAMPLES] <= MOST:
                        raise ValueError("a progress has a position")
                else:
                    event = read_event(line)
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
                self.num_damaged += 1
                continue
            if kind == "progress":
                position = self._rewinds.position_of(kind, row[_SAMPLES])
                if position is not None:
                    self._flush(rows)
                    self._go_back(position)
                rows.append(row)
                self._take_progress(document["at"], fields, row)
                continue
            self._flush(rows)
            self._take_other(Kept(offset, event))
        self._flush(rows)

    def take_progress(self, lines: Iterable[bytes]) -> None:
        """Take in the progress among some lines of the log, by position; nothing else of them."""
        rows = []
        for line in lines:
            with suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
                document = orjson.loads(line)
                if document["kind"] == "progress":
                    rows.append(row_of(document["at"], document["fields"]))
        self._flush(sorted(row for row in rows if 0 <= row[_SAMPLES] <= MOST))

    def _flush(self, rows: list[list[float]]) -> None:
        if rows:
            self.progress.extend(np.array(rows))
            rows.clear()


def _whole_lines(descriptor: int, start: int, end: int) -> Iterator[tuple[bytes, int]]:
    """The whole lines from byte `start` to about byte `end`, in pieces, and the bytes that each takes in the file.

    A line that is too long takes bytes and has no content.
    """
    rest, is_first = b"", True
    while start < end or (rest and is_first):  # at least one line, else a long one would be begun again and again
        piece = os.pread(descriptor, min(_CHUNK_BYTES, end - start) if start < end else _CHUNK_BYTES, start)
        if not piece:
            return
        start += len(piece)
        cut = piece.rfind(b"\n") + 1
        if cut:
            yield rest + piece[:cut], len(rest) + cut
            rest, is_first = piece[cut:], False
        elif len(rest) + len(piece) > _LONGEST_LINE:
            yield b"", len(rest) + len(piece)
            rest, is_first = b"", False
        else:
            rest += piece


_OF_PROGRESS = (
    "samples",
    "total_samples",
    "updates",
    "epoch",
    "loss",
    "lr",
    "lrs",
    "grad_norm",
    "samples_per_s",
    "eta_s",
    "wall_s",
    "resident_bytes",
    "allocated_bytes",
    "split_s",
    "trying",
)


def line_document(line: bytes, offset: int) -> dict[str, JSON] | None:
    """A line of the log as a page takes it; None for one that cannot be read."""
    try:
        document = orjson.loads(line)
        if document["kind"] == "progress":
            fields = document["fields"]
            return {
                "kind": "progress",
                "at": document["at"],
                "offset": offset,
                **{name: fields[name] for name in _OF_PROGRESS if name in fields},
            }
        return event_document(Kept(offset, read_event(line)))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None

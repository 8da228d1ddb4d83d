"""Lines of a file, counted in bytes, so that reading can begin again in the middle."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from stoker.data.reading.faults import BadTable
from stoker.units import format_bytes

LONGEST_LINE_BYTES = 64 * 1024 * 1024
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LINE = re.compile(rb"[^\r\n]*(?:\r\n?|\n)|[^\r\n]+")


def opened(path: Path) -> BinaryIO:
    """The open file.

    Raises:
        BadTable: it cannot be opened.
    """
    try:
        return path.open("rb")
    except OSError as error:
        raise BadTable(path, f"cannot be read: {error.strerror}", remedy="Give a file that is there.") from error


class Lines:
    """The lines of an open file from `offset` on; with `any_end` a carriage return alone ends one as well."""

    def __init__(self, file: BinaryIO, path: Path, offset: int = 0, *, any_end: bool = False) -> None:
        file.seek(offset)
        self._file = file
        self._path = path
        self._any_end = any_end
        self.offset = offset
        """Where the next line begins [bytes]."""

    def __iter__(self) -> Iterator[bytes]:
        """The next lines, with their ends; a byte order mark is left out.

        Raises:
            BadTable: a line is so long that this is no file of lines.
        """
        while line := self._file.readline(LONGEST_LINE_BYTES):
            if len(line) == LONGEST_LINE_BYTES:
                raise BadTable(
                    self._path,
                    f"has a line of more than {format_bytes(LONGEST_LINE_BYTES)} at byte {self.offset:,}",
                    remedy="JSON Lines have one object a line; write an array of objects so, or as Parquet.",
                )
            first = line.find(b"\r") if self._any_end else -1
            pieces = (line,) if first < 0 or line[first:] in (b"\r", b"\r\n") else _LINE.findall(line)
            for piece in pieces:
                is_first = not self.offset
                self.offset += len(piece)
                yield piece.removeprefix(_BYTE_ORDER_MARK) if is_first else piece


def is_utf8(text: str) -> bool:
    """Whether all of a text could be decoded: bytes that could not are lone surrogates in it, as PEP 383 has it."""
    return text.isascii() or not any("\udc80" <= char <= "\udcff" for char in text)

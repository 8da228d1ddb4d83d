"""Lines of a text file, counted in bytes, so that reading can begin again in the middle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from stoker.errors import BadJob
from stoker.units import format_bytes

LONGEST_LINE_BYTES = 64 * 1024 * 1024
_BYTE_ORDER_MARK = "\ufeff"


class Lines:
    """The lines of an open file from `offset` on; bytes that are no UTF-8 become lone surrogates, as PEP 383 has it."""

    def __init__(self, file: BinaryIO, path: Path, offset: int = 0) -> None:
        file.seek(offset)
        self._file = file
        self._path = path
        self.offset = offset
        """Where the next line begins [bytes]."""

    def __iter__(self) -> Iterator[str]:
        """The next lines, with their ends."""
        while line := self._file.readline(LONGEST_LINE_BYTES):
            if len(line) == LONGEST_LINE_BYTES:
                raise BadJob(
                    f"{self._path} has a line of more than {format_bytes(LONGEST_LINE_BYTES)} at byte {self.offset:,}",
                    remedy="JSON Lines have one object a line; write an array of objects so, or as Parquet.",
                )
            text = line.decode("utf-8", "surrogateescape")
            if self.offset == 0:
                text = text.removeprefix(_BYTE_ORDER_MARK)
            self.offset += len(line)
            yield text


def is_utf8(text: str) -> bool:
    """Whether all of a line could be decoded."""
    return not any("\udc80" <= char <= "\udcff" for char in text) if not text.isascii() else True

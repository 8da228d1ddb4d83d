"""Whether the quotes of a CSV file are as RFC 4180 has them: a field in quotes ends where its second one is.

Readers that are made for speed mind no quote that is never closed, nor what follows a closed one: they read on to the
next quote, and take the rows on the way for one field.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import BinaryIO

from stoker.data.reading.lines import LONGEST_LINE_BYTES

_CHUNK_BYTES = 4 * 1024 * 1024
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def are_quotes_sound(file: BinaryIO, delimiter: str, *, chunk_bytes: int = _CHUNK_BYTES) -> bool:
    r"""Whether every field of an open file that begins with a quote ends with one, before a delimiter or a line's end.

    Fields of more than 64 MiB are none.

    Args:
        file: read to its end, or to the first quote that is not sound.
        delimiter: between fields, one byte; of others the answer is no.
        chunk_bytes: read at once.

    >>> import io
    >>> [are_quotes_sound(io.BytesIO(text), ",") for text in (b'x,y\n1,"a ""b"", c"\n', b'x,y\n1,"a\n2,b\n')]
    [True, False]
    """
    if len(delimiter.encode()) != 1:
        return False
    inside, at_end = _patterns(delimiter)
    file.seek(0)
    buffer, place = file.read(len(_BYTE_ORDER_MARK)).removeprefix(_BYTE_ORDER_MARK), 0
    while chunk := file.read(chunk_bytes):
        buffer += chunk
        found = inside.match(buffer, place)
        end = found.end() if found else place
        buffer, place = buffer[max(0, end - 1) :], min(1, end)  # the byte before tells where a field begins
        if len(buffer) > LONGEST_LINE_BYTES:
            return False
    return at_end.fullmatch(buffer, place) is not None


@lru_cache(maxsize=8)
def _patterns(delimiter: str) -> tuple[re.Pattern[bytes], re.Pattern[bytes]]:
    """What goes before the first quote that is not sound, within a file and up to its end."""
    between = re.escape(delimiter.encode()) + rb"\r\n"
    field = rb'(?<![^%b])"(?:[^"]++|"")*+"' % between  # begins after a delimiter, at a line's or the file's beginning
    other = rb'[^"]++|(?<=[^%b])"' % between  # a quote within a field that begins with something else is a letter of it
    inside = rb"(?:%b|%b(?=[%b]))*+" % (other, field, between)
    at_end = rb"(?:%b|%b(?=[%b]|\Z))*+" % (other, field, between)
    return re.compile(inside), re.compile(at_end)

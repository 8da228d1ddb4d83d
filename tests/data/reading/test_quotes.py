"""Quotes in CSV, before a reader that does not mind them."""

from __future__ import annotations

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.data.reading import table_readers
from stoker.data.reading.table_readers import are_quotes_sound

PIECES = ["a", " ", ",", ";", '"', '""', "\n", "\r\n", "\r", "ä"]


def is_read(text: str, delimiter: str) -> bool:
    """Whether a reader of single records finds no fault with it, ragged or not."""
    try:
        list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True))
    except csv.Error:
        return False
    return True


@given(st.lists(st.sampled_from(PIECES), max_size=20).map("".join), st.sampled_from([",", ";"]), st.integers(1, 40))
def test_quotes_are_sound_where_a_strict_reader_finds_no_fault(text: str, delimiter: str, chunk_bytes: int) -> None:
    """However the file is cut into chunks."""
    found = are_quotes_sound(io.BytesIO(text.encode()), delimiter, chunk_bytes=chunk_bytes)
    assert found == is_read(text, delimiter)


@pytest.mark.parametrize("chunk_bytes", range(1, 12))
def test_a_quote_within_a_field_begins_none_at_a_chunk(chunk_bytes: int) -> None:
    """It is a letter there, wherever the file is cut."""
    assert are_quotes_sound(io.BytesIO(b'a,b\nxyz"w,1\n2,3\n'), ",", chunk_bytes=chunk_bytes)


def test_a_byte_order_mark_is_not_what_a_field_begins_with() -> None:
    """The quote after it is."""
    assert are_quotes_sound(io.BytesIO(b'\xef\xbb\xbf"x, y",z\n1,2\n'), ",", chunk_bytes=2)
    assert not are_quotes_sound(io.BytesIO(b'\xef\xbb\xbf"x,z\n1,2\n'), ",", chunk_bytes=2)


def test_a_quote_that_is_never_closed_is_not_sought_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A field that is longer than any should be is none."""
    monkeypatch.setattr(table_readers, "LONGEST_LINE_BYTES", 100)
    file = io.BytesIO(b'x\n"' + b"a" * 1000)
    assert not are_quotes_sound(file, ",", chunk_bytes=10)
    assert file.tell() < 200

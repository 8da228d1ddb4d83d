from __future__ import annotations

import gzip
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.serving.http.bodies import accepted_encoding, compress, decompress
from stoker.serving.refusals import BadRequest, Refusal, TooLarge, WrongFormat

MOST = 1000


@given(st.binary(max_size=MOST), st.sampled_from(["gzip", "deflate", "GZIP", " deflate ", "identity"]))
def test_bodies_come_back_as_they_went(body: bytes, encoding: str) -> None:
    """Both encodings, however they are spelled."""
    name = encoding.strip().lower()
    sent = body if name == "identity" else compress(body, name)
    assert decompress(sent, encoding, most_bytes=MOST) == body


def test_others_read_it() -> None:
    """They are gzip and zlib's format, as every client has them."""
    assert gzip.decompress(compress(b"abc", "gzip")) == b"abc"
    assert zlib.decompress(compress(b"abc", "deflate")) == b"abc"


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_bomb_is_stopped_while_it_grows(encoding: str) -> None:
    """Of a hundred megabytes no more than the limit is ever held."""
    bomb = compress(bytes(100_000_000), encoding)
    tracemalloc.start()
    try:
        with pytest.raises(TooLarge, match="more than 1000 bytes"):
            decompress(bomb, encoding, most_bytes=MOST)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_damage_is_told(encoding: str) -> None:
    """Cut off, followed by something, or nothing of the kind."""
    whole = compress(b"abc" * 50, encoding)
    for damaged, said in (
        (whole[:-3], "cut off"),
        (whole + b"x", "1 bytes follow"),
        (b"plain", "is no"),
        (b"", "cut off"),
    ):
        with pytest.raises(BadRequest, match=said):
            decompress(damaged, encoding, most_bytes=MOST)


@given(st.binary(max_size=200), st.sampled_from(["gzip", "deflate"]))
def test_any_bytes_are_a_body_or_a_refusal(body: bytes, encoding: str) -> None:
    """Never another exception."""
    try:
        assert len(decompress(body, encoding, most_bytes=MOST)) <= MOST
    except Refusal as error:
        assert isinstance(error, BadRequest | TooLarge)  # noqa: PT017 - either may be


def test_other_encodings_are_not_known() -> None:
    """Neither is one on top of another."""
    for encoding in ("br", "zstd", "gzip, gzip"):
        with pytest.raises(WrongFormat, match="gzip and deflate are"):
            decompress(b"", encoding, most_bytes=MOST)


@pytest.mark.parametrize(
    ("accepted", "encoding"),
    [
        ("", ""),
        ("gzip", "gzip"),
        ("deflate", "deflate"),
        ("GZIP;q=0.5", "gzip"),
        ("gzip;q=0", ""),
        ("gzip, deflate, br", ""),
        ("br", ""),
        ("*", ""),
        ("identity", ""),
    ],
)
def test_answers_are_compressed_for_who_asks(accepted: str, encoding: str) -> None:
    """One name alone is a wish; the lists that libraries send are none."""
    assert accepted_encoding(accepted) == encoding

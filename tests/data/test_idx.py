from __future__ import annotations

import gzip

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stoker.data.idx_files import IdxFile, read_idx, verified
from stoker.errors import BadJob
from tests.data.idx_files import expected_of, idx_content

SHAPE = (5, 3, 2)
CONTENT = idx_content(SHAPE)
EXPECTED = expected_of("small", SHAPE, CONTENT)
ZIPPED = gzip.compress(CONTENT, mtime=0)


def complaint(stored: bytes, expected: IdxFile = EXPECTED) -> str:
    """What is said about a file with the bytes `stored`."""
    with pytest.raises(BadJob) as caught:
        verified(stored, expected, where="small.gz", remedy="Replace it.")
    assert caught.value.remedy == "Replace it."
    return caught.value.message


@pytest.mark.parametrize(
    "stored",
    [CONTENT, ZIPPED, gzip.compress(CONTENT, 1, mtime=0), gzip.compress(CONTENT, mtime=7)],
    ids=["plain", "gzipped", "gzipped fast", "gzipped at another time"],
)
def test_the_content_counts_and_not_its_compression(tmp_path, stored):
    """Plain and gzipped in any way, a file gives the values in row-major order, in memory one may write to."""
    path = tmp_path / "file"
    path.write_bytes(stored)
    values = read_idx(path, EXPECTED, remedy="")
    assert values.dtype == torch.uint8
    assert values.flatten().tolist() == [at % 10 for at in range(30)]
    assert values.shape == SHAPE
    values.add_(1)


@given(st.integers(0, len(ZIPPED) - 1))
def test_no_truncated_file_is_used(length):
    """A gzip file cut anywhere is refused, down to nothing at all."""
    complaint(ZIPPED[:length])


def test_a_truncated_gzip_says_so():
    """The most common damage is named, with how much of the file there is."""
    assert (
        complaint(ZIPPED[:-9])
        == f"small.gz is truncated: its gzip stream stops after {len(ZIPPED) - 9:,} bytes of file"
    )


@given(st.integers(10, len(ZIPPED) - 1), st.integers(1, 255))
def test_no_damaged_file_is_used(at, change):
    """A gzip file with any byte changed after its header is refused."""
    complaint(ZIPPED[:at] + bytes([ZIPPED[at] ^ change]) + ZIPPED[at + 1 :])


@given(st.integers(0, len(CONTENT) - 1), st.integers(1, 255))
def test_no_other_content_is_used(at, change):
    """An unpacked file with any byte changed is refused."""
    complaint(CONTENT[:at] + bytes([CONTENT[at] ^ change]) + CONTENT[at + 1 :])


def test_something_else_entirely_is_named_by_its_first_bytes():
    """A login page saved under the file's name is no idx file."""
    assert (
        complaint(b"<html>")
        == "small.gz is no idx file of its kind: it starts with '3c 68 74 6d', wanted '00 00 08 03'"
    )


def test_an_idx_file_of_another_kind_is_refused_even_with_the_right_digest():
    """Floating values (type 0x0d) cannot be read as bytes, whatever digest was expected."""
    floats = bytes([0, 0, 0x0D, 3]) + CONTENT[4:]
    assert "it starts with '00 00 0d 03'" in complaint(floats, expected_of("small", SHAPE, floats))


def test_too_short_and_too_long_say_how_long():
    """The error has both sizes; of an endless file no more is unpacked than shows that it is too long."""
    assert complaint(CONTENT[:20]) == "small.gz has 20 bytes uncompressed, wanted 46"
    assert complaint(gzip.compress(CONTENT + bytes(10**7))) == "small.gz has more than 46 bytes uncompressed, wanted 46"


def test_another_shape_of_the_same_size_is_told():
    """A header that contradicts what is expected is reported as shapes."""
    other = idx_content((3, 5, 2))
    assert complaint(other) == "small.gz holds an array of 3 × 5 × 2, wanted 5 × 3 × 2"


def test_another_content_is_told_as_digests():
    """A file of the right form with other values: found and wanted SHA-256."""
    other = idx_content(SHAPE, first=1)
    found = expected_of("small", SHAPE, other).sha256
    text = f"small.gz has another content: its SHA-256 uncompressed is {found}, wanted {EXPECTED.sha256}"
    assert complaint(other) == text


def test_a_file_that_cannot_be_read_is_the_users_to_mend(tmp_path):
    """A folder under the file's name is an error in words."""
    with pytest.raises(BadJob, match="cannot be read"):
        read_idx(tmp_path, EXPECTED, remedy="Replace it.")

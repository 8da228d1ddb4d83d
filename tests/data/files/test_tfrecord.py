"""TFRecord files as indexed data."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import stoker
from stoker.data.files.tfrecord import encoded, features_of, masked_crc, records_of
from stoker.errors import BadJob
from stoker.records import CleanList
from stoker.records.data_check import Dropped
from tests.data.files.making import COUNT, example_files, label_of, pixels_of, tfrecord_file

FEATURES = {"image": "image", "point": ("float32", (2,)), "label": "int64"}


def sequentially(content: bytes) -> list[bytes]:
    """The records of a file, read from end to end by their lengths alone."""
    found = []
    while content:
        length = struct.unpack("<Q", content[:8])[0]
        found.append(content[12 : 12 + length])
        content = content[16 + length :]
    return found


def test_the_checksum_is_crc32c_masked() -> None:
    """Of the nine digits it is published: 0xE3069283 (RFC 3720, appendix B.4 uses the same polynomial)."""
    crc = 0xE3069283
    assert masked_crc(b"123456789") == (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(contents=st.lists(st.binary(max_size=300), max_size=12))
def test_the_index_is_what_reading_from_end_to_end_gives(contents: list[bytes], tmp_path: Path) -> None:
    """Where each record begins, how long it is, and its checksum."""
    path = tfrecord_file(tmp_path / "t.tfrecord", contents)
    index, stored = records_of(path), path.read_bytes()
    places = zip(index["offset"].tolist(), index["length"].tolist(), strict=True)
    found = [stored[offset : offset + length] for offset, length in places]
    assert found == sequentially(stored) == contents
    assert index["checksum"].tolist() == [masked_crc(content) for content in contents]


def test_examples_become_samples(tmp_path: Path) -> None:
    """Image, numbers of a shape and label, over two files."""
    source = stoker.data.tfrecord(example_files(tmp_path), FEATURES)
    assert (len(source), source.target) == (COUNT, "label")
    sample = source.sample(30)
    assert torch.equal(sample["image"], torch.from_numpy(pixels_of(30).transpose(2, 0, 1)))
    assert sample["point"].tolist() == [30 / 8, -1.0]
    assert sample["point"].dtype == torch.float32
    assert sample["label"].item() == label_of(30)
    assert sample["label"].dtype == torch.int64
    assert source.sample_id(30) == "b.tfrecord:6"
    labels = source.labels()
    assert labels is not None
    assert np.bincount(labels).tolist() == [16, 16, 16]
    assert source[30]["image"].dtype == torch.float32


def test_text_and_bytes_stay_what_they_are(tmp_path: Path) -> None:
    """One value each."""
    path = tfrecord_file(tmp_path / "t.tfrecord", [encoded({"t": ["Grüße".encode()], "b": [b"\x00\xff"]})])
    sample = stoker.data.tfrecord(path, {"t": "text", "b": "bytes"}).sample(0)
    assert sample == {"t": "Grüße", "b": b"\x00\xff"}


def test_lists_written_value_by_value_are_read_as_packed_ones_are() -> None:
    """Both are allowed by protocol buffers; here numbers 1 and 300, one at a time."""
    numbers = b"\x08\x01\x08\xac\x02"  # field 1, varint, twice
    feature = b"\x1a" + bytes([len(numbers)]) + numbers
    entry = b"\x0a\x01n\x12" + bytes([len(feature)]) + feature
    features = b"\x0a" + bytes([len(entry)]) + entry
    content = b"\x0a" + bytes([len(features)]) + features
    assert list(features_of(content)["n"].int64_list.value) == [1, 300]


@pytest.mark.parametrize(
    ("at", "message"),
    [(3, r"record 0 of .*, at byte 0, does not have its checksum"), (-1, r"record 1 of .*, at byte 24, ends after")],
)
def test_a_length_that_is_damaged_or_a_file_cut_off_is_told(at: int, message: str, tmp_path: Path) -> None:
    """When the index is made, with the byte."""
    path = tfrecord_file(tmp_path / "t.tfrecord", [b"abcdefgh", b"x"])
    content = bytearray(path.read_bytes())
    if at < 0:
        content = content[:at]
    else:
        content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(BadJob, match=message):
        len(stoker.data.tfrecord(path, {"a": "bytes"}))


def test_a_content_that_is_damaged_is_told_when_it_is_read_and_can_be_mended(tmp_path: Path) -> None:
    """The fingerprint is of the stored checksums, so a whole file in its place is the same data."""
    paths = example_files(tmp_path)
    good = paths[0].read_bytes()
    content = bytearray(good)
    content[40] ^= 1
    paths[0].write_bytes(content)
    source = stoker.data.tfrecord(paths, FEATURES)
    with pytest.raises(
        BadJob, match=r"record 0 of .*a\.tfrecord cannot be read: its content does not have its checksum"
    ):
        source.sample(0)
    with pytest.raises(BadJob, match=r"record 0 of .*a\.tfrecord cannot be read"):
        source.labels()
    source.sample(1)
    damaged = source.fingerprint
    paths[0].write_bytes(good)
    assert stoker.data.tfrecord(paths, FEATURES).fingerprint == damaged
    tfrecord_file(paths[0], [b"other"])
    assert stoker.data.tfrecord(paths, FEATURES).fingerprint != damaged


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"lable": "int64"}, "no feature 'lable'. Did you mean 'label'"),
        ({"label": "float32"}, "its feature 'label' is a int64_list, 'float32' needs a float_list"),
        ({"point": "float32"}, r"its feature 'point' has 2 values, wanted the shape \[\]"),
        ({"point": ("float32", (3,))}, r"wanted the shape \[3\]"),
    ],
)
def test_a_record_without_what_was_asked_for_is_told(features: dict[str, object], message: str, tmp_path: Path) -> None:
    """With its file and number."""
    source = stoker.data.tfrecord(example_files(tmp_path), features)  # type: ignore[arg-type]
    with pytest.raises(BadJob, match=f"(?s)record 2 of .*a.tfrecord cannot be read: .*{message}"):
        source.sample(2)


def test_bytes_that_are_no_example_are_told(tmp_path: Path) -> None:
    """Though the checksum is right."""
    path = tfrecord_file(tmp_path / "t.tfrecord", [b"\xff\xff\xff"])
    with pytest.raises(BadJob, match=r"it is no tf\.train\.Example"):
        stoker.data.tfrecord(path, {"a": "bytes"}).sample(0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"features": {}}, "leaves nothing"),
        ({"features": {"a": "jpeg"}}, "Give one of image, int64"),
        ({"features": {"a": ("image", (3, 3))}}, "no shape of its own"),
        ({"features": {"a": "bytes"}, "target": "b"}, "the target 'b' is not among the features"),
    ],
)
def test_words_that_cannot_be_meant_are_refused(given: dict[str, object], message: str, tmp_path: Path) -> None:
    """Before any record is read."""
    path = tfrecord_file(tmp_path / "t.tfrecord", [b""])
    with pytest.raises(BadJob, match=message):
        stoker.data.tfrecord(path, **given)  # type: ignore[arg-type]


def test_a_clean_list_leaves_records_out(tmp_path: Path) -> None:
    """By file and number."""
    clean = CleanList(
        source=str(tmp_path),
        made_at="2026-01-01T00:00:00Z",
        kept=47,
        dropped=(Dropped(id="b.tfrecord:6", why="corrupt"),),
    )
    source = stoker.data.tfrecord(example_files(tmp_path), FEATURES, clean=clean)
    assert len(source) == COUNT - 1
    assert source.sample_id(30) == "b.tfrecord:7"

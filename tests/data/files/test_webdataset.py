"""WebDataset shards as indexed data."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import stoker
from stoker.data.files.source import Names
from stoker.data.files.webdataset import index_of
from stoker.errors import BadJob
from stoker.records import CleanList
from stoker.records.data_check import Dropped
from tests.data.files.making import COUNT, label_of, pixels_of, png_of, shard_files, tar_file


def test_samples_are_groups_of_members_in_order(tmp_path: Path) -> None:
    """Image and class by index, whichever shard they lie in."""
    source = stoker.data.webdataset(shard_files(tmp_path), fields=["jpg;png", "cls"])
    assert (len(source), source.target, source.note) == (COUNT, 1, None)
    for at in (0, 20, 47):
        shard, _, key = source.sample_id(at).partition(":")
        pixels, label = source.sample(at)
        assert torch.equal(pixels, torch.from_numpy(pixels_of(int(key)).transpose(2, 0, 1)))
        assert label == label_of(int(key))
        assert shard == f"part-{int(key) % 3:03}.tar"
    labels = source.labels()
    assert labels is not None
    assert np.bincount(labels).tolist() == [16, 16, 16]


@pytest.mark.parametrize("order", [("png", "seg.png"), ("seg.png", "png")])
def test_of_alternative_members_the_first_named_is_taken(tmp_path: Path, order: tuple[str, str]) -> None:
    """As WebDataset itself does, and not the one that comes last in the tar."""
    content = {"png": png_of(1), "seg.png": png_of(2)}
    shard = tar_file(tmp_path / "a.tar", [*((f"0.{kind}", content[kind]) for kind in order), ("0.cls", b"1")])
    for fields, index in ((["png;seg.png", "cls"], 1), (["seg.png;png", "cls"], 2)):
        pixels, _ = stoker.data.webdataset(shard, fields=fields).sample(0)
        assert torch.equal(pixels, torch.from_numpy(pixels_of(index).transpose(2, 0, 1)))


name = st.from_regex(r"[a-z0-9]{1,3}(/[a-z0-9_]{1,120})?\.[a-z]{1,4}", fullmatch=True)


@pytest.mark.slow
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    members=st.lists(st.tuples(name, st.binary(max_size=1200)), max_size=8),
    tar_format=st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT]),
)
def test_the_index_is_what_reading_from_end_to_end_gives(
    members: list[tuple[str, bytes]], tar_format: int, tmp_path: Path
) -> None:
    """Every member's name and bytes, whatever the names' lengths and the format of tar."""
    path = tar_file(tmp_path / "t.tar", members, tar_format)
    index, content = index_of(path), path.read_bytes()
    names = Names.of_parts(index["names"].tobytes(), index["ends"])
    places = zip(index["offset"].tolist(), index["size"].tolist(), strict=True)
    found = list(zip(names, [content[offset : offset + size] for offset, size in places], strict=True))
    with tarfile.open(path, "r|") as stream:
        wanted = [(member.name, stream.extractfile(member).read()) for member in stream]  # type: ignore[union-attr]
    assert found == wanted == members


def test_members_are_decoded_by_their_kinds(tmp_path: Path) -> None:
    """Text, JSON, arrays, names of classes, and bytes that have no meaning here."""
    buffer = io.BytesIO()
    np.save(buffer, np.arange(3.0))
    path = tar_file(
        tmp_path / "t.tar",
        [
            ("a/k.seg.png", png_of(1)),
            ("a/k.txt", "Grüße".encode()),
            ("a/k.json", b'{"n": 1}'),
            ("a/k.npy", buffer.getvalue()),
            ("a/k.bin", b"\x00"),
            ("a/k.CLS", b"dog\n"),
            ("README", b"x"),
        ],
    )
    fields = ["txt", "json", "npy", "bin", "seg.png", "cls"]
    source = stoker.data.webdataset(path, fields=fields, classes=["cat", "dog"])
    text, json, array, raw, image, label = source.sample(0)
    assert (text, json, raw, label, array.tolist()) == ("Grüße", {"n": 1}, b"\x00", 1, [0.0, 1.0, 2.0])
    assert image.shape == (3, 6, 6)
    assert source.sample_id(0) == "t.tar:a/k"
    prepared = source[0]
    assert prepared[4].dtype == torch.float32
    assert prepared[0] == "Grüße"


@pytest.mark.parametrize(
    ("members", "given", "message"),
    [
        ([("a.png", b"x")], {}, r"sample a in .*t\.tar has no cls; it has png"),
        ([("a.png", b"x"), ("a.png", b"x")], {}, r"has a\.png twice in a row"),
        ([("README", b"x")], {}, "has no samples"),
        ([("a.png", b"x"), ("a.cls", b"1")], {"fields": ["png", "pyd"]}, "is a pickle"),
        ([("a.png", b"x"), ("a.cls", b"1")], {"fields": []}, "leaves nothing"),
    ],
)
def test_shards_that_are_not_as_they_should_be_are_told(
    members: list[tuple[str, bytes]], given: dict[str, object], message: str, tmp_path: Path
) -> None:
    """A sample without a field, a key twice, no samples, a pickle."""
    path = tar_file(tmp_path / "t.tar", members)
    with pytest.raises(BadJob, match=message):
        len(stoker.data.webdataset(path, **({"fields": ["png", "cls"]} | given)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (tarfile.GNUTYPE_SPARSE, r"has a\.npy with holes.*\nWrite it again without --sparse"),
        (tarfile.LNKTYPE, r"has a\.npy as a link to b\.npy.*\nWrite it again with --dereference --hard-dereference"),
        (tarfile.SYMTYPE, r"has a\.npy as a link to b\.npy"),
    ],
    ids=["sparse", "hard link", "link"],
)
def test_a_part_without_its_content_is_no_part_that_is_not_there(kind: bytes, message: str, tmp_path: Path) -> None:
    """Of files with two names tar keeps one: the other would be a sample less. Zeros left out move what follows."""
    with tarfile.open(tmp_path / "t.tar", "w", format=tarfile.GNU_FORMAT) as file:
        member = tarfile.TarInfo("a.npy")
        member.type, member.linkname = kind, "b.npy"
        file.addfile(member)
    with pytest.raises(BadJob, match=rf"t\.tar {message}"):
        len(stoker.data.webdataset(tmp_path / "t.tar", fields=["npy"]))


@pytest.mark.parametrize(
    ("members", "classes", "message"),
    [
        ([("a.png", png_of(1)[:60]), ("a.cls", b"1")], [], r"a\.png in .*t\.tar cannot be read: .*\n.*data check"),
        ([("a.png", png_of(1)), ("a.cls", b"dgo")], ["cat", "dog"], "'dgo' is no class. Did you mean 'dog'"),
        ([("a.png", png_of(1)), ("a.cls", b"7")], ["cat", "dog"], "there are 2 classes, it is of number 7"),
    ],
)
def test_a_member_that_cannot_be_read_is_named(
    members: list[tuple[str, bytes]], classes: list[str], message: str, tmp_path: Path
) -> None:
    """With its shard, and what to do."""
    source = stoker.data.webdataset(tar_file(tmp_path / "t.tar", members), fields=["png", "cls"], classes=classes)
    with pytest.raises(BadJob, match=message):
        source.sample(0)


def test_a_shard_cut_off_or_no_tar_at_all_is_told(tmp_path: Path) -> None:
    """When the index is made."""
    path = tar_file(tmp_path / "t.tar", [("a.bin", bytes(5000)), ("b.bin", bytes(5000))])
    path.write_bytes(path.read_bytes()[:7000])
    with pytest.raises(BadJob, match=r"t\.tar cannot be read as tar: .*(ends within b\.bin|unexpected end)"):
        len(stoker.data.webdataset(path, fields=["bin"]))
    path.write_bytes(b"nothing of the kind" * 100)
    with pytest.raises(BadJob, match="cannot be read as tar"):
        len(stoker.data.webdataset(path, fields=["bin"]))


def test_a_clean_list_leaves_samples_out(tmp_path: Path) -> None:
    """By shard and key."""
    pattern = shard_files(tmp_path)
    dropped = (Dropped(id="part-001.tar:000001", why="corrupt"),)
    clean = CleanList(source=str(tmp_path), made_at="2026-01-01T00:00:00Z", kept=47, dropped=dropped)
    source = stoker.data.webdataset(pattern, fields=["png", "cls"], clean=clean)
    assert len(source) == COUNT - 1
    assert "1 samples are left out" in str(source.note)
    assert all(source.sample_id(at) != "part-001.tar:000001" for at in range(len(source)))


def test_the_fingerprint_changes_when_a_shard_does(tmp_path: Path) -> None:
    """By size and time, and by what is read of it; not when only the index is made again."""
    pattern = shard_files(tmp_path)
    first = stoker.data.webdataset(pattern, fields=["png", "cls"]).fingerprint
    assert stoker.data.webdataset(pattern, fields=["png", "cls"]).fingerprint == first
    assert stoker.data.webdataset(pattern, fields=["png"]).fingerprint != first
    os.utime(tmp_path / "part-001.tar", ns=(7, 7))
    assert stoker.data.webdataset(pattern, fields=["png", "cls"]).fingerprint != first

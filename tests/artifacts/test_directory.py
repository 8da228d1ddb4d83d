"""Versions of a model: whole or not at all, and what somebody else may have put there."""

import dataclasses
import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from stoker.artifacts import MANIFEST, publish, read, versions
from stoker.errors import BadArtifact
from stoker.records import DynamicDim, FileDigest, Manifest, TensorSpec, Tolerance
from stoker.store import files
from stoker.store.files import Disk, aside_path, installed
from stoker.testing.tiny_models import tiny_artifact


def test_versions_are_numbered_and_the_newest_is_read(tmp_path: Path) -> None:
    """A second export becomes version 2; a version asked for by its directory is that one."""
    first, second = tiny_artifact(tmp_path), tiny_artifact(tmp_path, seed=1)
    assert versions(tmp_path / "tiny") == (1, 2)
    assert (read(tmp_path / "tiny").version, read(first.path).version) == (2, 1)
    assert read(second.path).digest == second.digest != first.digest


def test_an_artifact_read_again_is_the_one_written(tmp_path: Path) -> None:
    """Manifest, golden answers and files survive the disk."""
    written = tiny_artifact(tmp_path, kind="tokens")
    found = read(tmp_path / "tiny")
    found.verify()
    assert found.manifest == written.manifest
    assert set(found.golden().inputs) == {"input_ids", "attention_mask"}
    assert found.num_bytes == sum(path.stat().st_size for path in found.path.iterdir() if path.name != MANIFEST)


@pytest.mark.parametrize(("gone", "lacking"), [("outputs", "output 'y'"), ("inputs", "input 'x'")])
def test_golden_answers_that_check_nothing_are_told(gone: str, lacking: str, tmp_path: Path) -> None:
    """Without an answer to compare with, any answer would be the right one."""
    artifact = tiny_artifact(tmp_path)
    whole = artifact.golden()
    less = dataclasses.replace(whole, **{gone: {}})
    save_file(less.as_tensors(), artifact.path / artifact.manifest.golden)
    with pytest.raises(BadArtifact, match=rf"golden\.safetensors has no {lacking}"):
        artifact.golden()


@pytest.mark.parametrize("name", ["01", "1a", "-1", "²", "9" * 5000, ".writing-1-7-00000000", "notes.txt"])
def test_what_is_not_named_for_a_version_is_none(tmp_path: Path, name: str) -> None:
    """Other names in a model's directory are no versions, however like numbers they look."""
    tiny_artifact(tmp_path)
    try:
        shutil.copytree(tmp_path / "tiny" / "1", tmp_path / "tiny" / name)
    except OSError as problem:
        assert problem.errno == errno.ENAMETOOLONG  # noqa: PT017 - then there is no such name to be misled by
    assert versions(tmp_path / "tiny") == (1,)


def test_half_a_copy_is_no_version_until_its_manifest_is_there_and_then_told(tmp_path: Path) -> None:
    """Without a manifest there is no version; with one and half the files, `verify` names what is missing."""
    artifact = tiny_artifact(tmp_path)
    half = tmp_path / "tiny" / "2"
    half.mkdir()
    shutil.copy(artifact.graph_path, half)
    assert versions(tmp_path / "tiny") == (1,)
    shutil.copy(artifact.path / MANIFEST, half)
    with pytest.raises(BadArtifact, match=r"has no golden\.safetensors"):
        read(half).verify()


@pytest.mark.parametrize("change", ["cut", "flipped"])
def test_a_file_that_is_not_what_was_exported_is_told(tmp_path: Path, change: str) -> None:
    """A file cut short, and one of the right size with a bit flipped."""
    artifact = tiny_artifact(tmp_path)
    content = artifact.graph_path.read_bytes()
    artifact.graph_path.write_bytes(content[:-7] if change == "cut" else bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(BadArtifact, match=r"model\.onnx is not what was exported"):
        artifact.verify()


def test_a_link_out_of_the_artifact_is_refused(tmp_path: Path) -> None:
    """A graph that is elsewhere may be changed there."""
    artifact = tiny_artifact(tmp_path)
    artifact.graph_path.rename(tmp_path / "elsewhere.onnx")
    artifact.graph_path.symlink_to(tmp_path / "elsewhere.onnx")
    with pytest.raises(BadArtifact, match="link"):
        artifact.verify()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"graph": "../../model.onnx"}, "outside"),
        ({"graph": "/etc/passwd"}, "outside"),
        ({"golden": "C:\\golden.safetensors"}, "outside"),
        ({"graph": "other.onnx"}, "no digest of 'other.onnx'"),
        ({"inputs": ()}, "has no inputs"),
        ({"inputs": (TensorSpec(name="x", datatype="FP32", shape=("batch", -8)),)}, "the shape"),
        ({"outputs": (TensorSpec(name="y", datatype="FP32", shape=(3, "batch")),)}, "the batch comes first"),
        ({"inputs": (TensorSpec(name="x", datatype="FP32", shape=()),) * 2}, "two inputs of one name"),
        ({"labels": {"z": ("a",)}}, "labels of 'z'"),
        ({"dims": (DynamicDim(name="tokens", low=5, high=4),)}, "from 5 to 4"),
        ({"tolerance": Tolerance(absolute=float("nan"), relative=0.0)}, "by nan"),
    ],
)
def test_a_manifest_that_cannot_be_meant_is_refused(tmp_path: Path, changes: dict, told: str) -> None:
    """Paths that leave the directory, and contradictions, are found before anything is loaded."""
    artifact = tiny_artifact(tmp_path, **changes)
    with pytest.raises(BadArtifact, match=told):
        read(artifact.path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"\xff", b"[" * 100_000])
def test_a_manifest_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    """Damaged JSON, other JSON, and JSON that is nested without end."""
    artifact = tiny_artifact(tmp_path)
    (artifact.path / MANIFEST).write_bytes(content)
    with pytest.raises(BadArtifact, match="cannot be read"):
        read(artifact.path)


def test_a_huge_manifest_is_not_read(tmp_path: Path) -> None:
    """Its size is looked at first."""
    artifact = tiny_artifact(tmp_path)
    os.truncate(artifact.path / MANIFEST, 2**40)
    with pytest.raises(BadArtifact, match=r"1,099,511,627,776 bytes"):
        read(artifact.path)


def test_a_manifest_of_another_version_is_refused(tmp_path: Path) -> None:
    """The schema's number is compared, not guessed around."""
    artifact = tiny_artifact(tmp_path)
    document = json.loads((artifact.path / MANIFEST).read_text())
    (artifact.path / MANIFEST).write_text(json.dumps(document | {"schema": 2}))
    with pytest.raises(BadArtifact, match="schema version 2"):
        read(artifact.path)


def test_what_is_no_model_is_told_with_a_remedy(tmp_path: Path) -> None:
    """An empty directory, and one that is not there."""
    for place in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(BadArtifact, match="is no exported model") as caught:
            read(place)
        assert "stoker export" in str(caught.value)


def test_a_failed_export_leaves_nothing_behind(tmp_path: Path) -> None:
    """Neither a version nor anything aside."""

    def write(directory: Path, digests: object) -> None:
        (directory / "half").write_bytes(b"x")
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        publish(tmp_path / "tiny", write)
    assert list((tmp_path / "tiny").iterdir()) == []


def test_leftovers_of_killed_writers_are_cleaned(tmp_path: Path) -> None:
    """The next export removes what an earlier one left aside."""
    model = tmp_path / "tiny"
    left = aside_path(model / "1")
    left.mkdir(parents=True)
    (left / "model.onnx").write_bytes(b"x")
    tiny_artifact(tmp_path)
    assert [one.name for one in model.iterdir()] == ["1"]


def test_two_exports_into_one_model_each_leave_a_whole_version(tmp_path: Path) -> None:
    """The second begins and ends while the first one writes: neither removes what the other has half written."""
    made = []

    def write(directory: Path, digests: Callable[[], tuple[FileDigest, ...]]) -> Manifest:
        (directory / "model.onnx").write_bytes(b"graph")
        made.append(tiny_artifact(tmp_path).path.name)
        return replace(original, files=digests())

    original = tiny_artifact(tmp_path / "other").manifest
    artifact = publish(tmp_path / "tiny", write)
    assert (made, artifact.path.name) == (["1"], "2")
    assert (artifact.path / "model.onnx").read_bytes() == b"graph"
    assert sorted(path.name for path in (tmp_path / "tiny").iterdir()) == ["1", "2"]


def test_without_locks_a_half_written_version_is_kept_for_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is then unknown whether its writer lives; after a day it is removed."""

    def none(_descriptor: int) -> bool:
        raise files.LocksUnsupported

    monkeypatch.setattr(files, "try_lock", none)
    young, old = (aside_path(tmp_path / "tiny" / name) for name in ("young", "old"))
    for left in (young, old):
        left.mkdir(parents=True)
    os.utime(old, (1.0, 1.0))
    tiny_artifact(tmp_path)
    assert young.exists()
    assert not old.exists()


class Full(Disk):
    """A disk on which nothing more fits."""

    def write(self, descriptor: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_told_with_a_remedy_that_fits(tmp_path: Path) -> None:
    """The error is a BadArtifact, and nothing is left aside."""
    with installed(Full()), pytest.raises(BadArtifact, match="the disk is full") as caught:
        tiny_artifact(tmp_path)
    assert "-o DIR" in str(caught.value)
    assert list((tmp_path / "tiny").iterdir()) == []


class Recording(Disk):
    """Notes what is synced, and when names change."""

    def __init__(self) -> None:
        self.did: list[str] = []

    def sync_directory(self, path: Path) -> None:
        self.did.append("sync directory")
        super().sync_directory(path)

    def sync(self, descriptor: int) -> None:
        self.did.append("sync")
        super().sync(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        self.did.append("rename")
        super().rename(source, target)


def test_every_file_is_on_the_disk_before_its_name_is(tmp_path: Path) -> None:
    """Libraries do not wait for the disk: files and directory are synced before the rename, the name after it."""
    disk = Recording()
    with installed(disk):
        artifact = tiny_artifact(tmp_path)
    at = disk.did.index("rename")
    assert disk.did[:at].count("sync") >= len(list(artifact.path.iterdir()))
    assert disk.did[at - 1] == "sync directory"
    assert disk.did[at + 1 :] == ["sync directory"]


@pytest.mark.parametrize(
    ("code", "said", "remedy"),
    [
        (errno.ENOSPC, "the disk is full", "Free some space"),
        (errno.EROFS, "the file system is read-only", "Choose another place"),
        (errno.EACCES, "permission denied", "Make it writable"),
    ],
)
def test_a_place_that_cannot_be_written_has_the_remedy_that_fits(
    tmp_path: Path, code: int, said: str, remedy: str
) -> None:
    """Space is asked for where the disk is full alone; another place is named with the option of an export."""

    def write(*_: object) -> Manifest:
        raise OSError(code, "x")

    with pytest.raises(BadArtifact, match=said) as caught:
        publish(tmp_path / "digits", write)
    assert str(caught.value.remedy).startswith(remedy)
    assert str(caught.value.remedy).endswith("hoose another place with -o DIR.")
    assert not list((tmp_path / "digits").iterdir())

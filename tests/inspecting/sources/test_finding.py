from __future__ import annotations

import gzip
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from stoker.errors import BadJob
from stoker.inspecting.data_check import FoundTables, find
from stoker.inspecting.image_sources import FoundImages


def _write_idx(path: Path, array: np.ndarray) -> None:
    content = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def _names(found: FoundImages) -> list[tuple[str, str, str | None]]:
    return [(item.id, unit.split, item.label) for unit in found.units for item in map(unit.item, range(len(unit)))]


def test_folders_are_classes_below_splits(tmp_path: Path) -> None:
    """Labels are the folders under a split, names are paths; hidden files are passed over, others are reported."""
    for name in ("train/cat/a.png", "train/cat/deep/b.JPG", "val/dog/c.png", "train/.hidden/x.png", "val/notes.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    found = find(tmp_path)
    assert isinstance(found, FoundImages)
    assert _names(found) == [
        ("train/cat/a.png", "train", "cat"),
        ("train/cat/deep/b.JPG", "train", "cat"),
        ("val/dog/c.png", "valid", "dog"),
    ]
    assert [finding.id for finding in found.findings] == ["val/notes.md"]
    assert found.empty_classes == ()


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_files_are_found_with_their_labels(suffix: str, tmp_path: Path) -> None:
    """Both files of both parts make rows with labels; one file named brings its labels along."""
    for stem, rows in (("train", 5), ("t10k", 3)):
        _write_idx(tmp_path / f"{stem}-images-idx3-ubyte{suffix}", np.zeros((rows, 4, 4), np.uint8))
        _write_idx(tmp_path / f"{stem}-labels-idx1-ubyte{suffix}", np.arange(rows, dtype=np.uint8))
    whole = find(tmp_path)
    assert isinstance(whole, FoundImages)
    names = _names(whole)
    assert names[0] == (f"train-images-idx3-ubyte{suffix}:0", "train", "0")
    assert names[-1] == (f"t10k-images-idx3-ubyte{suffix}:2", "test", "2")
    one = find(tmp_path / f"t10k-images-idx3-ubyte{suffix}")
    assert isinstance(one, FoundImages)
    assert _names(one) == names[5:]


def test_labels_that_are_too_few_are_told(tmp_path: Path) -> None:
    """Images beyond the last label have none, and the counts are said."""
    _write_idx(tmp_path / "train-images-idx3-ubyte", np.zeros((5, 4, 4), np.uint8))
    _write_idx(tmp_path / "train-labels-idx1-ubyte", np.zeros(3, np.uint8))
    found = find(tmp_path)
    assert isinstance(found, FoundImages)
    assert [label for _, _, label in _names(found)] == ["0", "0", "0", None, None]
    assert found.findings[0].detail == "5 images have 3 labels"


def test_shards_have_keys_and_labels(tmp_path: Path) -> None:
    """A key is the name to its first dot; labels are of .cls, or of .json under a name that labels go by."""
    members = {
        "a.png": b"1",
        "a.cls": b"cat\n",
        "b.x.png": b"2",
        "b.json": b'{"label": 7}',
        "c.png": b"3",
        "d/e.jpg": b"4",
        "d/e.json": b"[1]",
    }
    with tarfile.open(tmp_path / "data-valid-000.tar", "w") as archive:
        for name, content in members.items():
            path = tmp_path / "member"
            path.write_bytes(content)
            archive.add(path, name)
    found = find(tmp_path / "data-valid-000.tar")
    assert isinstance(found, FoundImages)
    shard = "data-valid-000.tar"
    assert [(name, label) for name, _, label in _names(found)] == [
        (f"{shard}:a", "cat"),
        (f"{shard}:b", "7"),
        (f"{shard}:c", None),
        (f"{shard}:d/e", "[1]"),
    ]
    assert found.findings == ()


def test_a_label_of_lists_without_end_is_a_fault_of_its_sample(tmp_path: Path) -> None:
    """JSON that is nested deeper than the stack makes one unreadable sample; the next one is read."""
    members = {"a.png": b"1", "a.json": b"[" * 5000, "b.png": b"2", "b.cls": b"cat"}
    with tarfile.open(tmp_path / "data-valid-000.tar", "w") as archive:
        for name, content in members.items():
            (tmp_path / "member").write_bytes(content)
            archive.add(tmp_path / "member", name)
    found = find(tmp_path / "data-valid-000.tar")
    assert isinstance(found, FoundImages)
    items = [item for unit in found.units for item in map(unit.item, range(len(unit)))]
    assert items[0].problem.startswith("cannot be read: lists and objects lie more than 200 deep")
    assert items[1].label == "cat"


def test_numpy_files_pair_images_with_labels(tmp_path: Path) -> None:
    """Keras's names are splits; arrays of another shape are reported."""
    np.savez(
        tmp_path / "set.npz",
        x_train=np.zeros((4, 5, 5)),
        y_train=np.arange(4),
        x_test=np.zeros((2, 5, 5, 3)),
        y_test=np.arange(2),
    )
    np.save(tmp_path / "weights.npy", np.zeros((3, 3)))
    found = find(tmp_path)
    assert isinstance(found, FoundImages)
    assert {(split, label) for _, split, label in _names(found)} == {
        *(("train", str(label)) for label in range(4)),
        ("test", "0"),
        ("test", "1"),
    }
    assert [finding.id for finding in found.findings] == ["weights.npy"]


def test_tables_get_their_split_from_folder_or_name(tmp_path: Path) -> None:
    """`train.csv` and `test/part.csv` are of the splits that they say."""
    (tmp_path / "test").mkdir()
    for name in ("train.csv", "test/part.csv", "more.csv"):
        (tmp_path / name).write_text("a\n1\n")
    found = find(tmp_path)
    assert isinstance(found, FoundTables)
    assert {table.name: table.split for table in found.tables} == {
        "train.csv": "train",
        "test/part.csv": "test",
        "more.csv": "",
    }


def test_images_win_over_tables_beside_them(tmp_path: Path) -> None:
    """A folder with images and a list of them is a folder of images."""
    Image.new("L", (4, 4)).save(tmp_path / "a.png")
    (tmp_path / "labels.csv").write_text("file,label\na.png,1\n")
    found = find(tmp_path)
    assert isinstance(found, FoundImages)
    assert [finding.id for finding in found.findings] == ["labels.csv"]


@pytest.mark.parametrize("name", ["x.tar.gz", "x.docx"])
def test_what_is_not_known_is_refused(name: str, tmp_path: Path) -> None:
    """A file of another kind, and a compressed shard, are errors that say what to do."""
    (tmp_path / name).write_bytes(b"1")
    with pytest.raises(BadJob) as caught:
        find(tmp_path / name)
    assert caught.value.remedy

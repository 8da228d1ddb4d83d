"""Images in folders of classes, and in one folder with a table of labels."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

import stoker
from stoker.data.files.image_files import ImageFolder
from stoker.errors import BadJob
from stoker.records import CleanList
from stoker.records.data_check import Dropped
from tests.data.files.making import CLASSES, COUNT, image_files, label_of, pixels_of, png_of


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """48 images in three folders."""
    return image_files(tmp_path / "pets")


def test_folders_are_classes_and_files_samples(root: Path) -> None:
    """In the order of their paths; nothing is read before it is needed."""
    source = stoker.data.image_folder(root)
    assert "_listing" not in vars(source)
    assert (len(source), source.classes, source.num_classes, source.note) == (COUNT, CLASSES, 3, None)
    names = [source.sample_id(at) for at in range(COUNT)]
    assert names == sorted(names)
    assert names[0] == "cat/0000.png"
    for at in (0, 17, 40):
        number = int(Path(names[at]).stem)
        pixels, label = source.sample(at)
        assert torch.equal(pixels, torch.from_numpy(pixels_of(number).transpose(2, 0, 1)))
        assert label == label_of(number) == source.labels()[at]


def test_files_below_folders_of_folders_count_and_hidden_ones_do_not(root: Path) -> None:
    """What is no image by its name is reported."""
    (root / "dog" / "more").mkdir()
    (root / "dog" / "more" / "deep.PNG").write_bytes(png_of(99))
    (root / "dog" / ".thumb.png").write_bytes(png_of(98))
    (root / ".git").mkdir()
    (root / "dog" / "notes.txt").write_text("hello")
    source = stoker.data.image_folder(root)
    assert len(source) == COUNT + 1
    assert source.note == f"1 files in {root} are no images by their names, as dog/notes.txt"


def test_a_folder_that_leads_back_to_itself_ends(root: Path) -> None:
    """Links are followed, once."""
    (root / "owl" / "again").symlink_to(root, target_is_directory=True)
    assert len(stoker.data.image_folder(root)) == COUNT


def test_classes_can_be_given_in_an_order(root: Path) -> None:
    """Numbers follow it."""
    source = stoker.data.image_folder(root, classes=["owl", "cat", "dog"])
    assert source.sample_id(0).startswith("cat/")
    assert source.labels()[0] == 1


def test_labels_can_come_from_a_table(tmp_path: Path) -> None:
    """One flat folder; files that the table does not name are left aside."""
    for at in range(4):
        (tmp_path / f"{at}.png").write_bytes(png_of(at))
    (tmp_path / "labels.csv").write_text("file,label\n2.png,b\n0.png,a\n1.png,b\n")
    source = stoker.data.image_folder(tmp_path, labels=tmp_path / "labels.csv")
    assert [(source.sample_id(at), source.sample(at)[1]) for at in range(3)] == [
        ("0.png", 0),
        ("1.png", 1),
        ("2.png", 1),
    ]


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (range(12), [*map(str, range(12))]),
        ([10, 9, 100], ["9", "10", "100"]),
        (["10", "9", "x"], ["10", "9", "x"]),
        (["-1", "10", "9"], ["-1", "10", "9"]),
        (["1", "01", "²"], ["01", "1", "²"]),
        (["10", "1", "01"], ["01", "1", "10"]),
    ],
)
def test_labels_that_are_numbers_are_in_the_order_of_numbers(
    labels: Sequence[object], classes: list[str], tmp_path: Path
) -> None:
    """Those from 0 on are their own numbers, as the labels of another set or of a script are."""
    lines = []
    for at, label in enumerate(labels):
        (tmp_path / f"{at}.png").write_bytes(png_of(at))
        lines.append(f"{at}.png,{label}\n")
    (tmp_path / "labels.csv").write_text("file,label\n" + "".join(lines), encoding="utf-8")
    source = stoker.data.image_folder(tmp_path, labels=tmp_path / "labels.csv")
    assert source.classes == tuple(classes)
    assert [source.classes[number] for number in source.labels()] == [
        str(label) for _, label in sorted(zip(map("{}.png".format, range(len(labels))), labels, strict=True))
    ]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("file,label\n9.png,a\n", r"9\.png cannot be read: No such"),
        ("file,label\n0.png\n", "row 0 has 1 fields"),
        ("file,label\n0.png,\n", "row 0 wants a file and its class"),
        ("file,label\n0.png,\udce9\n", "row 0 wants"),
        ("file,label\n0.png,a\n0.png,b\n", r"row 1: '0\.png' has a label already"),
        ("file,label\n0.png,a\n./0.png,b\n", r"row 1: '\./0\.png' has a label already"),
        ("0.png,a\n1.png,b\n", r"has no header: its first line names the image '0\.png', which would be left out"),
    ],
)
def test_a_table_of_labels_that_is_wrong_is_told(table: str, message: str, tmp_path: Path) -> None:
    """With the row."""
    (tmp_path / "0.png").write_bytes(png_of(0))
    (tmp_path / "labels.csv").write_text(table, errors="surrogateescape")
    with pytest.raises(BadJob, match=message):
        len(stoker.data.image_folder(tmp_path, labels=tmp_path / "labels.csv"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda root: (root / "yak").mkdir(), r"has no images of 'yak' \(48 of the other classes\)"),
        (lambda root: (root / "loose.png").write_bytes(png_of(1)), r"loose\.png is in no folder of a class"),
    ],
)
def test_a_folder_that_is_not_as_it_should_be_is_told(change: object, message: str, root: Path) -> None:
    """An empty class, and an image of none."""
    change(root)  # type: ignore[operator]
    with pytest.raises(BadJob, match=message):
        len(stoker.data.image_folder(root))


def test_no_folder_no_images_and_a_class_that_is_not_named_are_told(root: Path, tmp_path: Path) -> None:
    """Each in words of its own."""
    with pytest.raises(BadJob, match="is no folder"):
        len(stoker.data.image_folder(tmp_path / "absent"))
    (tmp_path / "bare").mkdir()
    with pytest.raises(BadJob, match="there are no images"):
        len(stoker.data.image_folder(tmp_path / "bare"))
    with pytest.raises(BadJob, match=r"is of class 'dog'.*Known: cat, owl"):
        len(stoker.data.image_folder(root, classes=["cat", "owl"]))


def test_a_clean_list_leaves_samples_out(root: Path) -> None:
    """By their paths, also from a folder above; the number is reported."""
    dropped = tuple(Dropped(id=f"pets/cat/{at:04}.png", why="corrupt") for at in (0, 3))
    clean = CleanList(source=str(root.parent), made_at="2026-01-01T00:00:00Z", kept=46, dropped=dropped)
    source = stoker.data.image_folder(root, clean=clean)
    assert len(source) == COUNT - 2
    assert source.sample_id(0) == "cat/0006.png"
    assert source.note == "2 of 48 images are left out by the clean list"
    assert source.fingerprint != stoker.data.image_folder(root).fingerprint


def test_an_image_outside_the_classes_may_be_left_out(root: Path) -> None:
    """It is refused by its name, unless the clean list has it."""
    (root / "stray.png").write_bytes((root / "cat/0000.png").read_bytes())
    with pytest.raises(BadJob, match=r"stray\.png is in no folder of a class"):
        len(stoker.data.image_folder(root))
    clean = CleanList(
        source=str(root),
        made_at="2026-01-01T00:00:00Z",
        kept=COUNT,
        dropped=(Dropped(id="stray.png", why="unlabelled"),),
    )
    assert len(stoker.data.image_folder(root, clean=clean)) == COUNT


def test_splits_are_not_learned_as_classes(root: Path) -> None:
    """Folders that are all called as splits are refused, unless classes are given."""
    for folder, name in zip(
        sorted(path for path in root.iterdir() if path.is_dir()), ("test", "train", "val"), strict=True
    ):
        folder.rename(root / name)
    with pytest.raises(BadJob, match="which are parts of a data set and no classes"):
        len(stoker.data.image_folder(root))
    assert len(stoker.data.image_folder(root, classes=["test", "train", "val"])) == COUNT


def test_a_folder_of_training_data_alone_is_no_class(root: Path) -> None:
    """One level too high, every image would be of the class `train`, and every answer right."""
    above = root.parent / "above"
    above.mkdir()
    root.rename(above / "train")
    with pytest.raises(BadJob, match=r"the folders of .*above are called train, which are parts .*\nGive one"):
        len(stoker.data.image_folder(above))


def _renamed(root: Path) -> None:
    (root / "cat" / "0000.png").rename(root / "cat" / "zero.png")


def _rewritten(root: Path) -> None:
    path = root / "cat" / "0000.png"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"?")
    os.utime(path, ns=(1, 1))


@pytest.mark.parametrize("change", [_renamed, _rewritten, lambda root: (root / "owl" / "0002.png").unlink()])
def test_the_fingerprint_changes_when_the_data_do(change: object, root: Path) -> None:
    """A name, a content of the same size, a file less; else it stays."""
    before = stoker.data.image_folder(root).fingerprint
    assert stoker.data.image_folder(root).fingerprint == before
    change(root)  # type: ignore[operator]
    assert stoker.data.image_folder(root).fingerprint != before


def test_reading_in_another_way_is_other_data(root: Path) -> None:
    """Another size, resize, mean or channels."""
    forms = [{}, {"size": 5}, {"size": 5, "resize": "pad"}, {"mean": 0.5}, {"channels": 1}]
    prints = {stoker.data.image_folder(root, **given).fingerprint for given in forms}  # type: ignore[arg-type]
    assert len(prints) == len(forms)


def broken(root: Path) -> ImageFolder:
    """The folder with an image cut off."""
    path = root / "owl" / "0002.png"
    path.write_bytes(path.read_bytes()[:50])
    return stoker.data.image_folder(root)


def test_a_corrupt_image_is_named(root: Path) -> None:
    """With what to do."""
    source = broken(root)
    at = next(at for at in range(COUNT) if source.sample_id(at) == "owl/0002.png")
    with pytest.raises(BadJob, match=r"(?s)owl/0002\.png cannot be read: .*whole one in its place.*data check"):
        source.sample(at)


def test_labels_are_an_array_that_balanced_sampling_can_take(root: Path) -> None:
    """One class number a sample."""
    labels = stoker.data.image_folder(root).labels()
    assert labels.dtype == np.int64
    assert np.bincount(labels).tolist() == [16, 16, 16]

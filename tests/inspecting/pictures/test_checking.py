from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stoker.inspecting import Checked, CheckOptions, check


def _set(path: Path, **arrays: np.ndarray) -> Checked:
    np.savez(path / "set.npz", **arrays)
    return check(path / "set.npz", (), CheckOptions(), workers=1, tell=lambda *_: None)


def _noise(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (rows, 12, 12), np.uint8)


def _told(checked: Checked, fault: str) -> list[tuple[str, tuple[str, ...]]]:
    return [(one.id, one.related) for one in checked.findings if one.fault == fault]


def test_the_test_split_keeps_what_leaks(tmp_path: Path) -> None:
    """Of a picture three times in training and twice in test, one in test is kept and the others are reported."""
    train, test = _noise(20), _noise(10, 1)
    train[[3, 5, 7]] = test[8] = test[2]
    checked = _set(tmp_path, x_train=train, x_test=test)
    kept = ("set.npz/x_test:2",)
    assert _told(checked, "leak") == [(f"set.npz/x_train:{row}", kept) for row in (3, 5, 7)]
    assert _told(checked, "duplicate") == [("set.npz/x_test:8", kept)]


def test_images_that_differ_in_what_no_picture_shows_are_no_duplicates(tmp_path: Path) -> None:
    """A picture at half its contrast, as fractions or standardised, is another one; its copy is a duplicate."""
    images = _noise(20) / 255.0
    images[5], images[9] = images[1] / 2, images[3]
    for name, shift in (("fractions", 0.0), ("standardised", 0.5)):
        (tmp_path / name).mkdir()
        checked = _set(tmp_path / name, x=images - shift)
        assert _told(checked, "duplicate") == [("set.npz:9", ("set.npz:3",))], name


def test_of_two_copies_the_one_with_a_label_is_kept(tmp_path: Path) -> None:
    """The other is left out for having none: without this both would be."""
    from PIL import Image

    (tmp_path / "cat").mkdir()
    for number, image in enumerate(_noise(3)):
        Image.fromarray(image).save(tmp_path / "cat" / f"{number}.png")
    (tmp_path / "0.png").write_bytes((tmp_path / "cat" / "0.png").read_bytes())
    checked = check(tmp_path, (), CheckOptions(), workers=1, tell=lambda *_: None)
    assert _told(checked, "duplicate") == [("0.png", ("cat/0.png",))]
    assert {one.id for one in checked.findings if one.gravity == "fault"} == {"0.png"}


def test_a_large_class_does_not_accuse_a_small_one(tmp_path: Path) -> None:
    """Where nineteen of twenty have one label, so have any ten neighbours: that says nothing of the twentieth."""
    labels = np.where(np.arange(240) % 20 == 0, 1, 0)
    checked = _set(tmp_path, x=_noise(240), y=labels)
    assert _told(checked, "suspect-label") == []
    assert any("too few to contradict any" in note for note in checked.notes)


def test_every_copy_under_two_labels_is_told(tmp_path: Path) -> None:
    """Which label is right is not known, so that none of the copies is left."""
    images = _noise(20)
    images[4] = images[9] = images[1]
    checked = _set(tmp_path, x=images, y=np.arange(20) // 5)  # labels 0, 0 and 1
    assert [name for name, _ in _told(checked, "contradiction")] == ["set.npz:1", "set.npz:4", "set.npz:9"]
    assert _told(checked, "duplicate") == []


def test_of_a_cluster_that_looks_alike_one_is_left(tmp_path: Path) -> None:
    """Three pictures that differ in a little noise: the first stays, the others are reported as its copies."""
    images = np.repeat(np.repeat(_noise(60)[:, :6, :6], 4, axis=1), 4, axis=2)
    for row in (20, 40):
        images[row] = np.clip(images[10].astype(int) + np.random.default_rng(row).integers(-4, 5, (24, 24)), 0, 255)
    checked = _set(tmp_path, x=images)
    assert _told(checked, "near-duplicate") == [("set.npz:20", ("set.npz:10",)), ("set.npz:40", ("set.npz:10",))]


def test_what_all_pictures_share_makes_no_two_alike(tmp_path: Path) -> None:
    """Pictures of one shape with details of their own correlate by 0.98 and more, and are not reported; a copy is."""
    shape = np.zeros((24, 24))
    shape[4:20, 6:18] = 180
    details = np.random.default_rng(0).normal(0, 12, (80, 6, 6)).repeat(4, axis=1).repeat(4, axis=2)
    images = np.clip(shape + details + 30, 0, 255).astype(np.uint8)
    images[70] = np.clip(images[3].astype(int) + np.random.default_rng(1).integers(-2, 3, (24, 24)), 0, 255)
    r = np.corrcoef(images.reshape(80, -1)[:60])
    assert np.median(r[np.triu_indices(60, 1)]) > 0.95
    assert _told(_set(tmp_path, x=images), "near-duplicate") == [("set.npz:70", ("set.npz:3",))]


@pytest.mark.parametrize("sizes", [[(20, 20)] * 30 + [(20, 21)], [(20 + n, 30 + n) for n in range(30)] + [(200, 10)]])
def test_one_odd_size_is_told_of_many(sizes: list[tuple[int, int]], tmp_path: Path) -> None:
    """Among equal sizes any other is odd; among sizes that vary, one far out is."""
    from PIL import Image

    draw = np.random.default_rng(0)
    for number, (width, height) in enumerate(sizes):
        Image.fromarray(draw.integers(0, 256, (height, width), np.uint8)).save(tmp_path / f"{number:03d}.png")
    checked = check(tmp_path, (), CheckOptions(), workers=1, tell=lambda *_: None)
    assert [name for name, _ in _told(checked, "shape")] == [f"{len(sizes) - 1:03d}.png"]


def test_options_leave_things_out(tmp_path: Path) -> None:
    """Without near duplicates and labels neither is looked for, nor noted."""
    np.save(tmp_path / "x.npy", _noise(9))
    checked = check(tmp_path, (), CheckOptions(near=False, labels=False), workers=1, tell=lambda *_: None)
    assert len(checked.notes) == 1
    assert checked.findings == ()

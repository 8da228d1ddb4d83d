from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from stoker.data.idx_files import DownloadPatience, dataset_folders
from stoker.errors import BadJob
from tests.data.idx_files import SmallFashion

INSTALLED = Path("/usr/share/datasets/fashion-mnist")


@pytest.fixture
def small(tmp_path):
    """A small Fashion-MNIST that is nowhere yet."""
    return SmallFashion(tmp_path)


def folders(root: Path | None = None, **environ: str) -> list[str]:
    """The folders looked in under an environment, in order."""
    places = dataset_folders(
        "fashion-mnist",
        root=root,
        below=("fashion-mnist", "FashionMNIST/raw"),
        installed=INSTALLED,
        home="",
        remedy="",
        environ=environ,
    )
    return [folder.as_posix() for folder in places.folders]


def test_folders_in_order_of_preference():
    """What is given comes first, then what is set, then Stoker's cache, then what is installed."""
    assert folders(Path("/mine"), STOKER_DATA="/data", STOKER_CACHE="/cache") == [
        "/mine",
        "/data",
        "/data/fashion-mnist",
        "/data/FashionMNIST/raw",
        "/cache/fashion-mnist",
        "/usr/share/datasets/fashion-mnist",
    ]
    assert folders(XDG_CACHE_HOME="/xdg") == ["/xdg/stoker/fashion-mnist", "/usr/share/datasets/fashion-mnist"]


def test_a_relative_folder_is_of_where_it_was_named(tmp_path, monkeypatch):
    """Files are read later, and perhaps from elsewhere."""
    monkeypatch.chdir(tmp_path)
    assert folders(Path("mine"))[0] == (tmp_path / "mine").as_posix()


def test_the_first_folder_with_both_files_is_taken(small, tmp_path):
    """A folder with one of the two files is passed over; the files of one folder are never mixed with another's."""
    half, whole, later = (small.publish(tmp_path / name) for name in ("half", "whole", "later"))
    (half / "train-labels-idx1-ubyte.gz").unlink()
    found = small.source(half, tmp_path / "missing", whole, later)._find()
    assert {path.parent for path in found} == {whole}


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_may_be_packed_or_not(small, tmp_path, zipped):
    """Both forms are found and read, and then no network is needed."""
    source = small.source(small.publish(tmp_path / "data", zipped=zipped))
    assert source.is_here()
    images, labels = source.arrays()
    assert images.shape == (6, 1, 4, 4)
    assert labels.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_download_is_kept_and_used_again(small, tmp_path):
    """What is nowhere is fetched into the cache, and the next source needs no home."""
    home = small.publish(tmp_path / "home")
    source = small.source(home=home.as_uri())
    assert not source.is_here()
    assert source.arrays()[1].tolist() == [0, 1, 2, 3, 4, 5]
    assert sorted(path.name for path in small.cache.iterdir()) == [
        "train-images-idx3-ubyte.gz",
        "train-labels-idx1-ubyte.gz",
    ]
    assert small.source().arrays()[0].shape == (6, 1, 4, 4)


def test_an_interrupted_download_goes_on_with_what_is_missing(small, tmp_path):
    """A file that is in the cache already is not fetched again."""
    home = small.publish(tmp_path / "home")
    small.cache.mkdir()
    (home / "train-images-idx3-ubyte.gz").rename(small.cache / "train-images-idx3-ubyte.gz")
    assert small.source(home=home.as_uri()).arrays()[0].shape == (6, 1, 4, 4)


def test_what_is_nowhere_is_told_with_where_it_was_looked_for(small, tmp_path):
    """Every folder and the home are in the error, and the remedy."""
    with pytest.raises(BadJob) as caught:
        small.source(tmp_path / "first").arrays()
    text = str(caught.value)
    assert f"train-images-idx3-ubyte (or .gz) is in none of {tmp_path / 'first'}, {small.cache};" in text
    assert "file:///there/is/no/such/home/train-images-idx3-ubyte.gz gave no answer" in text
    assert text.endswith("Install it.")


@pytest.mark.parametrize(
    ("sent", "complaint"),
    [
        (b"<html>Please log in</html>", "is no idx file of its kind"),
        (gzip.compress(bytes(1000)), "is no idx file of its kind"),
        (b"\x1f\x8b\x08\x00cut", "is truncated"),
        (bytes(2**20), "gave more than 64.1 KiB, which is more than the file has"),
    ],
    ids=["a login page", "another file", "cut off", "endless"],
)
def test_a_download_that_is_something_else_is_not_kept(small, tmp_path, sent, complaint):
    """A login page, a cut file, an endless one: an error, and an empty cache."""
    home = small.publish(tmp_path / "home")
    (home / "train-images-idx3-ubyte.gz").write_bytes(sent)
    with pytest.raises(BadJob, match=complaint):
        small.source(home=home.as_uri()).arrays()
    assert not small.cache.exists() or not list(small.cache.iterdir())


def test_a_damaged_file_is_neither_used_nor_replaced(small, tmp_path):
    """Though a good copy is further on and at the home, the user's file stays, and is named with the remedy."""
    mine, later = (small.publish(tmp_path / name) for name in ("mine", "later"))
    damaged = mine / "train-labels-idx1-ubyte.gz"
    damaged.write_bytes(b"\x1f\x8b\x08\x00cut")
    with pytest.raises(BadJob, match=r"train-labels-idx1-ubyte\.gz is truncated") as caught:
        small.source(mine, later, home=later.as_uri()).arrays()
    assert f"Replace {damaged}" in str(caught.value)
    assert damaged.read_bytes() == b"\x1f\x8b\x08\x00cut"


def test_a_damaged_file_in_the_cache_is_not_fetched_over(small, tmp_path):
    """Stoker's own cache is treated in the same way: the user decides."""
    home = small.publish(tmp_path / "home")
    small.publish(small.cache)
    (small.cache / "train-images-idx3-ubyte.gz").write_bytes(b"broken")
    with pytest.raises(BadJob, match="is no idx file"):
        small.source(home=home.as_uri()).arrays()
    assert (small.cache / "train-images-idx3-ubyte.gz").read_bytes() == b"broken"


def test_a_cache_that_cannot_be_made_is_told(small, tmp_path):
    """Where a file is in the way of the cache's folder, the error names it and STOKER_CACHE."""
    home = small.publish(tmp_path / "home")
    small.cache.write_text("in the way")
    with pytest.raises(BadJob, match="cannot be made") as caught:
        small.source(home=home.as_uri()).arrays()
    assert "STOKER_CACHE" in str(caught.value)


def test_a_download_can_be_tried_in_a_hurry(small, tmp_path):
    """With no time at all, even a file next door is too far, and nothing is kept."""
    home = small.publish(tmp_path / "home")
    with pytest.raises(BadJob, match="within 0 s"):
        small.source(home=home.as_uri()).download(DownloadPatience(silence_s=1.0, total_s=0.0))
    assert not small.cache.exists()

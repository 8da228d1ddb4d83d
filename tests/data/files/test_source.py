"""What all sources of files have in common."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import stoker
from stoker.data.files.source import Subset, digest_of_parts, require_choice
from stoker.errors import BadJob
from tests.data.files.making import COUNT, csv_source, folder_source


def test_a_sample_by_its_place_is_prepared(tmp_path: Path) -> None:
    """As a row of the prepared batch, from either end."""
    source = folder_source(tmp_path)
    stored, label = source.sample(7)
    image, target = source[7]
    assert stored.dtype == torch.uint8
    torch.testing.assert_close(image, stored / 255 * 4 - 2, rtol=0, atol=1e-6)
    assert int(target) == label
    assert torch.equal(source[7 - COUNT][0], image)
    with pytest.raises(IndexError, match=f"{COUNT} samples"):
        source[COUNT]


def test_a_part_gives_what_the_whole_gives(tmp_path: Path) -> None:
    """Samples, names, labels, rows and classes, at the part's own places."""
    source = csv_source(tmp_path)
    train, valid, test = source.split(valid=0.25)
    assert isinstance(train, Subset)
    assert isinstance(valid, Subset)
    assert test is None
    at = int(valid.indices[3])
    assert torch.equal(valid[3][0], source[at][0])
    assert valid.sample_id(3) == source.sample_id(at)
    labels, of_valid = source.labels(), valid.labels()
    assert labels is not None
    assert of_valid is not None
    assert of_valid[3] == labels[at]
    assert torch.equal(valid.rows(torch.tensor([3, 1]).numpy())[0], source.rows(valid.indices[[3, 1]])[0])
    assert valid.classes == source.classes
    assert len(train) + len(valid) == len(source)
    assert valid.name == "t.csv[valid]"


def test_parts_have_fingerprints_of_their_own(tmp_path: Path) -> None:
    """Another part, seed or share is other data."""
    source = csv_source(tmp_path)
    first = source.split(valid=0.25)
    others = [source.split(valid=0.25, seed=1), source.split(valid=0.5), source.split(valid=0.25, stratify=False)]
    prints = {part.fingerprint for splits in (first, *others) for part in splits[:2] if part is not None}
    assert len(prints) == 8
    again = csv_source(tmp_path).split(valid=0.25)
    assert again.train is not None
    assert first.train is not None
    assert again.train.fingerprint == first.train.fingerprint


def test_amounts_are_no_classes_to_divide_by(tmp_path: Path) -> None:
    """Of prices that hardly repeat, validation would get those alone that do: few samples have one in common."""
    prices = [*range(200), *[7] * 20]
    (tmp_path / "prices.csv").write_text("x,y\n" + "".join(f"1,{price}\n" for price in prices))
    source = stoker.data.csv(tmp_path / "prices.csv", target="y")
    valid = source.split(valid=0.1).valid
    assert valid is not None
    assert valid.fingerprint == source.split(valid=0.1, stratify=False).valid.fingerprint
    assert (valid.labels() == 7).sum() < 10
    named = stoker.data.csv(tmp_path / "prices.csv", target="y", target_kind="class").split(valid=0.1)
    assert "stratified" in named.train.fingerprint
    assert "unstratified" not in named.train.fingerprint


def test_parts_of_a_digest_do_not_run_into_each_other() -> None:
    """Names that end where others begin are other names."""
    assert digest_of_parts(["ab", "c"]) != digest_of_parts(["a", "bc"])
    assert digest_of_parts("a", "b") != digest_of_parts(["a", "b"])
    assert digest_of_parts(b"x").startswith("sha256:")


@pytest.mark.parametrize(
    "make",
    [
        lambda path, names: stoker.data.image_folder(path, classes=names),
        lambda path, names: stoker.data.csv(path / "t.csv", target="y", classes=names),
        lambda path, names: stoker.data.csv(path / "t.csv", categories={"c": names}),
    ],
    ids=["folder", "target", "category"],
)
def test_two_classes_have_two_names(make: Callable[[Path, list[str]], object], tmp_path: Path) -> None:
    """Of two with one name one would never come up, whatever the files hold."""
    with pytest.raises(BadJob, match="'cat' is named twice among 3 classes or values"):
        make(tmp_path, ["cat", "dog", "cat"])


def test_a_word_that_is_not_known_is_told() -> None:
    """With those that are."""
    with pytest.raises(BadJob, match=r"resize=…: 'streched' is not known\nGive one of stretch, crop"):
        require_choice("resize=…", "streched", ("stretch", "crop"))

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stoker
from stoker.errors import BadJob
from stoker.jobs import SGD, Job, holdout
from stoker.loading.datasets import datasets_of
from stoker.units import epochs
from tests.data.files.making import image_files, png_of, put
from tests.loading.data import Noisy, Squares


def job(**changes) -> Job:
    """A job over ten samples."""
    settings = {
        "model": object,
        "data": Squares(10),
        "loss": "mse",
        "optimizer": SGD(lr=0.1),
        "batch": 4,
        "until": epochs(1),
    }
    return Job(**settings | changes)


def test_a_job_may_have_training_data_alone() -> None:
    """Nothing to choose by and nothing to test on; a run of ten samples by fours."""
    data = datasets_of(job())
    assert (data.valid, data.test, data.note) == (None, None, None)
    assert data.extent(job()).updates_per_epoch == 3
    assert data.fingerprint().startswith("train sha256:")


def test_a_holdout_is_taken_from_the_training_data() -> None:
    """What validates does not train, and the test set is not touched."""
    data = datasets_of(job(valid=holdout(0.2), test=Squares(5)))
    assert [len(one) for one in (data.train, data.valid, data.test)] == [8, 2, 5]
    seen = [set(one.fetch(np.arange(len(one)), 0)[1].tolist()) for one in (data.train, data.valid)]
    assert seen[0] | seen[1] == {i * i for i in range(10)}


def test_each_set_has_its_share_in_the_fingerprint() -> None:
    """Swapping validation and test data is another job."""
    one = datasets_of(job(valid=Squares(3), test=Squares(4)))
    other = datasets_of(job(valid=Squares(4), test=Squares(3)))
    assert one.fingerprint() != other.fingerprint()
    assert datasets_of(job(valid=holdout(0.2))).fingerprint() != datasets_of(job(valid=holdout(0.3))).fingerprint()


def test_a_trial_without_the_test_set_had_the_jobs_data() -> None:
    """Its fingerprint is of the same sets; that of another training or test set is not."""
    whole = job(valid=holdout(0.2), test=Squares(5))
    data = datasets_of(whole)
    assert data.were_of(data.fingerprint())
    assert data.were_of(datasets_of(job(valid=holdout(0.2))).fingerprint())
    assert not data.were_of(datasets_of(job(valid=holdout(0.2), test=Squares(6))).fingerprint())
    assert not data.were_of(datasets_of(job(data=Squares(11), valid=holdout(0.2))).fingerprint())


def test_an_error_names_the_set() -> None:
    """`valid` and `test` are said to be what they are."""
    with pytest.raises(BadJob, match=r"^valid has no samples"):
        datasets_of(job(valid=[]))
    with pytest.raises(BadJob, match=r"^test is a str"):
        datasets_of(job(test="none"))


def test_the_jobs_seed_keys_the_draws_of_items() -> None:
    """Another seed, other augmentation; the same seed, the same."""
    first, again, other = (
        datasets_of(job(data=Noisy(10), seed=seed)).train.fetch(np.array([3]), 0)["x"] for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_note_of_a_source_is_passed_on() -> None:
    """What the user should know about a choice of data."""

    class Noted(Squares):
        note = "the digits stand in"

    assert datasets_of(job(data=Noted(10))).note == "the digits stand in"


def test_a_set_that_numbers_classes_otherwise_is_refused(tmp_path: Path) -> None:
    """Without an image of the second class the third would take its number; the classes of data are the remedy."""
    data = stoker.data.image_folder(image_files(tmp_path / "train"))
    for name in ("cat", "owl"):
        put(tmp_path / "valid" / name / "0.png", png_of(1))
    valid = tmp_path / "valid"
    with pytest.raises(BadJob, match=r"^class 1 is 'owl' in valid and 'dog' in data"):
        datasets_of(job(data=data, valid=stoker.data.image_folder(valid)))
    with pytest.raises(BadJob, match=r"^class 1 is 'owl' in valid/unseen and 'dog' in data"):
        datasets_of(job(data=data, valid={"seen": holdout(0.2), "unseen": stoker.data.image_folder(valid)}))
    alike = stoker.data.image_folder(valid, classes=data.classes)
    assert (alike.labels().tolist(), alike.note) == ([0, 2], f"{valid} has no images of 'dog'")
    assert datasets_of(job(data=data, valid=alike, test=stoker.data.image_folder(valid, classes=["cat", "dog", "owl"])))
    with pytest.raises(BadJob, match=r"^image mean is 0\.5 in test and 0\.0 in data"):
        datasets_of(job(data=data, test=stoker.data.image_folder(tmp_path / "train", mean=0.5)))
    parts = data.split(valid=0.2)
    with pytest.raises(BadJob, match=r"^class 1 is 'owl' in valid"):
        datasets_of(job(data=parts.train, valid=stoker.data.packed(stoker.data.image_folder(valid))))


@pytest.mark.parametrize(
    ("given", "data", "valid", "message"),
    [
        ({}, "a,b,y\n1,2,0\n", "b,a,y\n1,2,0\n", "feature 0 is 'b' in valid and 'a' in data"),
        ({}, "a,y\n1,0\n", "a,y\n1,yes\n", "target is 'a class' in valid and 'a number' in data"),
        ({}, "a,y\n1,u\n1,v\n", "a,y\n1,v\n", "class 0 is 'v' in valid and 'u' in data"),
        ({"categories": ["c"]}, "c,y\nu,0\nv,1\n", "c,y\nv,0\n", "'c', value 0 is 'v' in valid and 'u' in data"),
        ({"missing": "mean"}, "a,y\n1,0\n,1\n", "a,y\n2,0\n,1\n", "mean of 'a' is 2.0 in valid and 1.0 in data"),
    ],
)
def test_a_table_with_other_columns_categories_or_means_is_refused(
    given: dict[str, Any], data: str, valid: str, message: str, tmp_path: Path
) -> None:
    """Each by its first difference."""
    tables = [
        stoker.data.csv(put(tmp_path / f"{name}.csv", text.encode()), target="y", **given)
        for name, text in (("data", data), ("valid", valid))
    ]
    with pytest.raises(BadJob, match="^" + message):
        datasets_of(job(data=tables[0], valid=tables[1]))


def test_a_table_like_the_other_and_one_of_fewer_values_are_taken(tmp_path: Path) -> None:
    """What agrees where both say something is no difference: numbers mean the same."""
    put(tmp_path / "train.csv", b"a,c,y\n1,u,no\n2,v,yes\n,v,yes\n")
    put(tmp_path / "valid.csv", b"c,a,y\nv,1,yes\nv,,yes\n")
    put(tmp_path / "first.csv", b"a,c,y\n1,u,no\n")
    settings: dict[str, Any] = {"target": "y", "categories": ["c"], "missing": {"a": "mean"}}
    data = stoker.data.csv(tmp_path / "train.csv", **settings)
    valid = stoker.data.csv(tmp_path / "valid.csv", like=data)
    sets = datasets_of(job(data=data, valid=valid, test=stoker.data.csv(tmp_path / "first.csv", **settings)))
    assert sets.test is not None
    assert len(sets.test) == 1


@pytest.mark.parametrize(
    ("data", "valid", "problem"),
    [
        ({"cat": 0, "dog": 1}, {"dog": 0}, "class 0 is 'dog' in valid and 'cat' in data"),
        ({"cat": 0, "dog": 1}, {"cat": 1, "dog": 2}, "class 1 is 'cat' in valid and 'dog' in data"),
        ({"cat": 0, "dog": 1}, {"cat": 0, "cow": 1}, "class 1 is 'cow' in valid and 'dog' in data"),
    ],
)
def test_a_dataset_as_those_of_torchvision_is_compared_too(
    data: dict[str, int], valid: dict[str, int], problem: str
) -> None:
    """By its `class_to_idx`, number by number; one whose targets are transformed has other numbers than these."""
    sets = [numbered(Squares(10), data), numbered(Squares(4), valid)]
    with pytest.raises(BadJob, match=f"^{problem}"):
        datasets_of(job(data=sets[0], valid=sets[1]))
    sets[1].target_transform = int  # type: ignore[attr-defined]
    assert datasets_of(job(data=sets[0], valid=sets[1])).note is None


@pytest.mark.parametrize(
    ("data", "test", "note"),
    [
        ({"ant": 0, "cat": 3, "dog": 5}, {"cat": 3, "dog": 5}, None),
        ({"cat": 3}, {"cat": 3, "dog": 5}, "class 5 of test, 'dog', is not in data"),
        ({"0 - zero": 0, "1 - one": 1}, {"0": 0, "1": 1}, "class 0 is '0' in test and '0 - zero' in data; they are"),
        ({"cat": 0, "lion": 0}, {"lion": 0}, None),
        ({"cat": [0]}, {"dog": [0]}, None),
    ],
)
def test_datasets_whose_numbers_may_mean_the_same_are_taken(
    data: dict[str, int], test: dict[str, int], note: str | None
) -> None:
    """With a note where the model has not seen a class, or where no name of one set is in the other."""
    found = datasets_of(job(data=numbered(Squares(10), data), test=numbered(Squares(4), test))).note
    assert found is None if note is None else (found or "").startswith(note)


def test_folders_of_images_without_a_name_in_common_are_taken(tmp_path: Path) -> None:
    """A model that rebuilds images has no use for the names of their folders; orders that differ are refused."""
    for folder, names in (("train", ("images",)), ("other", ("imgs",)), ("shifted", ("a", "images"))):
        for name in names:
            put(tmp_path / folder / name / "0.png", png_of(1))
    train, other, shifted = (stoker.data.image_folder(tmp_path / name) for name in ("train", "other", "shifted"))
    assert "is 'imgs' in test and 'images' in data; they are" in (datasets_of(job(data=train, test=other)).note or "")
    with pytest.raises(BadJob, match="is 'a' in test and 'images' in data, so that"):
        datasets_of(job(data=train, test=shifted))


def numbered(data: Squares, numbers: dict[str, int]) -> Squares:
    """`data` with numbers of classes, as torchvision's datasets have them."""
    data.class_to_idx = numbers  # type: ignore[attr-defined]
    return data


class ByEpoch(torch.utils.data.Dataset[tuple[float, float]]):
    """Items that depend on the epoch that was set."""

    def __init__(self) -> None:
        self.epoch, self.told = -1, list[int]()

    def set_epoch(self, epoch: int) -> None:
        """As PyTorch's samplers have it."""
        self.epoch = epoch
        self.told.append(epoch)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[float, float]:
        return float(index), float(self.epoch)


@pytest.mark.parametrize(
    "wrapped", [lambda d: d, lambda d: torch.utils.data.Subset(d, range(4))], ids=["alone", "in a subset"]
)
def test_the_epoch_of_a_dataset_is_set(wrapped: Any) -> None:
    """`set_epoch` is called where the epoch changes, also of a dataset in a subset, or one that two sets share."""
    dataset = ByEpoch()
    data = datasets_of(job(data=wrapped(dataset), valid=dataset))
    rows = np.arange(2)
    for epoch in (0, 1, 1, 2):
        assert data.train.fetch(rows, epoch)[1].tolist() == [epoch, epoch]
    assert dataset.told[-3:] == [0, 1, 2]
    assert data.valid.fetch(rows, 0)[1].tolist() == [0, 0]
    assert data.train.fetch(rows, 2)[1].tolist() == [2, 2]


class Slots:
    """Items of the epoch that was set; without weak references."""

    __slots__ = ("epoch",)

    def set_epoch(self, epoch: int) -> None:
        """As PyTorch's samplers have it."""
        self.epoch = epoch

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[float, float]:
        return float(index), float(self.epoch)


def test_the_epoch_of_a_dataset_without_weak_references_is_set() -> None:
    """A class with `__slots__` has none."""
    train = datasets_of(job(data=Slots())).train
    for epoch in (0, 1, 0):
        assert train.fetch(np.arange(2), epoch)[1].tolist() == [epoch, epoch]

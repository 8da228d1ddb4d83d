from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import stoker
from stoker.errors import BadJob
from stoker.jobs import Holdout
from stoker.loading.dataset_adapters import as_samples
from stoker.loading.sampling import Labels, held_out_by_class, labels_of, shares, targets_at_hand
from tests.loading.data import Squares

X = torch.zeros(6, 2)


class Folder(Squares):
    """Items with all their targets at hand, as torchvision's have."""

    targets = ("cat", "dog", "cat", "cat", "dog", "cat")


class Transformed(Folder):
    """Likewise, with targets that are changed when an item is read, and the names of what is stored."""

    classes = ("cat", "dog")

    def __init__(self, size: int, target_transform: Any) -> None:
        super().__init__(size)
        self.target_transform = target_transform


class Source:
    """A source that says how many classes it has, of which one has no samples."""

    name, fingerprint, num_classes, classes = "source", "sha256:x", 4, ("a", "b", "c", "d")

    def __len__(self) -> int:
        return 6

    def arrays(self) -> Any:
        return X, torch.tensor([0, 1, 3, 3, 1, 0])

    def prepare(self, batch: Any) -> Any:
        return batch


def job_of(data: Any, **changes: Any) -> stoker.Job:
    """A job on this data."""
    return stoker.Job(
        model=lambda: nn.Linear(2, 4),
        data=data,
        loss="cross_entropy",
        optimizer=stoker.SGD(lr=1),
        batch=2,
        until=stoker.epochs(1),
        **changes,
    )


def found(data: Any, given_targets: Any = None, **changes: Any) -> Labels:
    """The labels of the job's data."""
    return labels_of(as_samples(data, what="data"), job_of(data, **changes), given_targets)


@pytest.mark.parametrize(
    ("data", "changes"),
    [
        ((X, torch.tensor([1, 5, 1, 1, 5, 1])), {}),
        ({"x": X, "label": torch.tensor([1, 5, 1, 1, 5, 1])}, {}),
        ((X, torch.tensor([1, 5, 1, 1, 5, 1]), torch.arange(6)), {"fields": stoker.Fields(target=1)}),
        (
            {"x": X, "kind": torch.tensor([1, 5, 1, 1, 5, 1]), "y": torch.arange(6)},
            {"fields": stoker.Fields(target="kind")},
        ),
        ((X, torch.tensor([1.0, 5.0, 1.0, 1.0, 5.0, 1.0])), {}),
        (Folder(6), {}),
    ],
)
def test_targets_are_found_where_they_are_at_hand(data: Any, changes: dict[str, Any]) -> None:
    """In arrays under the target's key or place; of items in an attribute; numbers as well as words."""
    labels = found(data, **changes)
    assert labels.classes.tolist() == [0, 1, 0, 0, 1, 0]
    assert labels.counts.tolist() == [4, 2]


def test_stored_targets_are_changed_as_the_samples_are() -> None:
    """Balanced are the classes that are learned, and not those that a `target_transform` makes one of."""
    labels = found(Transformed(6, lambda word: int(word in ("cat", "dog"))))
    assert (labels.classes.tolist(), labels.names) == ([0] * 6, (1,))
    samples = as_samples(Transformed(6, len), what="data")
    assert targets_at_hand(samples, job_of(samples)) is None
    assert found(Transformed(6, ["cat", "dog"].index)).classes.tolist() == [0, 1, 0, 0, 1, 0]
    with pytest.raises(BadJob, match=r"target_transform of Transformed makes no array .* KeyError: 'dog'"):
        found(Transformed(6, {"cat": 0}.__getitem__))


def test_given_targets_go_first() -> None:
    """A job may be balanced by something else than what it learns."""
    labels = found((X, torch.arange(6)), ["x", "y", "y", "y", "y", "y"])
    assert labels.counts.tolist() == [1, 5]
    assert labels.names == ("x", "y")


@pytest.mark.parametrize(
    ("data", "targets", "words"),
    [
        (Squares(6), None, "the classes of Squares are not known without reading every sample"),
        ((X,), None, "the classes of arrays are not known"),
        ((X, torch.tensor([0.5, 1, 1, 1, 1, 1])), None, "the targets are no classes, but numbers such as 0.5"),
        ((X, torch.arange(6)), [0, 1], "there are 2 targets for 6 samples"),
        (Source(), None, "the data have no sample of class c"),
    ],
)
def test_targets_that_are_no_classes_are_said(data: Any, targets: Any, words: str) -> None:
    """With what to do about it."""
    with pytest.raises(BadJob, match=words) as caught:
        found(data, targets)
    assert caught.value.remedy


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=12), st.data())
def test_shares_are_proportional_to_within_one(counts: list[int], data: st.DataObject) -> None:
    """They add up, and none is a whole away from its share."""
    if not sum(counts):
        return
    total = data.draw(st.integers(0, sum(counts)))
    found_shares = shares(counts, total)
    assert sum(found_shares) == total
    for count, share in zip(counts, found_shares, strict=True):
        assert abs(share - count * total / sum(counts)) < 1
        assert share <= count


@given(st.lists(st.integers(0, 3), min_size=3, max_size=60), st.floats(0.05, 0.9), st.integers(0, 99))
def test_a_holdout_by_class_parts_the_data_in_shares(classes: list[int], fraction: float, seed: int) -> None:
    """Every sample is in one of the two parts; each class is parted like the whole, to within one sample."""
    aside = round(len(classes) * fraction)
    if not 0 < aside < len(classes):
        return
    samples = as_samples((torch.arange(len(classes)), torch.tensor(classes)), what="data")
    labels = Labels(np.array(classes), (0, 1, 2, 3))
    rest, held = held_out_by_class(samples, Holdout(fraction, seed=seed, stratify=True), labels)
    assert sorted([*rest.all_of(0).tolist(), *held.all_of(0).tolist()]) == list(range(len(classes)))
    assert len(held) == aside
    for name in range(4):
        assert abs(held.all_of(1).tolist().count(name) - classes.count(name) * aside / len(classes)) < 1


def test_a_holdout_by_class_is_another_one_for_another_seed_and_named_in_the_fingerprint() -> None:
    """The same for the same seed."""
    samples = as_samples((torch.arange(100), torch.arange(100) % 2), what="data")
    labels = Labels(np.arange(100) % 2, (0, 1))
    first, again, other = (held_out_by_class(samples, Holdout(0.2, seed=seed), labels)[1] for seed in (1, 1, 2))
    assert first.all_of(0).tolist() == again.all_of(0).tolist() != other.all_of(0).tolist()
    assert first.fingerprint() == again.fingerprint() != other.fingerprint()
    assert "of each class" in first.name


def test_a_holdout_by_class_of_nothing_is_refused() -> None:
    """Both parts need samples."""
    samples = as_samples((torch.arange(4), torch.arange(4) % 2), what="data")
    with pytest.raises(BadJob, match=r"a holdout of 0\.1 sets 0 of 4 samples aside"):
        held_out_by_class(samples, Holdout(0.1), Labels(np.arange(4) % 2, (0, 1)))

"""Who goes where when a source is split."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.data.files.source import divide
from stoker.errors import BadJob


@given(st.lists(st.integers(0, 3), min_size=20, max_size=80), st.integers(0, 5))
def test_parts_are_disjoint_and_all_there_is(labels: list[int], seed: int) -> None:
    """Each sample is in one part, in ascending order, whatever the labels; each class keeps one for training."""
    names = [f"n{at}" for at in range(len(labels))]
    found = divide(names, np.array(labels), {"valid": 0.2, "test": 0.2}, seed)
    together = np.concatenate([*found.parts.values()])
    assert sorted(together.tolist()) == list(range(len(labels)))
    assert all((np.diff(part) > 0).all() for part in found.parts.values())
    assert {labels[at] for at in found.parts["train"]} == set(labels)


def test_each_class_gives_the_same_share_and_the_size_is_right() -> None:
    """60, 30 and 10 samples: a tenth of each."""
    labels = np.repeat([0, 1, 2], [60, 30, 10])
    found = divide([str(at) for at in range(100)], labels, {"valid": 0.1}, 0)
    assert np.bincount(labels[found.parts["valid"]]).tolist() == [6, 3, 1]
    assert found.in_words(("a", "b", "c")) == "train 90 (a 54, b 27, c 9), valid 10 (a 6, b 3, c 1)"


def test_many_classes_are_told_by_their_smallest_and_largest() -> None:
    """Eleven names would fill a line."""
    labels = np.repeat(np.arange(11), 10)
    found = divide([str(at) for at in range(110)], labels, {"test": 0.2}, 0)
    assert found.in_words(()) == "train 88 (8 to 8 of each of 11 classes), test 22 (2 to 2 of each of 11 classes)"


def test_a_sample_that_is_added_moves_few_others() -> None:
    """Who is drawn follows from names, not from places."""
    names = [f"image-{at}" for at in range(200)]
    before = divide(names, None, {"valid": 0.1}, 0).parts["valid"]
    after = divide(["another", *names], None, {"valid": 0.1}, 0).parts["valid"]
    assert len({names[at] for at in before} ^ {["another", *names][at] for at in after}) <= 2


def test_another_seed_draws_others() -> None:
    """And the same one the same."""
    names = [str(at) for at in range(100)]
    drawn = [divide(names, None, {"valid": 0.2}, seed).parts["valid"].tolist() for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ({}, "got none"),
        ({"valid": 0.6, "test": 0.4}, "valid=0.6, test=0.4"),
        ({"valid": -0.1}, "valid=-0.1"),
        ({"valid": 0.01}, "is none"),
    ],
)
def test_shares_that_cannot_be_are_refused(shares: dict[str, float], message: str) -> None:
    """None at all, nothing left for training, or a part without samples."""
    with pytest.raises(BadJob, match=message):
        divide(["a", "b", "c"], None, shares, 0)

"""Names of splits, as people write them."""

from __future__ import annotations

import re
from collections.abc import Iterable

SPLITS = {
    "train": "train", "training": "train",
    "valid": "valid", "validation": "valid", "val": "valid", "dev": "valid", "eval": "valid", "holdout": "valid",
    "test": "test", "testing": "test", "t10k": "test",
}  # fmt: skip
"""What a folder or the first or last word of a file's name says: the split."""

AGAINST = "against"
"""The split of another data set that this one is held against."""

_RANK = {"train": 0, "": 0, "valid": 1, "test": 2, AGAINST: 3}


def rank(split: str) -> int:
    """Of two splits with one content, the one with the lower rank gives its copy up: training before what measures."""
    return _RANK.get(split, 1)


def split_of(name: str) -> str:
    """The split that the name of a file tells: `train-0001.tar`, `cifar_test.csv`; empty where it tells none.

    >>> [split_of(name) for name in ("train-0001", "x_test", "t10k-images-idx3-ubyte", "flowers")]
    ['train', 'test', 'test', '']
    """
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]
    ends = [SPLITS[word] for word in (words[:1] + words[-1:]) if word in SPLITS]
    return ends[0] if ends else next((SPLITS[word] for word in words if word in SPLITS), "")


def are_splits(folders: Iterable[str]) -> bool:
    """Whether folders of these names are splits, not classes: all of them, and at least two or one that says train."""
    named = [SPLITS.get(name.lower(), "") for name in folders]
    return bool(named) and all(named) and (len(set(named)) > 1 or "train" in named)

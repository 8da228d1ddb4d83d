from __future__ import annotations

import gzip
from importlib import resources

import pytest
import torch

from stoker.data import digits
from stoker.data.image_datasets import _digit_rows, split_digits
from stoker.errors import BadJob

STORED = (resources.files("stoker.data") / "digits.csv.gz").read_bytes()
FIRST_FOR_TESTING = [2, 7, 19, 22, 32, 33, 35, 39, 47, 75]


def test_the_parts_are_all_samples_once():
    """1,437 and 360 samples; together they are the embedded file, none in both."""
    train, test = split_digits([row[-1] for row in _digit_rows(STORED)])
    assert (len(train), len(test)) == tuple(len(part) for part in digits()) == (1437, 360)
    assert sorted(train + test) == list(range(1797))


def test_every_class_has_its_share_in_both_parts():
    """Testing takes a fifth of each class, to within one."""
    counts = [torch.bincount(part.arrays()[1], minlength=10) for part in digits()]
    for in_train, in_test in zip(*(count.tolist() for count in counts), strict=True):
        assert abs(in_test - (in_train + in_test) / 5) < 1


def test_the_division_is_fixed():
    """The same samples are for testing in every version: the first ten of them, by index."""
    _, test = split_digits([row[-1] for row in _digit_rows(STORED)])
    assert test[:10] == FIRST_FOR_TESTING


def test_pixels_lie_between_0_and_16():
    """Images are uint8 in the set's own units; prepared, the training part has mean 0 and deviation 1."""
    train, _ = digits()
    images, labels = train.arrays()
    assert (images.dtype, int(images.min()), int(images.max())) == (torch.uint8, 0, 16)
    prepared, _ = train.prepare((images, labels))
    assert abs(float(prepared.mean())) < 1e-4
    assert abs(float(prepared.std()) - 1) < 1e-4


def test_the_first_image_is_a_zero():
    """Rows and columns are as written: the file's first image is a ring, dark in the middle."""
    row = _digit_rows(STORED)[0]
    image = torch.tensor(row[:64]).view(8, 8)
    assert row[64] == 0
    assert image[3:5, 3:5].max() == 0
    assert image[3, 2] > 0
    assert image[3, 5] > 0


@pytest.mark.parametrize(
    ("stored", "complaint"),
    [
        (STORED[:-100], "is damaged"),
        (STORED[:5000] + bytes(8) + STORED[5008:], "is damaged"),
        (gzip.compress(b"1,2,3\n"), "wanted 6ebb3d2f"),
    ],
    ids=["cut off", "overwritten", "another file"],
)
def test_a_damaged_package_is_told(stored, complaint):
    """The embedded file is verified like any other."""
    with pytest.raises(BadJob, match=complaint):
        _digit_rows(stored)


def test_the_licence_comes_with_the_data():
    """Credit and licence are in the file's folder in the package."""
    credit = (resources.files("stoker.data") / "digits.credit.txt").read_text(encoding="utf-8")
    assert "Creative Commons Attribution 4.0" in credit
    assert "Alpaydin" in credit

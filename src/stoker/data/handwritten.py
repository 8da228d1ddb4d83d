"""The UCI handwritten digits, inside the package: 1,797 images of 8 × 8 pixels of 0 to 16, 10 classes.

How they are divided: samples are ordered by label, then by SHA-256 of "stoker digits {index}"; every fifth, from the
first on, is for testing. That is 360 for testing with 35 to 37 of each class, and 1,437 for training; each part keeps
the original order. The same writers are in both parts, so the accuracy is that on known hands, as it is in most texts
that use this set.

Source: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits" (1998), UCI Machine Learning Repository,
doi:10.24432/C50P49, the test part, CC BY 4.0; see digits.credit.txt beside this file.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from typing import TYPE_CHECKING, final

from stoker.data.arrays import ArraySource, Field, Part, digest_of, standardised
from stoker.errors import BadJob

if TYPE_CHECKING:
    from stoker.data.arrays import Arrays

_SHA256 = "6ebb3d2fee246a4e99363262ddf8a00a3c41bee6014c373ed9d9216ba7f651b8"
_NUM_SAMPLES: dict[Part, int] = {"train": 1437, "test": 360}
_PIXELS = 64
_EVERY = 5
_MEAN, _STD = 4.8944, 6.0211
"""Of the training images' pixels, in units of 0 to 16."""


@final
class Digits(ArraySource):
    """One part of the digits: image uint8 [1, 8, 8] of 0..16 (prepared: float32, standardised), label int64 []."""

    classes = tuple("0123456789")

    def __init__(self, part: Part, *, note: str | None = None) -> None:
        fields = (Field("image", (1, 8, 8), "uint8"), Field("label", (), "int64"))
        super().__init__(f"digits/{part}", fields, num_classes=10, note=note)
        self._part: Part = part

    def __len__(self) -> int:
        """Number of images."""
        return _NUM_SAMPLES[self._part]

    @property
    def fingerprint(self) -> str:
        """Digest of the embedded file's digest and the part."""
        return digest_of(self.name, _SHA256)

    def prepare(self, batch: Arrays) -> Arrays:
        """Images standardised by the mean and deviation of the training pixels; labels as they are."""
        images, labels = batch
        return standardised(images, mean=_MEAN, std=_STD), labels

    def _load(self) -> Arrays:
        from importlib import resources

        import torch

        rows = _rows((resources.files("stoker.data") / "digits.csv.gz").read_bytes())
        train, test = divided([row[-1] for row in rows])
        chosen = [rows[index] for index in (train if self._part == "train" else test)]
        images = torch.tensor([row[:_PIXELS] for row in chosen], dtype=torch.uint8)
        return images.view(-1, 1, 8, 8), torch.tensor([row[_PIXELS] for row in chosen], dtype=torch.int64)


def digits() -> tuple[Digits, Digits]:
    """The training and test part of the UCI digits; they need no file and no network, and load on first use.

    Returns:
        1,437 training and 360 test samples: image uint8 [1, 8, 8] of 0..16, label int64 [].
    """
    return Digits("train"), Digits("test")


def divided(labels: list[int]) -> tuple[list[int], list[int]]:
    """The indices for training and for testing, each ascending: of every class, one in five is for testing."""
    keys = [hashlib.sha256(f"stoker digits {index}".encode()).digest() for index in range(len(labels))]
    order = sorted(range(len(labels)), key=lambda index: (labels[index], keys[index]))
    test = set(order[::_EVERY])
    return [index for index in range(len(labels)) if index not in test], sorted(test)


def _rows(stored: bytes) -> list[list[int]]:
    """64 pixels and the label of each image. Raises BadJob if the embedded file is damaged."""
    remedy = "Install Stoker anew: this file came with it."
    try:
        content = gzip.decompress(stored)
    except (OSError, EOFError, zlib.error) as problem:
        raise BadJob(f"digits.csv.gz in Stoker's own folder is damaged: {problem}", remedy=remedy) from problem
    sha256 = hashlib.sha256(content).hexdigest()
    if sha256 != _SHA256:
        raise BadJob(
            f"digits.csv.gz in Stoker's own folder has another content: its SHA-256 uncompressed is {sha256}, "
            f"wanted {_SHA256}",
            remedy=remedy,
        )
    return [[int(value) for value in line.split(",")] for line in content.decode("ascii").split()]

"""Image data sets for a first run: Fashion-MNIST, and the UCI handwritten digits, which are inside the package.

`images()` gives Fashion-MNIST if it is here or can be downloaded, else the digits.

Fashion-MNIST: 60,000 training and 10,000 test images of clothing, 28 × 28 grey pixels, 10 classes. Source: H. Xiao,
K. Rasul, R. Vollgraf, "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning Algorithms",
arXiv:1708.07747. Our digests are of the uncompressed files, whose MD5 sums, compressed as published, are in its README.

Digits: 1,797 images of 8 × 8 pixels of 0 to 16, 10 classes. Samples are ordered by label, then by SHA-256 of "stoker
digits {index}"; every fifth is for testing: 360 samples, 35 to 37 of each class. Both parts have the same writers.
Source: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits" (1998), UCI Machine Learning Repository,
doi:10.24432/C50P49, the test part, CC BY 4.0; see digits.credit.txt.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, final

from stoker.data.arrays import ArraySource, Field, SplitName, digest_of, standardised
from stoker.data.idx_files import DatasetFolders, DownloadPatience, IdxFile, dataset_folders, read_idx
from stoker.errors import BadJob

if TYPE_CHECKING:
    from stoker.data.arrays import Arrays


FASHION_MNIST_FILES: dict[SplitName, tuple[IdxFile, IdxFile]] = {
    "train": (
        IdxFile(
            "train-images-idx3-ubyte",
            (60_000, 28, 28),
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        ),
        IdxFile(
            "train-labels-idx1-ubyte", (60_000,), "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9"
        ),
    ),
    "test": (
        IdxFile(
            "t10k-images-idx3-ubyte",
            (10_000, 28, 28),
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        ),
        IdxFile(
            "t10k-labels-idx1-ubyte", (10_000,), "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34"
        ),
    ),
}
"""Images and labels of each part."""

FASHION_MNIST_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
"""Names of labels 0 to 9 in the project's README."""

_FASHION_MEAN, _FASHION_STD = 72.9404, 90.0212
"""Mean and deviation of the training images' pixels, in units of 0 to 255 (0.2860 and 0.3530 of 255)."""

_REMEDY = (
    "Install the files (Debian, Ubuntu: apt install dataset-fashion-mnist), or put the four .gz files into a folder "
    "and set STOKER_DATA to it; stoker.data.digits() needs no files."
)


@final
class FashionMnist(ArraySource):
    """One part of Fashion-MNIST: image uint8 [1, 28, 28] (prepared: float32, standardised), label int64 [] of 0..9."""

    classes = FASHION_MNIST_CLASSES

    def __init__(self, part: SplitName, places: DatasetFolders, files: tuple[IdxFile, IdxFile] | None = None) -> None:
        self._images, self._labels = FASHION_MNIST_FILES[part] if files is None else files
        self._places = places
        fields = (Field("image", (1, *self._images.shape[1:]), "uint8"), Field("label", (), "int64"))
        super().__init__(f"fashion_mnist/{part}", fields, num_classes=10)

    def __len__(self) -> int:
        """Number of images."""
        return self._images.shape[0]

    @property
    def fingerprint(self) -> str:
        """Digest of the published digests of this part's two files."""
        return digest_of(self.name, self._images.sha256, self._labels.sha256)

    def is_here(self) -> bool:
        """True if the files are on this machine, so that loading needs no network; their content is not checked."""
        return self._find() is not None

    def download(self, patience: DownloadPatience | None = None) -> None:
        """Download the files into Stoker's cache, unless they are on this machine already.

        Args:
            patience: how long to wait [s]; None: the default.

        Raises:
            BadJob: the download fails or is too slow, is not what was published, or cannot be written.
        """
        if not self.is_here():
            self._places.download((self._images, self._labels), patience or DownloadPatience())

    def prepare(self, batch: Arrays) -> Arrays:
        """Images standardised by the mean and deviation of the training pixels; labels as they are."""
        images, labels = batch
        return standardised(images, mean=_FASHION_MEAN, std=_FASHION_STD), labels

    def _load(self) -> Arrays:
        self.download()
        found = self._find()
        assert found is not None, "a download that succeeds leaves the files in the cache, which is one of the folders"
        images, labels = (
            read_idx(
                path,
                file,
                remedy=f"Replace {path} (apt install dataset-fashion-mnist has the files), or delete "
                "it: Stoker then looks on, and downloads what it finds nowhere.",
            )
            for path, file in zip(found, (self._images, self._labels), strict=True)
        )
        return images.unsqueeze(1), labels.long()

    def _find(self) -> tuple[Path, ...] | None:
        return self._places.find((self._images.name, self._labels.name))


def fashion_mnist(root: str | Path | None = None) -> tuple[FashionMnist, FashionMnist]:
    """The training and test part of Fashion-MNIST; constructing them reads no file and no network.

    On first use the files are read from the first of these folders that has them, gzipped or not: `root`;
    `$STOKER_DATA`, or `fashion-mnist` or `FashionMNIST/raw` below it; Stoker's cache; the folder of Debian's package
    dataset-fashion-mnist. If none has, they are downloaded into the cache (31 MB). Content that differs from the
    published one is an error; existing files are never replaced.

    Args:
        root: a folder to look in first.

    Returns:
        60,000 training and 10,000 test samples: image uint8 [1, 28, 28], label int64 [].
    """
    places = dataset_folders(
        "fashion-mnist",
        root=None if root is None else Path(root),
        below=("fashion-mnist", "FashionMNIST/raw"),
        installed=Path("/usr/share/datasets/fashion-mnist"),
        home="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        remedy=_REMEDY,
    )
    return FashionMnist("train", places), FashionMnist("test", places)


_DIGITS_SHA256 = "6ebb3d2fee246a4e99363262ddf8a00a3c41bee6014c373ed9d9216ba7f651b8"
_NUM_SAMPLES: dict[SplitName, int] = {"train": 1437, "test": 360}
_PIXELS = 64
_EVERY = 5
_DIGITS_MEAN, _DIGITS_STD = 4.8944, 6.0211
"""Mean and deviation of the training images' pixels, in units of 0 to 16."""


@final
class Digits(ArraySource):
    """One part of the digits: image uint8 [1, 8, 8] of 0..16 (prepared: float32, standardised), label int64 []."""

    classes = tuple("0123456789")

    def __init__(self, part: SplitName, *, note: str | None = None) -> None:
        fields = (Field("image", (1, 8, 8), "uint8"), Field("label", (), "int64"))
        super().__init__(f"digits/{part}", fields, num_classes=10, note=note)
        self._part: SplitName = part

    def __len__(self) -> int:
        """Number of images."""
        return _NUM_SAMPLES[self._part]

    @property
    def fingerprint(self) -> str:
        """Digest of the embedded file's digest and the part."""
        return digest_of(self.name, _DIGITS_SHA256)

    def prepare(self, batch: Arrays) -> Arrays:
        """Images standardised by the mean and deviation of the training pixels; labels as they are."""
        images, labels = batch
        return standardised(images, mean=_DIGITS_MEAN, std=_DIGITS_STD), labels

    def _load(self) -> Arrays:
        import torch

        rows = _digit_rows((resources.files("stoker.data") / "digits.csv.gz").read_bytes())
        train, test = split_digits([row[-1] for row in rows])
        chosen = [rows[index] for index in (train if self._part == "train" else test)]
        images = torch.tensor([row[:_PIXELS] for row in chosen], dtype=torch.uint8)
        return images.view(-1, 1, 8, 8), torch.tensor([row[_PIXELS] for row in chosen], dtype=torch.int64)


def digits() -> tuple[Digits, Digits]:
    """The training and test part of the UCI digits; they need no file and no network, and load on first use.

    Returns:
        1,437 training and 360 test samples: image uint8 [1, 8, 8] of 0..16, label int64 [].
    """
    return Digits("train"), Digits("test")


def split_digits(labels: list[int]) -> tuple[list[int], list[int]]:
    """The indices for training and for testing, each ascending: of every class, one in five is for testing."""
    keys = [hashlib.sha256(f"stoker digits {index}".encode()).digest() for index in range(len(labels))]
    order = sorted(range(len(labels)), key=lambda index: (labels[index], keys[index]))
    test = set(order[::_EVERY])
    return [index for index in range(len(labels)) if index not in test], sorted(test)


def _digit_rows(stored: bytes) -> list[list[int]]:
    """64 pixels and the label of each image. Raises BadJob if the embedded file is damaged."""
    remedy = "Install Stoker again: this file came with it."
    try:
        content = gzip.decompress(stored)
    except (OSError, EOFError, zlib.error) as problem:
        raise BadJob(f"digits.csv.gz in Stoker's own folder is damaged: {problem}", remedy=remedy) from problem
    sha256 = hashlib.sha256(content).hexdigest()
    if sha256 != _DIGITS_SHA256:
        raise BadJob(
            f"digits.csv.gz in Stoker's own folder has another content: its SHA-256 uncompressed is {sha256}, "
            f"wanted {_DIGITS_SHA256}",
            remedy=remedy,
        )
    return [[int(value) for value in line.split(",")] for line in content.decode("ascii").split()]


_NOTE = "Fashion-MNIST is not reachable: using the embedded UCI digits (1,797 images of 8x8)"
_SHORT_PATIENCE = DownloadPatience(silence_s=5.0, total_s=60.0)


def images() -> tuple[ArraySource, ArraySource]:
    """Training and test images: Fashion-MNIST if its files are on this machine or can be downloaded now, else digits.

    If the files are missing, one download is tried; a server that is silent for 5 s, or needs more than 60 s for a
    file, counts as out of reach. If the digits are used instead, `note` of both parts says so.
    """
    return _images_of(fashion_mnist(), _SHORT_PATIENCE)


def _images_of(
    fashion: tuple[FashionMnist, FashionMnist], patience: DownloadPatience
) -> tuple[ArraySource, ArraySource]:
    try:
        for part in fashion:
            part.download(patience)
    except BadJob:
        return Digits("train", note=_NOTE), Digits("test", note=_NOTE)
    return fashion

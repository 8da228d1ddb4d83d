"""Fashion-MNIST: 60,000 training and 10,000 test images of clothing, 28 × 28 grey pixels, 10 classes.

Source: H. Xiao, K. Rasul, R. Vollgraf, "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning
Algorithms", arXiv:1708.07747. The digests are of the uncompressed files. Compressed again as published, they have the
MD5 sums listed in that project's README, so Debian's copy, the unpacked files and the originals are one content.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, final

from stoker.data.arrays import ArraySource, Field, Part, digest_of, standardised
from stoker.data.idx import IdxFile, read_idx
from stoker.data.places import Patience, Places, places_of

if TYPE_CHECKING:
    from stoker.data.arrays import Arrays

FILES: dict[Part, tuple[IdxFile, IdxFile]] = {
    "train": (
        IdxFile(
            "train-images-idx3-ubyte",
            (60_000, 28, 28),
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        ),
        IdxFile(
            "train-labels-idx1-ubyte",
            (60_000,),
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        ),
    ),
    "test": (
        IdxFile(
            "t10k-images-idx3-ubyte",
            (10_000, 28, 28),
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        ),
        IdxFile(
            "t10k-labels-idx1-ubyte",
            (10_000,),
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
    ),
}
"""Images and labels of each part."""

CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
"""What labels 0 to 9 mean, as the project's README lists them."""

_MEAN, _STD = 72.9404, 90.0212
"""Of the training images' pixels, in units of 0 to 255 (0.2860 and 0.3530 of 255)."""

_REMEDY = (
    "Install the files (Debian, Ubuntu: apt install dataset-fashion-mnist), or put the four .gz files into a folder "
    "and set STOKER_DATA to it; stoker.data.digits() needs no files."
)


@final
class FashionMnist(ArraySource):
    """One part of Fashion-MNIST: image uint8 [1, 28, 28] (prepared: float32, standardised), label int64 [] of 0..9."""

    classes = CLASSES

    def __init__(self, part: Part, places: Places, files: tuple[IdxFile, IdxFile] | None = None) -> None:
        self._images, self._labels = FILES[part] if files is None else files
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
        """Whether the files are on this machine, so that loading needs no network; their content is not checked."""
        return self._find() is not None

    def download(self, patience: Patience | None = None) -> None:
        """Fetch the files into Stoker's cache, unless they are on this machine already.

        Raises:
            BadJob: they cannot be had in time, are not what was published, or cannot be written.
        """
        if not self.is_here():
            self._places.download((self._images, self._labels), patience or Patience())

    def prepare(self, batch: Arrays) -> Arrays:
        """Images standardised by the mean and deviation of the training pixels; labels as they are."""
        images, labels = batch
        return standardised(images, mean=_MEAN, std=_STD), labels

    def _load(self) -> Arrays:
        self.download()
        found = self._find()
        assert found is not None, "a download that succeeds leaves the files in the cache, which is one of the folders"
        images, labels = (
            read_idx(path, file, remedy=_mend(path))
            for path, file in zip(found, (self._images, self._labels), strict=True)
        )
        return images.unsqueeze(1), labels.long()

    def _find(self) -> tuple[Path, ...] | None:
        return self._places.find((self._images.name, self._labels.name))


def fashion_mnist(root: str | Path | None = None) -> tuple[FashionMnist, FashionMnist]:
    """The training and test part of Fashion-MNIST; constructing them reads no file and no network.

    On first use the files are taken from the first of these folders that has them, gzipped or not: `root`;
    `$STOKER_DATA`, or `fashion-mnist` or `FashionMNIST/raw` below it; Stoker's cache; where Debian's package
    dataset-fashion-mnist puts them. If none has, they are downloaded into the cache (31 MB). Content that is not what
    was published is an error, and a file that is there is never replaced.

    Args:
        root: a folder to look in first.

    Returns:
        60,000 training and 10,000 test samples: image uint8 [1, 28, 28], label int64 [].
    """
    places = places_of(
        "fashion-mnist",
        root=None if root is None else Path(root),
        below=("fashion-mnist", "FashionMNIST/raw"),
        installed=Path("/usr/share/datasets/fashion-mnist"),
        home="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        remedy=_REMEDY,
    )
    return FashionMnist("train", places), FashionMnist("test", places)


def _mend(path: Path) -> str:
    return (
        f"Replace {path} (apt install dataset-fashion-mnist has the files), "
        "or delete it: Stoker then looks on, and downloads what it finds nowhere."
    )

"""Small idx files, made for a test, and the sources that expect them."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from stoker.data.idx_files import DatasetFolders, IdxFile
from stoker.data.image_datasets import FashionMnist

NOWHERE = "file:///there/is/no/such/home"


def idx_content(shape: tuple[int, ...], *, first: int = 0) -> bytes:
    """An idx file of unsigned bytes that count up from `first`, modulo 10."""
    header = bytes([0, 0, 8, len(shape)]) + b"".join(size.to_bytes(4, "big") for size in shape)
    num_values = 1
    for size in shape:
        num_values *= size
    return header + bytes((first + at) % 10 for at in range(num_values))


def expected_of(name: str, shape: tuple[int, ...], content: bytes) -> IdxFile:
    """What a source expects that was published with this content."""
    return IdxFile(name, shape, hashlib.sha256(content).hexdigest())


@dataclass
class SmallFashion:
    """A part of Fashion-MNIST of six images of 4 × 4, its files, and a machine that has them nowhere."""

    folder: Path
    images: bytes = field(default_factory=lambda: idx_content((6, 4, 4)))
    labels: bytes = field(default_factory=lambda: idx_content((6,)))

    @property
    def files(self) -> tuple[IdxFile, IdxFile]:
        """What is expected."""
        images = expected_of("train-images-idx3-ubyte", (6, 4, 4), self.images)
        return images, expected_of("train-labels-idx1-ubyte", (6,), self.labels)

    @property
    def cache(self) -> Path:
        """Where downloads go."""
        return self.folder / "cache"

    def source(self, *folders: Path, home: str = NOWHERE) -> FashionMnist:
        """A source that looks in `folders` and the cache."""
        return FashionMnist(
            "train", DatasetFolders((*folders, self.cache), self.cache, home, "Install it."), self.files
        )

    def publish(self, folder: Path, *, zipped: bool = True) -> Path:
        """Put both files into `folder`, made for it."""
        folder.mkdir(parents=True, exist_ok=True)
        for file, content in zip(self.files, (self.images, self.labels), strict=True):
            name, stored = (f"{file.name}.gz", gzip.compress(content)) if zipped else (file.name, content)
            (folder / name).write_bytes(stored)
        return folder

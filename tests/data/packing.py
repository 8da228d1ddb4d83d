"""Datasets to pack, one of which kills its process."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np

from stoker import data

PROBES = 18
"""Samples read to learn what is packed, before packing begins: the first, sixteen, and the last of these again."""
SHARD_BYTES = 800
"""Five of the pictures below."""


class Pictures:
    """Sample i is (uint8 [3, 7, 7] of i, i); counts what is read, and kills its process when sample `deadly` is."""

    def __init__(self, size: int = 23, *, deadly: int | None = None, offset: int = 0) -> None:
        self.size, self.deadly, self.offset = size, deadly, offset
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        if self.deadly is not None and index == self.deadly and len(self.read) >= PROBES:
            os.kill(os.getpid(), signal.SIGKILL)
        self.read.append(index)
        return np.full((3, 7, 7), index + self.offset, dtype=np.uint8), index


class Lines:
    """Sample i has i % 5 + 1 numbers."""

    def __init__(self, size: int = 12) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return {"numbers": np.arange(index % 5 + 1, dtype=np.float32) + index, "label": index % 2}


class Random(Pictures):
    """Sample i is another one each time."""

    def __getitem__(self, index: int) -> Any:
        return np.random.default_rng().random((2, 2)), index


def silent(_line: str) -> None:
    """Say nothing of the progress."""


def packed(dataset: Any, path: Path, **changed: Any) -> data.PackedSource:
    """The dataset packed into files of five pictures, without a word."""
    return data.packed(dataset, path, **{"shard_bytes": SHARD_BYTES, "tell": silent, **changed})


def pack_and_die(folder: str, deadly: int) -> None:
    """Pack until sample `deadly` kills this process."""
    packed(Pictures(deadly=deadly), Path(folder)).rows(np.arange(3))

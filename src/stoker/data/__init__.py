"""Data sources, which read nothing until their samples are requested.

Names are imported on first use, so that NumPy and torch load only with the sources that need them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stoker.data.arrays import ArraySource, Field
    from stoker.data.files.huggingface import huggingface
    from stoker.data.files.image_files import image_folder
    from stoker.data.files.source import IndexedSource, Splits, StreamSource, shuffled, stream
    from stoker.data.files.tables import csv, jsonl, parquet
    from stoker.data.files.tfrecord import tfrecord
    from stoker.data.files.webdataset import webdataset
    from stoker.data.image_datasets import digits, fashion_mnist, images
    from stoker.data.packed_source import PackedSource, packed
    from stoker.data.stdlib_text import python_source

_HOMES = {
    "arrays": ("ArraySource", "Field"),
    "files.huggingface": ("huggingface",),
    "files.image_files": ("image_folder",),
    "files.source": ("IndexedSource", "Splits", "StreamSource", "shuffled", "stream"),
    "files.tables": ("csv", "jsonl", "parquet"),
    "files.tfrecord": ("tfrecord",),
    "files.webdataset": ("webdataset",),
    "image_datasets": ("digits", "fashion_mnist", "images"),
    "packed_source": ("PackedSource", "packed"),
    "stdlib_text": ("python_source",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "ArraySource",
    "Field",
    "IndexedSource",
    "PackedSource",
    "Splits",
    "StreamSource",
    "csv",
    "digits",
    "fashion_mnist",
    "huggingface",
    "image_folder",
    "images",
    "jsonl",
    "packed",
    "parquet",
    "python_source",
    "shuffled",
    "stream",
    "tfrecord",
    "webdataset",
]


def __getattr__(name: str) -> Any:
    """The source `name`, loaded now."""
    if name in _HOME_OF:
        return getattr(importlib.import_module(f"stoker.data.{_HOME_OF[name]}"), name)
    raise AttributeError(f"module 'stoker.data' has no attribute {name!r}")

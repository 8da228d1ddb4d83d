"""Data sources, which read nothing until their samples are requested.

Names are imported on first use, so that NumPy and torch load only with the sources that need them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.imports import on_first_use

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

__getattr__ = on_first_use(__name__, __file__)

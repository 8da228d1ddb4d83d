"""Data sources that load nothing until their samples are asked for; torch is imported then as well."""

from stoker.data.arrays import ArraySource, Field
from stoker.data.choosing import images
from stoker.data.fashion import fashion_mnist
from stoker.data.files.folders import image_folder
from stoker.data.files.huggingface import huggingface
from stoker.data.files.source import IndexedSource, Splits
from stoker.data.files.tables import csv, jsonl, parquet
from stoker.data.files.tfrecord import tfrecord
from stoker.data.files.webdataset import webdataset
from stoker.data.handwritten import digits
from stoker.data.packed_source import PackedSource, packed
from stoker.data.stdlib_text import python_source
from stoker.data.streams import StreamSource, shuffled, stream

__all__ = [
    "ArraySource", "Field", "IndexedSource", "PackedSource", "Splits", "StreamSource", "csv", "digits", "fashion_mnist",
    "huggingface", "image_folder", "images", "jsonl", "packed", "parquet", "python_source", "shuffled", "stream",
    "tfrecord", "webdataset",
]  # fmt: skip

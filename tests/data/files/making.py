"""Files of every kind of data, with the same few samples in them; and a job that learns from each."""

from __future__ import annotations

import csv
import io
import json
import struct
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

import stoker
from stoker.data.files.source import IndexedSource
from stoker.data.files.tfrecord import encoded, masked_crc

CLASSES = ("cat", "dog", "owl")
COUNT = 48


def put(path: Path, content: bytes) -> Path:
    """Write a file, unless it is there already: its time of change stays."""
    if not path.exists() or path.read_bytes() != content:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return path


def pixels_of(index: int, side: int = 6) -> np.ndarray:
    """An RGB image that no other index has: uint8 [side, side, 3]."""
    generator = np.random.default_rng(index)
    return generator.integers(0, 256, (side, side, 3), dtype=np.uint8)


def png_of(index: int, side: int = 6) -> bytes:
    """It as a PNG file."""
    buffer = io.BytesIO()
    Image.fromarray(pixels_of(index, side)).save(buffer, "png")
    return buffer.getvalue()


def label_of(index: int) -> int:
    """Its class."""
    return index % len(CLASSES)


def image_files(root: Path, count: int = COUNT) -> Path:
    """A folder for each class, PNG files in it."""
    for index in range(count):
        put(root / CLASSES[label_of(index)] / f"{index:04}.png", png_of(index))
    return root


def rows_of(count: int = COUNT) -> list[dict[str, Any]]:
    """Rows of a table: two numbers, a word, some text, and a class that follows from the numbers."""
    generator = np.random.default_rng(1)
    numbers = generator.normal(size=(count, 2)).round(3)
    return [
        {
            "x1": float(a),
            "x2": float(b),
            "city": ("Bern", "Rom", "Ulm")[at % 3],
            "words": f"line {at}, „so“",
            "kind": CLASSES[int(a > 0) + int(b > 0)],
        }
        for at, (a, b) in enumerate(numbers)
    ]


def csv_file(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """The rows as CSV."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return put(path, text.getvalue().encode())


def jsonl_file(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """The rows as JSON Lines."""
    return put(path, "".join(json.dumps(row) + "\n" for row in rows).encode())


def parquet_file(path: Path, rows: Sequence[Mapping[str, Any]], row_group_size: int = 10) -> Path:
    """The rows as Parquet, in groups of ten."""
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), buffer, row_group_size=row_group_size)
    return put(path, buffer.getvalue())


def tar_file(path: Path, members: Sequence[tuple[str, bytes]], tar_format: int = tarfile.GNU_FORMAT) -> Path:
    """A tar file with these members, in this order."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tar_format) as file:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))
    return put(path, buffer.getvalue())


def shard_files(root: Path, count: int = COUNT, num_shards: int = 3) -> str:
    """WebDataset shards with a PNG and a class each; the pattern that means them."""
    for shard in range(num_shards):
        members = []
        for index in range(shard, count, num_shards):
            members += [(f"{index:06}.png", png_of(index)), (f"{index:06}.cls", str(label_of(index)).encode())]
        tar_file(root / f"part-{shard:03}.tar", members)
    return str(root / f"part-{{000..{num_shards - 1:03}}}.tar")


def record_of(content: bytes) -> bytes:
    """A record of a TFRecord file."""
    length = struct.pack("<Q", len(content))
    checksums = [struct.pack("<I", masked_crc(part)) for part in (length, content)]
    return length + checksums[0] + content + checksums[1]


def tfrecord_file(path: Path, contents: Sequence[bytes]) -> Path:
    """A TFRecord file with these records."""
    return put(path, b"".join(map(record_of, contents)))


def example_files(root: Path, count: int = COUNT) -> list[Path]:
    """Two TFRecord files with an image, a vector and a label each."""
    examples = [
        encoded({"image": [png_of(index)], "point": [index / 8.0, -1.0], "label": [label_of(index)]})
        for index in range(count)
    ]
    half = count // 2
    return [tfrecord_file(root / "a.tfrecord", examples[:half]), tfrecord_file(root / "b.tfrecord", examples[half:])]


def folder_source(root: Path, count: int = COUNT) -> IndexedSource:
    """Images in folders."""
    return stoker.data.image_folder(image_files(root / "images", count), size=6, mean=0.5, std=0.25)


def csv_source(root: Path, count: int = COUNT) -> IndexedSource:
    """Numbers in CSV."""
    return stoker.data.csv(csv_file(root / "t.csv", rows_of(count)), features=["x1", "x2"], target="kind")


def parquet_source(root: Path, count: int = COUNT) -> IndexedSource:
    """Numbers in Parquet."""
    return stoker.data.parquet(parquet_file(root / "t.parquet", rows_of(count)), features=["x1", "x2"], target="kind")


def jsonl_source(root: Path, count: int = COUNT) -> IndexedSource:
    """Numbers in JSON Lines."""
    return stoker.data.jsonl(jsonl_file(root / "t.jsonl", rows_of(count)), features=["x1", "x2"], target="kind")


def webdataset_source(root: Path, count: int = COUNT) -> IndexedSource:
    """Images in tar shards."""
    return stoker.data.webdataset(shard_files(root, count), fields=["png", "cls"])


def tfrecord_source(root: Path, count: int = COUNT) -> IndexedSource:
    """Images in TFRecord files."""
    return stoker.data.tfrecord(example_files(root, count), {"image": "image", "label": "int64"})


def huggingface_source(root: Path, count: int = COUNT) -> IndexedSource:
    """Images in a dataset of Hugging Face's library."""
    import datasets

    columns = {
        "image": [{"bytes": png_of(index), "path": None} for index in range(count)],
        "label": [label_of(index) for index in range(count)],
    }
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list(CLASSES))})
    place = root / "saved"
    if not place.exists():
        datasets.Dataset.from_dict(columns, features=features).save_to_disk(str(place))
    return stoker.data.huggingface(place)  # type: ignore[no-any-return]


SOURCES: dict[str, Callable[[Path, int], IndexedSource]] = {
    "folder": folder_source,
    "csv": csv_source,
    "parquet": parquet_source,
    "jsonl": jsonl_source,
    "webdataset": webdataset_source,
    "tfrecord": tfrecord_source,
    "huggingface": huggingface_source,
}

"""Fuzz targets: functions of any bytes that raise only where Stoker is at fault.

What cannot be read has to end as the error that the reader documents, never as another one; what can be read has to be
usable: written again, and read again as the same.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
import os
import struct
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from stoker import data as sources
from stoker.artifacts import read
from stoker.artifacts.golden import read_golden
from stoker.data.files.sample_files import expanded
from stoker.data.files.tfrecord import masked_crc
from stoker.data.idx_files import IdxFile, read_idx
from stoker.data.reading.file_listing import members_of
from stoker.data.reading.table_readers import CsvFile
from stoker.errors import BadArtifact, BadJob, BadRun, StokerError
from stoker.records import (
    CheckpointManifest,
    CleanList,
    Decision,
    Device,
    Environment,
    FileDigest,
    JobSpec,
    Manifest,
    Plan,
    Position,
    Profile,
    Run,
    ServiceSettings,
    digest,
    dumps,
    loads,
)
from stoker.records.progress import read_event
from stoker.reporting.run_page import render_html
from stoker.store import CheckpointStore, RunDirectory
from stoker.store.checkpoint_store import MANIFEST
from stoker.store.site_message import decode_message, encode_message
from stoker.training.sharded_tensors import opened

Target = Callable[[bytes], None]

RECORDS = (
    Run,
    JobSpec,
    Plan,
    Decision,
    Device,
    Environment,
    CheckpointManifest,
    Profile,
    ServiceSettings,
    CleanList,
    Manifest,
)
"""What the first byte of an input of `records` chooses from; more stand for events."""

IDX_SHAPE = (2, 3)
IDX_VALUES = bytes(range(6))
CHECKPOINT = "000000000064"
PICKLES = ("pyd", "pickle", "pkl", "pth", "pt")
_MEMORY = Path("/dev/shm")  # noqa: S108 - a file system in memory, in which a folder of our own is made
_MOST_SAMPLES = 8


@contextmanager
def _folder() -> Iterator[Path]:
    """An empty folder, with Stoker's cache in it: nothing of an input is there for the next one."""
    place = _MEMORY if _MEMORY.is_dir() else None
    with (
        tempfile.TemporaryDirectory(dir=place, prefix="stoker-fuzz-") as name,
        mock.patch.dict(os.environ, {"STOKER_CACHE": f"{name}/cache"}),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield Path(name)


def fuzz_manifest(data: bytes) -> None:
    """The manifest of an artifact."""
    with _folder() as folder:
        version = folder / "model" / "1"
        version.mkdir(parents=True)
        (version / "manifest.json").write_bytes(data)
        (version / "model.onnx").write_bytes(b"graph")
        with suppress(BadArtifact):
            artifact = read(folder / "model")
            assert loads(dumps(artifact.manifest), Manifest) == artifact.manifest
            assert artifact.num_bytes >= 0
            assert artifact.digest
            artifact.verify()


def fuzz_golden(data: bytes) -> None:
    """The golden answers of an artifact, a safetensors file."""
    with _folder() as folder:
        path = folder / "golden.safetensors"
        path.write_bytes(data)
        with suppress(BadArtifact):
            golden = read_golden(path)
            for array in (*golden.inputs.values(), *golden.outputs.values()):
                assert isinstance(array, np.ndarray)
                assert array.size <= max(1, len(data))


def fuzz_records(data: bytes) -> None:
    """A record as JSON, or a line of a log of events; the first byte says which."""
    chosen = data[0] if data else 0
    try:
        record: Any = loads(data[1:], RECORDS[chosen]) if chosen < len(RECORDS) else read_event(data[1:])
    except ValueError:
        return
    written = dumps(record)
    assert dumps(loads(written, type(record))) == written
    assert digest(record)
    written.encode()


def fuzz_report(data: bytes) -> None:
    """The log of events of a run from elsewhere, and the report of that."""
    spec = JobSpec(
        name="mlp",
        entry=None,
        entry_digest=None,
        parameters={},
        data_class="indexed",
        data_fingerprint="f",
        num_train=1000,
        weights_digest="w",
        settings={"lr": 0.1},
    )
    run = Run(
        name="mlp",
        status="finished",
        created_at="2026-11-22T00:00:00+00:00",
        spec_digest=spec.digest(),
        total_samples=5000,
    )
    with _folder() as folder:
        directory = RunDirectory.create(folder / "run", run, spec)
        directory.events_path.write_bytes(data)
        with suppress(BadRun):
            render_html(directory.read_report()).encode()


def fuzz_checkpoint_manifest(data: bytes) -> None:
    """The manifest of a checkpoint, and the tensors that it speaks of."""
    with _folder() as folder:
        place = folder / CHECKPOINT
        place.mkdir()
        (place / MANIFEST).write_bytes(data)
        (place / "model.safetensors").write_bytes(tensors())
        _read_newest(folder)


def fuzz_checkpoint_tensors(data: bytes) -> None:
    """The safetensors file of a checkpoint, whose digest is right."""
    with _folder() as folder:
        place = folder / CHECKPOINT
        place.mkdir()
        (place / "model.safetensors").write_bytes(data)
        (place / MANIFEST).write_text(dumps(checkpoint_of(data)))
        _read_newest(folder)


def tensors() -> bytes:
    """A safetensors file with two small tensors."""
    header = json.dumps(
        {
            "model.w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
            "model.b": {"dtype": "I64", "shape": [], "data_offsets": [24, 32]},
        }
    ).encode()
    return struct.pack("<Q", len(header)) + header + np.arange(6, dtype="<f4").tobytes() + struct.pack("<q", 7)


def checkpoint_of(content: bytes) -> CheckpointManifest:
    """The manifest of a checkpoint with this one file."""
    file = FileDigest(name="model.safetensors", num_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    return CheckpointManifest(
        spec_digest="s",
        position=Position(samples=int(CHECKPOINT)),
        stoker_version="0",
        torch_version="0",
        files=(file,),
        skeleton={},
    ).with_checksum()


def _read_newest(folder: Path) -> None:
    with suppress(BadRun):
        found = CheckpointStore(folder).newest()
        assert found is not None
        path, manifest = found
        with opened(path, manifest) as disk:
            names = [key for file in manifest.files for key in _keys(path / file.name)]
            for name in {*manifest.tensors, *(() if manifest.tensors else names)}:
                shape = disk.shape(name)
                disk.block(name, (0,) * len(shape), shape)


def _keys(path: Path) -> list[str]:
    """The names of tensors in a file, none where it is no safetensors file."""
    content = path.read_bytes()
    with suppress(ValueError):
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        return [name for name in header if name != "__metadata__"] if isinstance(header, dict) else []
    return []


def fuzz_tar(data: bytes) -> None:
    """A shard of WebDataset: its members, and samples of all kinds that are in it."""
    with _folder() as folder:
        path = folder / "shard.tar"
        path.write_bytes(data)
        with suppress(StokerError):
            members = list(members_of(path))
            assert all(member.size >= 0 and member.offset + member.size <= len(data) for member in members)
            kinds = sorted({member.kind for member in members} - set(PICKLES))[:4]
            source = sources.webdataset(path, fields=[kind for kind in kinds if ";" not in kind])
            _use(source)


def fuzz_tfrecord(data: bytes) -> None:
    """A TFRecord file."""
    with _folder() as folder:
        path = folder / "train.tfrecord"
        path.write_bytes(data)
        with suppress(StokerError):
            _use(sources.tfrecord(path, {"x": ("float32", (2,)), "label": "int64", "name": "text"}))


def fuzz_tf_example(data: bytes) -> None:
    """The message in a record whose checksums are right."""
    fuzz_tfrecord(framed(data))


def framed(content: bytes) -> bytes:
    """A record of a TFRecord file."""
    length = struct.pack("<Q", len(content))
    checksums = struct.pack("<I", masked_crc(length)), struct.pack("<I", masked_crc(content))
    return length + checksums[0] + content + checksums[1]


def fuzz_csv(data: bytes) -> None:
    """A CSV file; the first byte says what its columns are. As text they are what Python's own reader finds."""
    _table(data, "csv")


def fuzz_jsonl(data: bytes) -> None:
    """A file of JSON Lines; the first byte says what its columns are."""
    _table(data, "jsonl")


def _table(data: bytes, kind: str) -> None:
    mode, content = (data[0] % 4 if data else 0), data[1:]
    with _folder() as folder, suppress(BadJob):
        path = folder / f"rows.{kind}"
        path.write_bytes(content)
        reader = getattr(sources, kind)
        columns = CsvFile(path).header if kind == "csv" else _first_keys(content)
        if mode == 1:
            table = reader(path, features=[], text=list(columns), missing="drop")
        elif mode == 2:
            table = reader(path, features=list(columns[:-1]), target=columns[-1] if columns else None, missing="mean")
        elif mode == 3:
            table = reader(path, features=[], categories=list(columns[:2]), missing=dict.fromkeys(columns[:2], "?"))
        else:
            table = reader(path)
        _use(table)
        table.rows(np.arange(len(table)))
        if mode == 1 and kind == "csv":
            _require_same(path, columns, table)


def _first_keys(content: bytes) -> tuple[str, ...]:
    for line in content.splitlines():
        with suppress(ValueError, RecursionError):
            value = json.loads(line)
            return tuple(value) if isinstance(value, dict) else ()
    return ()


def _require_same(path: Path, columns: tuple[str, ...], table: Any) -> None:
    """The rows of a table of text are those that Python's own reader finds, less those with an empty field."""
    file = CsvFile(path)
    with path.open("rb") as content:
        records = list(file.records(content))
    assert not any(record.fault for record in records), "a broken row was read"
    expected = [record.fields for record in records if all(record.fields)]
    rows = table.rows(np.arange(len(table)))
    found = [list(row) for row in zip(*(rows[name] for name in columns), strict=True)]
    assert found == expected, f"read {found!r}, Python reads {expected!r}"


def fuzz_idx(data: bytes) -> None:
    """An idx file, zipped or not; the one that is expected has two rows of three values."""
    content = struct.pack(">HBBII", 0, 8, 2, *IDX_SHAPE) + IDX_VALUES
    file = IdxFile("train-images-idx3-ubyte", IDX_SHAPE, hashlib.sha256(content).hexdigest())
    with _folder() as folder:
        path = folder / file.name
        path.write_bytes(data)
        with suppress(BadJob):
            assert read_idx(path, file, remedy="Fetch it again.").tolist() == [[0, 1, 2], [3, 4, 5]]


def fuzz_pattern(data: bytes) -> None:
    """A pattern of shards' names, as a job file has it."""
    with suppress(StokerError):
        for _, name in zip(range(1000), expanded(data.decode(errors="replace")), strict=False):
            assert isinstance(name, str)


def fuzz_site_message(data: bytes) -> None:
    """A message between sites, as its file has it."""
    with suppress(ValueError):
        head, message = decode_message(data)
        assert decode_message(encode_message(head, message)) == (head, message)
        assert hashlib.sha256(message).hexdigest() == head.sha256


def _use(source: Any) -> None:
    """What training asks of a source: its length, labels, names, some samples."""
    count = len(source)
    source.labels()
    assert source.fingerprint
    for index in range(min(count, _MOST_SAMPLES)):
        source.sample_id(index).encode(errors="surrogateescape")
        for entry in _leaves(source.sample(index)):
            assert isinstance(entry, torch.Tensor | str | bytes | int | float | bool | None)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _leaves(item)
    else:
        yield value


def zipped(content: bytes) -> bytes:
    """The content in gzip, the same each time."""
    return gzip.compress(content, mtime=0)


def seeds_of(name: str) -> list[Path]:
    """The inputs that fuzzing of a target begins with: those made by writers, and those that once were a finding."""
    return sorted(path for folder in ("corpus", "found") for path in (Path(__file__).parent / folder / name).glob("*"))


def targets() -> dict[str, Target]:
    """All targets by name; those of the server's wire where what it needs is installed."""
    found: dict[str, Target] = {
        name.removeprefix("fuzz_"): value for name, value in globals().items() if name.startswith("fuzz_")
    }
    if importlib.util.find_spec("uvicorn") and importlib.util.find_spec("grpc"):
        from bench.fuzz import targets_serving  # noqa: PLC0415 - needs the service's packages

        found |= targets_serving.TARGETS
    return found

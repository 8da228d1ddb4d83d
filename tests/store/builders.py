"""Small records and checkpoints for the tests of the store."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from stoker.records import CheckpointManifest, FileDigest, JobSpec, Position, Run
from stoker.store import CheckpointStore, RunDirectory, checkpoint_name, write_file
from stoker.store.files import disk


def spec(**changes) -> JobSpec:
    """A job's spec; `lr` and `batch` are settings."""
    settings = {"lr": changes.pop("lr", 0.1), "batch": changes.pop("batch", 512)}
    fields = {
        "name": "mlp",
        "entry": None,
        "entry_digest": None,
        "parameters": {},
        "data_class": "indexed",
        "data_fingerprint": "f",
        "num_train": 1000,
        "weights_digest": "w",
    }
    return JobSpec(**{**fields, "settings": settings, **changes})


def run_record(of: JobSpec, **changes) -> Run:
    """A run of that spec, unfinished."""
    fields = {
        "name": "mlp",
        "status": "unfinished",
        "created_at": "2025-03-01T12:00:00+00:00",
        "spec_digest": of.digest(),
        "total_samples": 5000,
    }
    return Run(**{**fields, **changes})


def make_run(path: Path, of: JobSpec | None = None, **changes) -> RunDirectory:
    """A run on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    of = of or spec()
    return RunDirectory.create(path, run_record(of, **changes), of)


def manifest_at(samples: int) -> Callable[[tuple[FileDigest, ...]], CheckpointManifest]:
    """A manifest of that position."""
    return lambda files: CheckpointManifest(
        spec_digest="s",
        position=Position(samples=samples),
        stoker_version="0",
        torch_version="0",
        files=files,
        skeleton={},
    )


def content(samples: int) -> bytes:
    """What the weights at that position look like."""
    return f"weights after {samples} samples ".encode() * 20


def save(store: CheckpointStore, samples: int) -> Path:
    """Write a checkpoint of two files at that position."""

    def files(directory: Path) -> None:
        write_file(directory / "model.safetensors", content(samples))
        descriptor = disk().open(
            directory / "optimizer.safetensors", os.O_WRONLY | os.O_CREAT
        )  # as libraries do: no fsync
        disk().write(descriptor, memoryview(content(samples)[:50]))
        os.close(descriptor)

    return store.write(checkpoint_name(Position(samples=samples)), files, manifest_at(samples))


def newest_samples(directory: Path) -> int | None:
    """Position of the newest checkpoint a fresh reader finds, whose content is checked; None without any."""
    store = CheckpointStore(directory)
    found = store.newest()
    assert store.problems == []
    if found is None:
        return None
    samples = found[1].position.samples
    assert (found[0] / "model.safetensors").read_bytes() == content(samples)
    return samples

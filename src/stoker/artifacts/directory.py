"""Versions of a model on disk: `models/digits/1/manifest.json` and the files it names.

A version is written aside, with its manifest last, fsynced and renamed into place: it is there as a whole or not at
all, after a power cut too. What somebody copies by hand may be half there; `Artifact.verify` tells.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from stoker.artifacts.golden import Golden, read_golden
from stoker.artifacts.lies import problem_of
from stoker.errors import BadArtifact
from stoker.records import FileDigest, Manifest, digest, dumps, loads
from stoker.store import disk_errors, sha256_file, write_file
from stoker.store.files import aside_path, disk, make_directories, remove_leftovers, sync_file

MANIFEST = "manifest.json"
_MOST_MANIFEST_BYTES = 16 * 1024 * 1024
_MOST_DIGITS = 9


@dataclass(frozen=True)
class Artifact:
    """One version of a model on disk, its manifest read; its other files are looked at when they are used."""

    path: Path
    manifest: Manifest

    @property
    def version(self) -> int:
        """Its number, which the directory is named for."""
        return int(self.path.name)

    @property
    def graph_path(self) -> Path:
        """The file that the engine loads."""
        return self.path / self.manifest.graph

    @property
    def num_bytes(self) -> int:
        """What its files take, the manifest aside [bytes]."""
        return sum(one.num_bytes for one in self.manifest.files)

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of the manifest, and so of every file that it names."""
        return digest(self.manifest)

    def golden(self) -> Golden:
        """The stored inputs and answers.

        Raises:
            BadArtifact: they cannot be read, or lack an input or output of the model: nothing would be checked of it.
        """
        path, manifest = self.path / self.manifest.golden, self.manifest
        found = read_golden(path)
        for what, tensors, specs in (
            ("input", found.inputs, manifest.inputs), ("output", found.outputs, manifest.outputs)
        ):  # fmt: skip
            if lacking := [spec.name for spec in specs if spec.name not in tensors]:
                raise BadArtifact(f"{path} has no {what} {lacking[0]!r}", remedy="Export the model again.")
        return found

    def verify(self) -> None:
        """Read every file, and compare its size and digest with the manifest's.

        Raises:
            BadArtifact: a file is absent, is not what was written, or lies elsewhere behind a link.
        """
        home = self.path.resolve()
        for wanted in self.manifest.files:
            path = self.path / wanted.name
            if not path.resolve().is_relative_to(home):
                raise BadArtifact(f"{path} is a link to {path.resolve()}, outside the artifact")
            if not path.is_file():
                raise BadArtifact(f"{self.path} has no {wanted.name}", remedy="Copy it whole, or export it again.")
            with _reading(path):
                num_bytes = path.stat().st_size  # before the content is read: most of what is wrong shows in the size
                found = sha256_file(path) if num_bytes == wanted.num_bytes else "of another size"
            if found != wanted.sha256:
                raise BadArtifact(
                    f"{path} is not what was exported: it has {num_bytes:,} bytes and SHA-256 {found[:15]}, "
                    f"the manifest says {wanted.num_bytes:,} and {wanted.sha256[:15]}",
                    remedy="Copy it again, or export it again.",
                )


def versions(model: Path) -> tuple[int, ...]:
    """The versions of a model that have a manifest, oldest first; none where there is no such directory."""
    if not model.is_dir():
        return ()
    numbers = (int(one.name) for one in model.iterdir() if _is_version(one.name))
    return tuple(sorted(number for number in numbers if (model / str(number) / MANIFEST).is_file()))


def read(path: str | Path) -> Artifact:
    """The artifact in a directory of one version (`models/digits/1`), or a model's newest (`models/digits`).

    Raises:
        BadArtifact: there is none; its manifest cannot be read, contradicts itself, or names files outside.
    """
    path = Path(path)
    with _reading(path):
        is_version, found = (path / MANIFEST).is_file(), versions(path)
    if not is_version:
        if not found:
            raise BadArtifact(
                f"{path} is no exported model: neither it nor a numbered directory in it has a {MANIFEST}",
                remedy="`stoker export RUN -o DIR` makes one.",
            )
        path /= str(found[-1])
    if not _is_version(path.name):
        remedy = "Put it into a directory such as models/digits/1."
        raise BadArtifact(f"{path} is not named for a version", remedy=remedy)
    return Artifact(path, _read_manifest(path / MANIFEST))


def publish(model: Path, write: Callable[[Path, Callable[[], tuple[FileDigest, ...]]], Manifest]) -> Artifact:
    """Write the next version of a model, whole or not at all; what killed writers left behind is removed.

    `write(directory, digests)` puts files into `directory` and returns the manifest; `digests()` gives the digests of
    all files that are there when it is called. Nothing else may write versions of this model meanwhile.

    Raises:
        BadArtifact: the disk is full, or cannot be written.
    """
    with _writing(model):
        make_directories(model)
        remove_leftovers(model)
        target = model / str((versions(model) or (0,))[-1] + 1)
        aside = aside_path(target)
        disk().make_directory(aside)
        try:
            manifest = write(aside, lambda: _digests_in(aside))
            write_file(aside / MANIFEST, (dumps(manifest) + "\n").encode())
            _sync_tree(aside)
            disk().rename(aside, target)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        disk().sync_directory(model)
    return Artifact(target, manifest)


def _is_version(name: str) -> bool:
    return name.isascii() and name.isdigit() and len(name) <= _MOST_DIGITS and name == str(int(name))


def _read_manifest(path: Path) -> Manifest:
    with _reading(path):
        num_bytes = path.stat().st_size
        if num_bytes > _MOST_MANIFEST_BYTES:
            raise BadArtifact(f"{path} has {num_bytes:,} bytes; a manifest has at most {_MOST_MANIFEST_BYTES:,}")
        manifest = loads(path.read_bytes(), Manifest)
    problem = problem_of(manifest)
    if problem is not None:
        raise BadArtifact(f"{path} {problem}", remedy="Export the model again.")
    return manifest


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, RecursionError) as error:
        raise BadArtifact(f"{path} cannot be read: {error}", remedy="Export the model again.") from error


class _Unwritable(BadArtifact):
    """The disk's own reason, before it is given a remedy that fits an export."""


@contextmanager
def _writing(model: Path) -> Iterator[None]:
    try:
        with disk_errors(model, "the model", error=_Unwritable):
            yield
    except _Unwritable as problem:
        remedy = "Free some space, or choose a place that this user may write with -o DIR."
        raise BadArtifact(problem.message, remedy=remedy) from problem


def _sync_tree(directory: Path) -> None:
    """Libraries wrote these files and did not wait for the disk."""
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            sync_file(path)
        elif path.is_dir():
            disk().sync_directory(path)
    disk().sync_directory(directory)


def _digests_in(directory: Path) -> tuple[FileDigest, ...]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return tuple(
        FileDigest(name=path.relative_to(directory).as_posix(), num_bytes=path.stat().st_size, sha256=sha256_file(path))
        for path in files
    )

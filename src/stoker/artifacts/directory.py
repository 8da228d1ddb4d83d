"""Versions of a model on disk: `models/digits/1/manifest.json` and the files it names.

A version is written aside, with its manifest last, fsynced and renamed into place: it is there as a whole or not at
all, after a power cut too. What somebody copies by hand may be half there; `Artifact.verify` tells.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from stoker.artifacts.golden import Golden, read_golden
from stoker.artifacts.lies import problem_of
from stoker.errors import BadArtifact
from stoker.records import FileDigest, Manifest, digest, dumps, loads
from stoker.store import disk_errors, flock, sha256_file, write_file
from stoker.store.files import aside_path, disk, is_aside, make_directories, remove_tree, sync_file

MANIFEST = "manifest.json"
_MOST_MANIFEST_BYTES = 16 * 1024 * 1024
_MOST_DIGITS = 9
_ABANDONED_S = 86400.0
"""A half-written version that was not touched for so long is nobody's, where locks do not tell [s]."""


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
    all files that are there when it is called. Several processes may write versions of one model at once: each version
    has the number that is free when it is whole.

    Raises:
        BadArtifact: the disk is full, or cannot be written.
    """
    with _writing(model):
        make_directories(model)
        _remove_abandoned(model)
        aside = aside_path(model / "version")
        disk().make_directory(aside)
        lock = None
        try:
            with suppress(flock.LocksUnsupported):
                lock = _locked_directory(aside)
            manifest = write(aside, lambda: _digests_in(aside))
            write_file(aside / MANIFEST, (dumps(manifest) + "\n").encode())
            _sync_tree(aside)
            target = _renamed(aside, model)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        finally:
            if lock is not None:
                os.close(lock)
        disk().sync_directory(model)
    return Artifact(target, manifest)


def _renamed(aside: Path, model: Path) -> Path:
    """Give a whole version the next number; where another process took that meanwhile, the one after."""
    while True:
        target = model / str((versions(model) or (0,))[-1] + 1)
        try:
            disk().rename(aside, target)
        except OSError as problem:
            if problem.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        else:
            return target


def _remove_abandoned(model: Path) -> None:
    """Remove half-written versions whose writer is gone: it held a lock on the directory for as long as it lived.

    Where there are no such locks, those in which nothing was made for a day.
    """
    for entry in filter(is_aside, sorted(model.iterdir())):
        try:
            descriptor = _locked_directory(entry)
        except flock.LocksUnsupported:
            if time.time() - entry.stat().st_mtime > _ABANDONED_S:
                remove_tree(entry)
        else:
            if descriptor is not None:
                os.close(descriptor)
                remove_tree(entry)


def _locked_directory(directory: Path) -> int | None:
    """A descriptor that holds the lock of a directory until it is closed; None if another process holds it.

    Raises:
        LocksUnsupported: the platform or the file system has no locks of directories.
    """
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except OSError as problem:  # Windows opens no directories; or its writer finished just now
        raise flock.LocksUnsupported(str(problem)) from problem
    try:
        if flock.try_lock(descriptor):
            return descriptor
    except OSError as problem:  # NFS locks only what is open for writing
        os.close(descriptor)
        raise flock.LocksUnsupported(str(problem)) from problem
    except flock.LocksUnsupported:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


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

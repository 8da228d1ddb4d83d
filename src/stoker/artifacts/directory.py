"""Versions of a model on disk: `models/digits/1/manifest.json` and the files it names.

A version is written aside, with its manifest last, fsynced and renamed into place: it is there as a whole or not at
all, after a power cut too. What somebody copies by hand may be half there; `Artifact.verify` tells.

An artifact is its manifest and the regular files that the manifest lists, and nothing else: engines open files of their
own accord (`model.bin` beside `model.xml`), so an unlisted file or a link would be read by a server without a check.
Links above the files are the operator's own and are followed: a directory of models, a model, or a version may be one.

How a model is served, beside its versions: `models/digits/service.json`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from stoker.artifacts.golden import Golden, read_golden
from stoker.artifacts.manifest_validation import manifest_problem
from stoker.errors import BadArtifact
from stoker.records import FileDigest, Manifest, ServiceSettings, digest, dumps, from_json, loads
from stoker.store import disk_errors, sha256_file, write_atomic, write_file
from stoker.store import files as flock
from stoker.store.files import aside_path, disk, is_aside, make_directories, remove_tree, sync_file

MANIFEST = "manifest.json"
_MOST_MANIFEST_BYTES = 16 * 1024 * 1024
_MOST_DIGITS = 9
_ABANDONED_S = 86400.0
"""A half-written version that was not touched for so long is nobody's, where locks do not tell [s]."""

Listing = Mapping[str, tuple[int, int, int, int]]
"""Files of an artifact by name: inode, size [bytes], times of the last change of content and of inode [ns]."""


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

    def verify(self) -> Listing:
        """Compare the directory with the manifest: the same files, regular ones, each of the size and digest listed.

        Returns:
            The files as they are, for `require_unchanged` once an engine has read them.

        Raises:
            BadArtifact: a file is absent, is not what was written, is not listed, or is a link or a device.
        """
        listing = self._listing()
        for expected in self.manifest.files:
            path = self.path / expected.name
            with _reading(path):
                num_bytes = listing[expected.name][1]  # first, since most damage shows in the size
                sha256 = _sha256_of_regular(path) if num_bytes == expected.num_bytes else "of another size"
            if sha256 != expected.sha256:
                raise BadArtifact(
                    f"{path} is not what was exported: it has {num_bytes:,} bytes and SHA-256 {sha256[:15]}, "
                    f"the manifest says {expected.num_bytes:,} and {expected.sha256[:15]}",
                    remedy="Copy it again, or export it again.",
                )
        return listing

    def require_unchanged(self, verified: Listing) -> None:
        """Refuse an artifact whose files are not those that `verify` returned: they were replaced since.

        Raises:
            BadArtifact: see above.
        """
        if self._listing() != verified:
            raise BadArtifact(
                f"{self.path} changed while it was being loaded", remedy="Write each version once, then leave it alone."
            )

    def _listing(self) -> Listing:
        """The files of the directory, which are those of the manifest."""
        listed = {MANIFEST, *(file.name for file in self.manifest.files)}
        listing = {}
        with _reading(self.path):
            for name, status in _walk(self.path, ""):
                if stat.S_ISLNK(status.st_mode):
                    raise BadArtifact(
                        f"{self.path / name} is a link; an artifact has regular files only",
                        remedy="Copy what it points to into its place (cp -L), or link the whole directory.",
                    )
                if not stat.S_ISREG(status.st_mode):
                    raise BadArtifact(f"{self.path / name} is not a regular file", remedy="Remove it.")
                if name not in listed:
                    raise BadArtifact(
                        f"{self.path / name} is not in the manifest's list of files",
                        remedy="Remove it: an engine could read it, and nothing says what it should contain.",
                    )
                listing[name] = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        if absent := sorted(listed - set(listing)):
            raise BadArtifact(f"{self.path} has no {absent[0]}", remedy="Copy it whole, or export it again.")
        return listing


def version_number(text: str) -> int | None:
    """The number of a version from its name, such as `12`; None for what no version is named (`012`, `1a`, 10 digits).

    >>> [version_number(text) for text in ("12", "012", "-1", "9" * 5000)]
    [12, None, None, None]
    """
    is_number = text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS
    return int(text) if is_number and text == str(int(text)) else None


def versions(model: Path) -> tuple[int, ...]:
    """The versions of a model that have a manifest, oldest first; none where there is no such directory."""
    if not model.is_dir():
        return ()
    numbers = (version_number(entry.name) for entry in model.iterdir())
    return tuple(
        sorted(number for number in numbers if number is not None and (model / str(number) / MANIFEST).is_file())
    )


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
    if version_number(path.name) is None:
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
    with disk_errors(model, "the model", error=BadArtifact, option="-o DIR"):
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


def _walk(directory: Path, prefix: str) -> Iterator[tuple[str, os.stat_result]]:
    """Everything below a directory but directories, by its name from there; no link is followed."""
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(Path(entry.path), f"{prefix}{entry.name}/")
            else:
                yield f"{prefix}{entry.name}", entry.stat(follow_symlinks=False)


def _sha256_of_regular(path: Path) -> str:
    """SHA-256 (hex) of a regular file, also where a link or a pipe took its place since it was listed."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is not a regular file")
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_manifest(path: Path) -> Manifest:
    with _reading(path):
        num_bytes = path.stat().st_size
        if num_bytes > _MOST_MANIFEST_BYTES:
            raise BadArtifact(f"{path} has {num_bytes:,} bytes; a manifest has at most {_MOST_MANIFEST_BYTES:,}")
        manifest = loads(path.read_bytes(), Manifest)
    problem = manifest_problem(manifest)
    if problem is not None:
        raise BadArtifact(f"{path} {problem}", remedy="Export the model again.")
    return manifest


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, RecursionError) as error:
        raise BadArtifact(f"{path} cannot be read: {error}", remedy="Export the model again.") from error


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


SETTINGS = "service.json"
_MOST_BYTES = 1024 * 1024


def read_settings(model: Path) -> ServiceSettings:
    """A model's settings; the defaults where nobody wrote any. What a person writes needs no `record` and `schema`.

    Raises:
        BadArtifact: they cannot be read.
    """
    path = model / SETTINGS
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES:,} bytes")
        document = json.loads(text)
        if isinstance(document, dict) and not {"record", "schema"} & document.keys():  # written by hand
            document |= {"record": ServiceSettings.__name__, "schema": ServiceSettings.schema}
        return from_json(document, ServiceSettings)
    except FileNotFoundError:
        return ServiceSettings()
    except (OSError, ValueError, RecursionError) as error:
        remedy = 'Mend or delete it; `{"versions": [1]}` is a whole one, and `stoker bench-serve` writes one.'
        raise BadArtifact(f"{path} cannot be read: {error}", remedy=remedy) from error


def write_settings(model: Path, settings: ServiceSettings) -> None:
    """Replace a model's settings, whole and durably.

    Raises:
        BadArtifact: the disk is full, or cannot be written.
    """
    write_atomic(model / SETTINGS, dumps(settings) + "\n", what=SETTINGS, error=BadArtifact)

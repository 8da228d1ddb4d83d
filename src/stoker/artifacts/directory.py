"""A model on disk: numbered versions (`models/digits/1/manifest.json` and its files) and `models/digits/service.json`.

A version is written to a temporary directory, its manifest last, then fsynced and renamed: after a power cut it is
complete or absent. A copy made by hand may be incomplete; `Artifact.verify` detects that.

An artifact is its manifest and the regular files that the manifest lists, and nothing else: engines open files on their
own (`model.bin` next to `model.xml`), so a server would read an unlisted file or a link without a check.
Links above the files belong to the operator and are followed: a directory of models, a model, or a version may be one.
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath, PureWindowsPath

from stoker.artifacts.golden import Golden, read_golden
from stoker.errors import BadArtifact
from stoker.records import BATCH, FileDigest, Manifest, ServiceSettings, digest, dumps, from_json, loads
from stoker.records.codec import parsed
from stoker.store import disk_errors, files, sha256_file, write_atomic, write_file
from stoker.store.files import aside_path, disk, is_aside, make_directories, remove_tree, sync_file

MANIFEST = "manifest.json"
_MOST_MANIFEST_BYTES = 16 * 1024 * 1024
_MOST_DIGITS = 9
_ABANDONED_S = 86400.0
"""Age at which a half-written version counts as abandoned, on file systems without locks [s]."""

Listing = Mapping[str, tuple[int, int, int, int]]
"""Files of an artifact by name: inode, size [bytes], times of the last change of content and of inode [ns]."""


@dataclass(frozen=True)
class Artifact:
    """One version of a model on disk. The manifest is read; other files are opened when they are used."""

    path: Path
    manifest: Manifest

    @property
    def version(self) -> int:
        """Number of the version [versions from 1], which is the directory's name."""
        return int(self.path.name)

    @property
    def graph_path(self) -> Path:
        """The file that the engine loads."""
        return self.path / self.manifest.graph

    @property
    def num_bytes(self) -> int:
        """Size of all files without the manifest [bytes]."""
        return sum(file.num_bytes for file in self.manifest.files)

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
        golden = read_golden(path)
        for what, tensors, specs in (
            ("input", golden.inputs, manifest.inputs),
            ("output", golden.outputs, manifest.outputs),
        ):
            if lacking := [spec.name for spec in specs if spec.name not in tensors]:
                raise BadArtifact(f"{path} has no {what} {lacking[0]!r}", remedy="Export the model again.")
        return golden

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
        is_version, available = (path / MANIFEST).is_file(), versions(path)
    if not is_version:
        if not available:
            raise BadArtifact(
                f"{path} is no exported model: neither it nor a numbered directory in it has a {MANIFEST}",
                remedy="`stoker export RUN -o DIR` makes one.",
            )
        path /= str(available[-1])
    if version_number(path.name) is None:
        remedy = "Put it into a directory such as models/digits/1."
        raise BadArtifact(f"{path} is not named for a version", remedy=remedy)
    manifest_path = path / MANIFEST
    with _reading(manifest_path):
        num_bytes = manifest_path.stat().st_size
        if num_bytes > _MOST_MANIFEST_BYTES:
            raise BadArtifact(
                f"{manifest_path} has {num_bytes:,} bytes; a manifest has at most {_MOST_MANIFEST_BYTES:,}"
            )
        manifest = loads(manifest_path.read_bytes(), Manifest)
    problem = manifest_problem(manifest)
    if problem is not None:
        raise BadArtifact(f"{manifest_path} {problem}", remedy="Export the model again.")
    return Artifact(path, manifest)


def manifest_problem(manifest: Manifest) -> str | None:
    """First contradiction in an untrusted manifest, as the end of a sentence that begins with its path; or None."""
    return next(_manifest_problems(manifest), None)


def _manifest_problems(manifest: Manifest) -> Iterator[str]:
    names = [file.name for file in manifest.files]
    for name in (manifest.graph, manifest.golden, *names):
        is_absolute = PurePosixPath(name).is_absolute() or bool(PureWindowsPath(name).anchor)
        if is_absolute or not name or "\0" in name or ".." in PurePosixPath(name.replace("\\", "/")).parts:
            yield f"names {name!r}, which is outside its directory"
    for name in (manifest.graph, manifest.golden):
        if name not in names:
            yield f"gives no digest of {name!r}"
    yield from _signature_problems(manifest)
    for dim in manifest.dims:
        if dim.low < 0 or (dim.high is not None and dim.high < dim.low):
            yield f"lets {dim.name!r} go from {dim.low} to {dim.high}"
    for value in (manifest.tolerance.absolute, manifest.tolerance.relative):
        if not (math.isfinite(value) and value >= 0):
            yield f"allows answers to differ by {value}"


def _signature_problems(manifest: Manifest) -> Iterator[str]:
    for what, specs in (("inputs", manifest.inputs), ("outputs", manifest.outputs)):
        if not specs:
            yield f"has no {what}"
        if len({spec.name for spec in specs}) < len(specs):
            yield f"has two {what} of one name"
        for spec in specs:
            if any(dim == "" or (not isinstance(dim, str) and dim < 0) for dim in spec.shape):
                yield f"gives {spec.name!r} the shape {list(spec.shape)}"
            if BATCH in spec.shape[1:]:
                yield f"gives {spec.name!r} the shape {list(spec.shape)}: the batch comes first or not at all"
    for name in manifest.labels:
        if name not in {spec.name for spec in manifest.outputs}:
            yield f"has labels of {name!r}, which is no output"


def publish(model: Path, write: Callable[[Path, Callable[[], tuple[FileDigest, ...]]], Manifest]) -> Artifact:
    """Write the next version of a model atomically. Half-written versions of killed writers are removed.

    `write(directory, digests)` puts files into `directory` and returns the manifest; `digests()` gives the digests of
    all files in it at that time. Several processes may write versions of one model at once: each version takes the
    number that is free when it is complete.

    Raises:
        BadArtifact: the disk is full, or cannot be written.
    """
    aside = aside_path(model / "version")

    def digests() -> tuple[FileDigest, ...]:
        return tuple(
            FileDigest(name=path.relative_to(aside).as_posix(), num_bytes=path.stat().st_size, sha256=sha256_file(path))
            for path in sorted(aside.rglob("*"))
            if path.is_file()
        )

    with disk_errors(model, "the model", error=BadArtifact, option="-o DIR"):
        make_directories(model)
        _remove_abandoned(model)
        disk().make_directory(aside)
        lock = None
        try:
            with suppress(files.LocksUnsupported):
                lock = _locked_directory(aside)
            manifest = write(aside, digests)
            write_file(aside / MANIFEST, (dumps(manifest) + "\n").encode())
            for path in sorted(aside.rglob("*")):  # libraries wrote these files and did not wait for the disk
                if path.is_file():
                    sync_file(path)
                elif path.is_dir():
                    disk().sync_directory(path)
            disk().sync_directory(aside)
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
    """Rename a complete version to the next free number, again if another process takes that number first."""
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
    """Remove half-written versions whose writer has ended: a writer holds a lock on the directory.

    Without such locks, those in which no file was created for a day.
    """
    for entry in filter(is_aside, sorted(model.iterdir())):
        try:
            descriptor = _locked_directory(entry)
        except files.LocksUnsupported:
            if time.time() - entry.stat().st_mtime > _ABANDONED_S:
                remove_tree(entry)
        else:
            if descriptor is not None:
                os.close(descriptor)
                remove_tree(entry)


def _locked_directory(directory: Path) -> int | None:
    """Descriptor that holds the lock of a directory until it is closed; None if another process holds it.

    Raises:
        LocksUnsupported: the platform or the file system has no locks of directories.
    """
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except OSError as problem:  # Windows opens no directories; or its writer finished just now
        raise files.LocksUnsupported(str(problem)) from problem
    try:
        if files.try_lock(descriptor):
            return descriptor
    except OSError as problem:  # NFS locks only what is open for writing
        os.close(descriptor)
        raise files.LocksUnsupported(str(problem)) from problem
    except files.LocksUnsupported:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _walk(directory: Path, prefix: str) -> Iterator[tuple[str, os.stat_result]]:
    """Files and links below a directory, by relative name; no link is followed."""
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(Path(entry.path), f"{prefix}{entry.name}/")
            else:
                yield f"{prefix}{entry.name}", entry.stat(follow_symlinks=False)


def _sha256_of_regular(path: Path) -> str:
    """SHA-256 (hex) of a regular file; OSError if a link or a pipe has replaced it since it was listed."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is not a regular file")
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise BadArtifact(f"{path} cannot be read: {error}", remedy="Export the model again.") from error


SETTINGS = "service.json"
_MOST_BYTES = 1024 * 1024


def read_settings(model: Path) -> ServiceSettings:
    """Settings in a model's `service.json`, or the defaults. A file written by hand needs no `record` and `schema`.

    Raises:
        BadArtifact: they cannot be read.
    """
    path = model / SETTINGS
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES:,} bytes")
        document = parsed(text)
        if isinstance(document, dict) and not {"record", "schema"} & document.keys():  # written by hand
            document |= {"record": ServiceSettings.__name__, "schema": ServiceSettings.schema}
        return from_json(document, ServiceSettings)
    except FileNotFoundError:
        return ServiceSettings()
    except (OSError, ValueError) as error:
        remedy = 'Mend or delete it; `{"versions": [1]}` is a whole one, and `stoker bench-serve` writes one.'
        raise BadArtifact(f"{path} cannot be read: {error}", remedy=remedy) from error


def write_settings(model: Path, settings: ServiceSettings) -> None:
    """Replace a model's settings atomically and durably.

    Raises:
        BadArtifact: the disk is full, or cannot be written.
    """
    write_atomic(model / SETTINGS, dumps(settings) + "\n", what=SETTINGS, error=BadArtifact)

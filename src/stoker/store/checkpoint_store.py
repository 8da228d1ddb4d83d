"""Checkpoints on disk: each is whole and durable, or it is not there.

```
checkpoints/000000027000/            the position [samples]; written a second time it is 000000027000.2
                model.safetensors    whatever the caller writes
                manifest.json        CheckpointManifest with the size and SHA-256 of every file and of itself, the run's
                                     identity and the position; written last
                model.0-of-2.…       where several processes wrote it: each has files of its own
            best.json                which one evaluation liked best
            .writing-…/              one being written, or left behind by a killed process
```
A checkpoint is written aside, fsynced and renamed into place before an older one is removed, and none is ever
replaced: at every moment the previous one or the new one can be read. Checkpoints beyond the one just written belong to
a future that training turned back from (they were damaged); they are removed with the old ones.

There is one writer at a time, the holder of the run's lock; readers need no lock. Several processes may fill one draft:
one begins it, each seals the files it wrote, and the first completes it when all have.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path

from stoker.errors import BadRun, RunFailed
from stoker.records import CheckpointManifest, FileDigest, Position, dumps, loads
from stoker.store.disk_errors import disk_errors, read_errors
from stoker.store.files import (
    aside_path,
    disk,
    make_directories,
    remove_leftovers,
    remove_tree,
    sha256_file,
    sync_file,
    write_atomic,
    write_file,
)

MANIFEST = "manifest.json"
BEST = "best.json"
_NAME = re.compile(r"(\d{12,})(?:\.(\d+))?")
_ONE_DIRECTORY = "All processes must see one directory of the run, on a file system where each sees what others wrote."
_REMEDY = "Restore one of them from a copy, or start another run with --new; they were left as they are."


@dataclass(frozen=True)
class Draft:
    """A checkpoint that is being written: files go into `aside`, which becomes `target` once all of it is whole."""

    target: Path
    aside: Path


def checkpoint_name(position: Position) -> str:
    """The name of the checkpoint at `position`.

    >>> checkpoint_name(Position(samples=27_000))
    '000000027000'
    """
    return f"{position.samples:012d}"


class CheckpointStore:
    """The checkpoints of one run: the last `keep_last`, and the best.

    `problems` collects, for people, what was found damaged and passed over, or could not be removed. Making a store
    touches nothing. With `spec_digest`, the run's own, a checkpoint of another job counts as damaged.
    """

    def __init__(self, directory: Path, keep_last: int = 2, *, spec_digest: str | None = None) -> None:
        if keep_last < 1:
            raise ValueError(f"at least one checkpoint must be kept, got keep_last={keep_last}")
        self.directory = directory
        self.keep_last = keep_last
        self.spec_digest = spec_digest
        self.problems: list[str] = []

    def write(
        self,
        position_name: str,
        files: Callable[[Path], None],
        manifest: Callable[[tuple[FileDigest, ...]], CheckpointManifest],
    ) -> Path:
        """Write a checkpoint durably, then remove the ones no longer kept.

        Args:
            position_name: `checkpoint_name(position)`.
            files: Writes the files into the directory it is given; they are fsynced and digested afterwards.
            manifest: The manifest, given the digests of the files.

        Returns:
            Its directory; the directory's name is the one for `mark_best`.

        Raises:
            RunFailed: it cannot be written; the previous ones are intact and nothing half-made is left.
        """
        draft = self.draft(position_name)
        with self._errors(draft):
            self._make(draft)
            try:
                files(draft.aside)
                self._complete(draft, manifest(_sealed(draft.aside, sorted(draft.aside.rglob("*")))))
            except BaseException:
                self.discard(draft)
                raise
        self._prune(draft.target.name)
        return draft.target

    def draft(self, position_name: str) -> Draft:
        """Where a checkpoint at this position would be written: its name, with a number if it was written before."""
        if _NAME.fullmatch(position_name) is None:
            raise ValueError(f"a checkpoint is named by 12 digits, got {position_name!r}")
        samples = _order(position_name)[0]
        attempts = [attempt for position, attempt in map(_order, self.names()) if position == samples]
        suffix = f".{max(attempts) + 1}" if attempts else ""
        target = self.directory / f"{samples:012d}{suffix}"
        return Draft(target, aside_path(target))

    def begin(self, position_name: str) -> Draft:
        """Make the directory of a checkpoint that several processes fill; what was left of others is removed.

        Raises:
            RunFailed: it cannot be made.
        """
        draft = self.draft(position_name)
        with self._errors(draft):
            self._make(draft)
        return draft

    def seal(self, draft: Draft, write: Callable[[Path], Iterable[str]]) -> tuple[FileDigest, ...]:
        """Let `write` add files to a draft, whose names it returns; they are durable then, and digested.

        Raises:
            RunFailed: they cannot be written. The draft is of no more use.
        """
        with self._errors(draft):
            return _sealed(draft.aside, [draft.aside / name for name in write(draft.aside)])

    def complete(self, draft: Draft, manifest: CheckpointManifest) -> Path:
        """Make a checkpoint of a draft whose files are all sealed, then remove the ones no longer kept.

        Raises:
            RunFailed: it cannot be written, or a file is not there as its writer left it; nothing half-made is left.
        """
        try:
            with self._errors(draft):
                for file in manifest.files:
                    _require_whole(draft, file)
                self._complete(draft, manifest)
        except BaseException:
            self.discard(draft)
            raise
        self._prune(draft.target.name)
        return draft.target

    def discard(self, draft: Draft) -> None:
        """Remove what was written of a checkpoint that will not be."""
        with suppress(OSError):  # what stays is cleared by the next writer; the first error is the one to report
            remove_tree(draft.aside)

    def mark_best(self, name: str) -> None:
        """Mark a checkpoint as the best; it is kept until another one is marked. Marking it again changes nothing.

        Raises:
            RunFailed: the mark cannot be written; the old one is intact.
            ValueError: there is no such checkpoint.
        """
        if name not in self.names():
            raise ValueError(f"no checkpoint {name!r} to mark as best; there are {', '.join(self.names()) or 'none'}")
        write_atomic(self.directory / BEST, json.dumps({"best": name}) + "\n", what="the mark of the best checkpoint")

    def newest(self) -> tuple[Path, CheckpointManifest] | None:
        """The newest checkpoint whose manifest reads and whose files all have their size and SHA-256.

        Damaged newer ones are passed over, each with a line in `problems`.

        Returns:
            Its directory and manifest; None if there are no checkpoints at all.

        Raises:
            BadRun: there are some and none is usable (training would silently start over), or the newest readable
                manifest is of another schema version.
        """
        reasons: list[str] = []
        for name in reversed(self.names()):
            checkpoint = self._inspect(name, with_digests=True)
            if isinstance(checkpoint, CheckpointManifest):
                self.problems += [f"{reason}; using {name}" for reason in reasons]
                return self.directory / name, checkpoint
            reasons.append(f"checkpoint {name}: {checkpoint}")
        if reasons:
            raise BadRun(f"No checkpoint in {self.directory} is usable: {'; '.join(reasons)}.", remedy=_REMEDY)
        return None

    def newest_position(self) -> Position:
        """The position of the newest checkpoint, whose files are not read; the start where there is none."""
        manifests = (self._inspect(name, with_digests=False) for name in reversed(self.names()))
        return next(
            (manifest.position for manifest in manifests if isinstance(manifest, CheckpointManifest)), Position()
        )

    def named(self, name: str) -> tuple[Path, CheckpointManifest]:
        """A checkpoint that another process found whole; only sizes are looked at, not digests.

        Raises:
            BadRun: it is not whole here.
        """
        checkpoint = self._inspect(name, with_digests=False)
        if isinstance(checkpoint, CheckpointManifest):
            return self.directory / name, checkpoint
        raise BadRun(f"{self.directory / name} is not whole for every process: {checkpoint}.", remedy=_ONE_DIRECTORY)

    def best(self) -> tuple[Path, CheckpointManifest] | None:
        """The checkpoint marked best, checked as by `newest`; None if none was marked.

        Raises:
            BadRun: it, or the mark, is damaged: no other one takes its place silently.
        """
        name = self._best_name()
        if name is None:
            return None
        checkpoint = self._inspect(name, with_digests=True)
        if isinstance(checkpoint, CheckpointManifest):
            return self.directory / name, checkpoint
        raise BadRun(f"The best checkpoint, {self.directory / name}: {checkpoint}.", remedy=_REMEDY)

    def damage_of_best(self) -> str | None:
        """What is wrong with the checkpoint marked best, its digests not computed; None: nothing, or none is marked."""
        try:
            name = self._best_name()
            if name is None:
                return None
            checkpoint = self._inspect(name, with_digests=False)
        except BadRun as problem:
            return problem.message
        return f"The best checkpoint, {self.directory / name}: {checkpoint}." if isinstance(checkpoint, str) else None

    def names(self) -> tuple[str, ...]:
        """Names of the checkpoints that are there, whole or not, oldest first."""
        with read_errors(self.directory):
            entries = list(self.directory.iterdir()) if self.directory.exists() else []
        return tuple(sorted((e.name for e in entries if _NAME.fullmatch(e.name)), key=_order))

    def _inspect(self, name: str, *, with_digests: bool) -> CheckpointManifest | str:
        """As `_inspect`, and it is a checkpoint of this run."""
        manifest = _inspect(self.directory / name, with_digests=with_digests)
        if isinstance(manifest, str) or self.spec_digest in (None, manifest.spec_digest):
            return manifest
        return (
            f"{MANIFEST} is of another job ({manifest.spec_digest[:12]}…, this run is {(self.spec_digest or '')[:12]}…)"
        )

    def _errors(self, draft: Draft) -> AbstractContextManager[None]:
        what = f"checkpoint {draft.target.name}"
        return disk_errors(draft.target, what, needed_bytes=self._previous_bytes())

    def _make(self, draft: Draft) -> None:
        make_directories(self.directory)
        remove_leftovers(self.directory)
        disk().make_directory(draft.aside)

    def _complete(self, draft: Draft, manifest: CheckpointManifest) -> None:
        indent = None if manifest.tensors else 2  # a table of pieces is long, and not for people
        write_file(draft.aside / MANIFEST, dumps(manifest.with_checksum(), indent=indent).encode())
        disk().sync_directory(draft.aside)
        disk().rename(draft.aside, draft.target)
        disk().sync_directory(self.directory)

    def _prune(self, written: str) -> None:
        """Remove all but what was just written, the whole ones before it that are kept, and the best."""
        try:
            best = self._best_name()
        except BadRun as problem:  # which one must stay is unknown
            self.problems.append(f"no checkpoint was removed: {problem.message}")
            return
        position = _order(written)[0]
        earlier = [name for name in self.names() if _order(name)[0] < position and _is_whole(self.directory / name)]
        kept = {written, best, *earlier[max(0, len(earlier) - (self.keep_last - 1)) :]}
        for name in self.names():
            if name in kept:
                continue
            path = self.directory / name
            aside = aside_path(path)
            try:
                disk().rename(path, aside)  # first its name, so that half of one is never seen
                remove_tree(aside)
            except OSError as problem:
                self.problems.append(f"checkpoint {name} could not be removed: {problem.strerror}")

    def _best_name(self) -> str | None:
        path = self.directory / BEST
        try:
            name = json.loads(path.read_bytes())["best"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as problem:
            raise BadRun(f"{path} does not name a checkpoint.", remedy=_REMEDY) from problem
        if not isinstance(name, str) or _NAME.fullmatch(name) is None:
            raise BadRun(f"{path} names {name!r}, which is no checkpoint.", remedy=_REMEDY)
        return name

    def _previous_bytes(self) -> int | None:
        """Size of the newest checkpoint that is there [bytes], by its manifest."""
        for name in reversed(self.names()):
            with suppress(OSError, ValueError):
                manifest = manifest_from((self.directory / name / MANIFEST).read_bytes())
                return sum(file.num_bytes for file in manifest.files)
        return None


def order_of_name(name: str) -> tuple[int, int] | None:
    """Samples and attempt of a checkpoint's name, by which checkpoints are ordered; None for other names."""
    return _order(name) if _NAME.fullmatch(name) else None


def _order(name: str) -> tuple[int, int]:
    """The position [samples] a checkpoint's name says, and the how-manieth writing of it."""
    match = _NAME.fullmatch(name)
    assert match is not None, name
    return int(match[1]), int(match[2] or 1)


def manifest_from(text: bytes) -> CheckpointManifest:
    """The manifest of a checkpoint.

    Raises:
        ValueError: as `stoker.records.loads`; or it does not hold what its checksum was made of.
    """
    manifest = loads(text, CheckpointManifest)
    if not manifest.is_sound:
        raise ValueError("it is not as it was written: its checksum is of other content")
    return manifest


def _sealed(directory: Path, entries: list[Path]) -> tuple[FileDigest, ...]:
    """Fsync entries of an unfinished checkpoint, and digest its files."""
    for entry in (e for e in entries if e.is_file()):
        sync_file(entry)
    for entry in (e for e in entries if e.is_dir()):
        disk().sync_directory(entry)
    return tuple(
        FileDigest(name=e.relative_to(directory).as_posix(), num_bytes=e.stat().st_size, sha256=sha256_file(e))
        for e in entries
        if e.is_file()
    )


def _require_whole(draft: Draft, file: FileDigest) -> None:
    """Refuse a file that another process wrote, and that is not found here as it left it."""
    path = draft.aside / file.name
    size = path.stat().st_size if path.exists() else None
    if size != file.num_bytes:
        here = "is not there" if size is None else f"has {size:,} of {file.num_bytes:,} bytes"
        raise RunFailed(
            f"Checkpoint {draft.target.name} is not whole: {file.name} {here} for the process that completes it.",
            remedy=f"{_ONE_DIRECTORY} The last checkpoint is intact.",
        )


def _is_whole(path: Path) -> bool:
    """Whether manifest and sizes fit; the digests are not computed."""
    try:
        return isinstance(_inspect(path, with_digests=False), CheckpointManifest)
    except BadRun:
        return False


def _inspect(path: Path, *, with_digests: bool) -> CheckpointManifest | str:
    """The manifest of a checkpoint that is whole, or what is wrong with it.

    Raises:
        BadRun: it is of another schema version.
    """
    try:
        text = (path / MANIFEST).read_bytes()
        manifest = manifest_from(text)
        if manifest.position.samples != _order(path.name)[0]:
            return f"{MANIFEST} is of the position {manifest.position.samples:,} samples"
        for file in manifest.files:
            num_bytes = (path / file.name).stat().st_size
            if num_bytes != file.num_bytes:
                return f"{file.name} has {num_bytes:,} of {file.num_bytes:,} bytes"
            if with_digests and (sha256 := sha256_file(path / file.name)) != file.sha256:
                return f"{file.name} has SHA-256 {sha256[:12]}…, its manifest says {file.sha256[:12]}…"
    except FileNotFoundError as problem:
        return f"{Path(problem.filename).name} is missing"
    except OSError as problem:
        return f"cannot be read: {problem.strerror}"
    except ValueError as problem:
        if "schema version" in str(problem):
            remedy = "Use the Stoker it was written with, or start another run with --new."
            raise BadRun(f"{path / MANIFEST} is of another version of Stoker: {problem}.", remedy=remedy) from problem
        return f"{MANIFEST} cannot be used: {problem}"
    return manifest

"""Runs kept at a URL: `s3://bucket/runs`, `gs://…`, `file:///mnt/…`, whatever fsspec reaches; found again anywhere.

```
URL/NAME/run.json, spec.json, plan.json, …       records and final weights, as in the run's directory
         events/000000000000000.jsonl            the run's log in pieces, by offset [bytes]; a log only grows
         checkpoints/000000027000/…              each as in the run's directory; its manifest is sent last
```
A checkpoint without its manifest, or with a file of another size or SHA-256, does not count: the one before does. What
comes from there is not trusted: only files of known names are taken, none leaves the run's directory, no code (the copy
of the job file) is, and nothing is unpickled. Who can write there can replace a run by another one of the same job.
"""

from __future__ import annotations

import fnmatch
import importlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from stoker.errors import BadJob, BadRun, StokerError, first_line
from stoker.records import CheckpointManifest, Run, loads
from stoker.store.checkpoint_store import BEST, MANIFEST, CheckpointStore, manifest_from, order_of_name
from stoker.store.disk_errors import disk_errors
from stoker.store.files import aside_path, disk, make_directories, remove_tree, sha256_file, sync_file, written_aside
from stoker.store.run_directory import RunDirectory
from stoker.store.run_files import (
    BOTTLENECK,
    COLUMNS,
    COUPLING,
    DEVICE,
    ENVIRONMENT,
    EVENTS,
    KEPT,
    PLAN,
    PRUNING,
    RANKS,
    REPORT,
    RUN,
    SPEC,
    SWITCHES,
    WEIGHTS,
)
from stoker.units import format_count

RECORDS = (
    *(file.name for file in (SPEC, PLAN, ENVIRONMENT, DEVICE, COUPLING, COLUMNS)),
    SWITCHES,
    PRUNING.name,
    BOTTLENECK.name,
    f"{RANKS}/*.json",
    f"{KEPT}/*.safetensors",
    WEIGHTS,
    REPORT,
    RUN.name,
)
"""The files of a run besides its log and checkpoints, in the order of sending: with `run.json` it is a run."""

LOG_PIECE = re.compile(r"events/(\d{15})\.jsonl")
_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(?:/[A-Za-z0-9][A-Za-z0-9._-]*){0,3}")
_OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci", "r2"})
"""Where a file is there as a whole or not at all; elsewhere it is written aside and renamed."""
_MOST_RECORD_BYTES = 1 << 28
"""Records and manifests that are larger are not read [bytes]."""
_BLOCK_BYTES = 1 << 24


def _options(url: str) -> dict[str, Any]:
    """The options of the file system of a URL.

    botocore draws its pauses before repeats from Python's generator, which is the run's, in the mirror's thread. So it
    makes none: s3fs and the mirror repeat.
    """
    return {"config_kwargs": {"retries": {"total_max_attempts": 1}}} if url.startswith(("s3://", "s3a://")) else {}


def _what_to_check(protocols: set[str]) -> str:
    """What may be wrong at a store, in words."""
    if protocols & {"s3", "s3a"}:
        login, endpoint = "AWS_ACCESS_KEY_ID, AWS_PROFILE, …", "AWS_ENDPOINT_URL"
        return f"the bucket's name, the credentials ({login}) and the endpoint ({endpoint})"
    if protocols & {"file", "local"}:
        return "that the folder exists or can be made, that you may write there, and its free space"
    return "the name of the bucket or folder, and the credentials that its fsspec package documents"


@dataclass(frozen=True)
class RemoteRuns:
    """The runs below a URL.

    Attributes:
        url: as the user gave it.
        fs: fsspec's file system.
        root: the URL's path in it.
        is_atomic: whether a file that is being written cannot be seen.
    """

    url: str
    fs: Any
    root: str
    is_atomic: bool

    @classmethod
    def open(cls, url: str) -> Self:
        """The runs at `url`, which can be read and written; a folder of a disk is made.

        Raises:
            BadJob: a package is missing, the URL cannot be meant, or it cannot be read or written.
        """
        try:
            fsspec = importlib.import_module("fsspec")
            fs, root = fsspec.core.url_to_fs(url, **_options(url))
        except ImportError as error:
            raise BadJob(
                f"--keep {url} needs a package that is missing: {first_line(error)}",
                remedy="pip install 'stoker[keep]'; stores other than S3 have fsspec packages of their own, "
                "such as gcsfs or adlfs.",
            ) from error
        except ValueError as error:
            raise BadJob(
                f"--keep {url}: {first_line(error)}", remedy="Give a URL such as s3://bucket/runs or file:///mnt/runs."
            ) from error
        protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
        remote = cls(url.rstrip("/"), fs, root.rstrip("/"), bool(protocols & _OBJECT_STORES))
        try:
            if not remote.is_atomic:
                fs.makedirs(remote.root, exist_ok=True)
            probe = f"{remote.root}/.stoker"
            fs.pipe_file(probe, b"Runs kept by Stoker.\n")
        except Exception as error:
            raise BadJob(
                f"--keep {url} cannot be written: {type(error).__name__}: {first_line(error)}",
                remedy=f"Check {_what_to_check(protocols)}; nothing was started.",
            ) from error
        return remote

    def names(self) -> list[str]:
        """Names of the runs there, in order; folders of other names are left out."""
        self.fs.invalidate_cache()
        listed = (
            str(entry["name"]).rstrip("/").rpartition("/")[2]
            for entry in self.fs.ls(self.root, detail=True)
            if entry["type"] == "directory"
        )
        return sorted(name for name in listed if _SAFE.fullmatch(name))

    def files(self, name: str) -> dict[str, int]:
        """Sizes of the files of a run there [bytes], by their path in it; those of unsafe paths are left out."""
        self.fs.invalidate_cache()
        try:
            entries = self.fs.find(self.path(name), detail=True)
        except FileNotFoundError:
            return {}
        start = len(self.path(name)) + 1
        files = {path[start:]: int(info.get("size") or 0) for path, info in entries.items()}
        return {path: size for path, size in files.items() if _SAFE.fullmatch(path)}

    def path(self, *parts: str) -> str:
        """The path of a run, or of a file in it, as the file system knows it."""
        return "/".join((self.root, *parts))

    def read(self, name: str, file: str) -> bytes:
        """The content of a record of a run.

        Raises:
            ValueError: it is larger than a record is.
        """
        content: bytes = self.fs.cat_file(self.path(name, file), start=0, end=_MOST_RECORD_BYTES)
        if len(content) >= _MOST_RECORD_BYTES:
            raise ValueError(f"{file} is larger than a record")
        return content

    def blocks(self, name: str, file: str, start: int, end: int) -> Iterator[bytes]:
        """The bytes from `start` to `end` of a file of any size, in blocks.

        Raises:
            ValueError: it is shorter.
        """
        while start < end:
            block = self.fs.cat_file(self.path(name, file), start=start, end=min(end, start + _BLOCK_BYTES))
            if not block:
                raise ValueError(f"{file} ends after {start:,} of {end:,} bytes")
            yield block
            start += len(block)

    def put(self, name: str, file: str, source: Path | bytes) -> None:
        """Write a file of a run there; who reads sees the old or the new one, whole."""
        final = self.path(name, file)
        target = final if self.is_atomic else f"{final}.writing"
        if not self.is_atomic:
            self.fs.makedirs(final.rpartition("/")[0], exist_ok=True)
        if isinstance(source, bytes):
            self.fs.pipe_file(target, source)
        else:
            self.fs.put_file(str(source), target)
        if target != final:
            self.fs.mv(target, final)

    def delete(self, name: str, files: Iterable[str]) -> None:
        """Delete files of a run there, one after the other; those that are gone already are no error."""
        for file in files:
            try:
                self.fs.rm_file(self.path(name, file))
            except FileNotFoundError:
                continue

    def checkpoints(self, files: Iterable[str]) -> list[str]:
        """Names of the checkpoints with a manifest among `files`, oldest first."""
        parts = (file.split("/") for file in files)
        names = {p[1] for p in parts if len(p) == 3 and p[0] == "checkpoints" and p[2] == MANIFEST}
        return sorted((name for name in names if order_of_name(name) is not None), key=lambda n: order_of_name(n) or ())

    def usable(self, name: str, files: dict[str, int], checkpoint: str, spec_digest: str) -> CheckpointManifest | str:
        """The manifest of a checkpoint there whose files have their sizes, or what is wrong with it."""
        try:
            manifest = manifest_from(self.read(name, f"checkpoints/{checkpoint}/{MANIFEST}"))
        except (OSError, ValueError) as problem:
            return f"its manifest cannot be used: {first_line(problem)}"
        if manifest.spec_digest != spec_digest:
            return "it is of another job"
        if manifest.position.samples != (order_of_name(checkpoint) or (None,))[0]:
            return f"its manifest is of the position {manifest.position.samples:,} samples"
        for file in manifest.files:
            if _SAFE.fullmatch(file.name) is None:
                return f"its manifest names {file.name!r}, which leaves its folder"
            size = files.get(f"checkpoints/{checkpoint}/{file.name}")
            if size != file.num_bytes:
                return f"{file.name} has {'no' if size is None else f'{size:,}'} of {file.num_bytes:,} bytes"
        return manifest


def event_pieces(files: dict[str, int]) -> list[tuple[str, int, int]]:
    """The pieces of a run's log that follow each other: path, offset and size [bytes]; what is after a gap is left out.

    A piece inside those before it, left behind when they were joined, is passed over.
    """
    pieces, end = [], 0
    for path in sorted(path for path in files if LOG_PIECE.fullmatch(path)):
        offset, size = int(path[7:22]), files[path]
        if offset > end:
            break
        if offset + size > end:
            pieces.append((path, offset, size))
            end = offset + size
    return pieces


def bring_home(
    remote: RemoteRuns, base: Path, tell: Callable[[str], None], *, family: bool = True, is_parent: bool = False
) -> None:
    """Fetch the runs named as `base` that are further there than here: records, log, newest and best checkpoint.

    Args:
        remote: where runs are kept.
        base: directory of the run here; with `family` those of `base-2`, `base-3`, … too.
        tell: receives what people should know.
        family: whether further runs of the same name count.
        is_parent: whether another run is to begin from it: its checkpoints are then fetched even if it is finished.

    Raises:
        BadRun: a run there cannot be read or used, is in use here, or cannot be written.
    """
    pattern = re.compile(re.escape(base.name) + (r"(?:-[1-9]\d*)?" if family else ""))
    try:
        for name in remote.names():
            if pattern.fullmatch(name):
                _bring_run(remote, name, RunDirectory(base.parent / name), tell, is_parent=is_parent)
    except StokerError:
        raise
    except Exception as problem:  # libraries of stores have errors of their own
        raise BadRun(
            f"{remote.url} cannot be read: {type(problem).__name__}: {first_line(problem)}",
            remedy="Nothing was started; the same command tries again.",
        ) from problem


def _bring_run(
    remote: RemoteRuns, name: str, here: RunDirectory, tell: Callable[[str], None], *, is_parent: bool
) -> None:
    """Fetch a run that is not here, or is further there."""
    files = remote.files(name)
    if RUN.name not in files:
        return  # the first upload did not come so far
    try:
        theirs = loads(remote.read(name, RUN.name), Run)
    except ValueError as problem:
        raise BadRun(
            f"{remote.url}/{name}/run.json cannot be used: {first_line(problem)}.",
            remedy="Restore it, delete that folder, or choose another --run-dir or --keep.",
        ) from problem
    is_over = theirs.status == "finished"
    if not here.is_run:
        if here.is_vacant:
            aside = aside_path(here.path)
            with disk_errors(here.path, f"the run {name}", error=BadRun):
                make_directories(here.path.parent)
                disk().make_directory(aside)
            try:
                samples = _fetch(remote, name, files, theirs, aside, tell, has_checkpoints=is_parent or not is_over)
                with disk_errors(here.path, f"the run {name}", error=BadRun):
                    _move_in(aside, here)
            finally:
                if aside.exists():
                    remove_tree(aside)
            tell(f"{name} comes from {remote.url}, {theirs.status} at {format_count(samples)} samples")
        return
    mine = here.read_run()
    is_done = mine.status == "finished"
    if mine.spec_digest != theirs.spec_digest:
        return
    if is_done and not (is_parent and is_over and mine.created_at == theirs.created_at):
        return
    is_further = is_over and not is_done
    if not is_further:
        ahead = _newest(remote, name, files, theirs.spec_digest, lambda _: None)
        newest_here = CheckpointStore(here.checkpoints).newest_position()
        is_further = ahead is not None and ahead[1].position.samples > newest_here.samples
    if is_further:
        with here.locked():
            if is_done:  # its records are final, but its last checkpoints may never have been here
                samples = _fetch_checkpoints(remote, name, files, theirs, here.path, tell)
            else:
                samples = _fetch(remote, name, files, theirs, here.path, tell, has_checkpoints=is_parent or not is_over)
        tell(f"{name} is further in {remote.url}, and comes from there: {format_count(samples)} samples")


def _move_in(fetched: Path, here: RunDirectory) -> None:
    """Put a fetched run where it belongs: into a vacant directory file by file, with its record last."""
    if not here.path.exists():
        disk().rename(fetched, here.path)
        return
    with here.locked():
        for entry in sorted(fetched.iterdir(), key=lambda entry: entry.name == RUN.name):
            target = here.path / entry.name
            if target.is_dir():
                remove_tree(target)
            disk().rename(entry, target)
        disk().sync_directory(here.path)


def _fetch(
    remote: RemoteRuns,
    name: str,
    files: dict[str, int],
    run: Run,
    target: Path,
    tell: Callable[[str], None],
    *,
    has_checkpoints: bool,
) -> int:
    """Fetch a run into `target`: records first, since a checkpoint goes on under the plans in them; its samples."""
    with disk_errors(target, f"the run {name}", error=BadRun):
        for file in (path for pattern in RECORDS for path in sorted(files) if fnmatch.fnmatch(path, pattern)):
            if file != RUN.name and _SAFE.fullmatch(file) and file.count("/") <= 1:
                _get(remote, name, file, target / file)
        with written_aside(target / EVENTS) as aside:
            with aside.open("wb") as out:
                end = 0
                for file, offset, size in event_pieces(files):
                    out.writelines(remote.blocks(name, file, end - offset, size))
                    end = offset + size
            sync_file(aside)
        samples = _fetch_checkpoints(remote, name, files, run, target, tell) if has_checkpoints else run.samples
        _get(remote, name, RUN.name, target / RUN.name)
        disk().sync_directory(target)
    return samples


def _fetch_checkpoints(
    remote: RemoteRuns, name: str, files: dict[str, int], run: Run, target: Path, tell: Callable[[str], None]
) -> int:
    """Fetch a run's newest and best checkpoint into `target`; the samples of the newest, else of the run."""
    with disk_errors(target, f"the checkpoints of {name}", error=BadRun):
        found = _newest(remote, name, files, run.spec_digest, tell)
        best = _best(remote, name, files)
        for checkpoint in dict.fromkeys([found[0] if found else None, best]):
            if checkpoint is not None:
                _get_checkpoint(remote, name, files, checkpoint, run.spec_digest, target / "checkpoints", tell)
        if best is not None and (target / "checkpoints" / best).exists():
            _get(remote, name, f"checkpoints/{BEST}", target / "checkpoints" / BEST)
    return run.samples if found is None else found[1].position.samples


def _newest(
    remote: RemoteRuns, name: str, files: dict[str, int], spec_digest: str, tell: Callable[[str], None]
) -> tuple[str, CheckpointManifest] | None:
    """The newest usable checkpoint there; None where there is none at all.

    Raises:
        BadRun: there are some, and none is usable: training would silently start over.
    """
    problems: list[str] = []
    for checkpoint in reversed(remote.checkpoints(files)):
        usable = remote.usable(name, files, checkpoint, spec_digest)
        if isinstance(usable, CheckpointManifest):
            for problem in problems:
                tell(f"{problem}; using {checkpoint}")
            return checkpoint, usable
        problems.append(f"checkpoint {checkpoint} in {remote.url}/{name} is passed over: {usable}")
    if problems:
        raise BadRun(
            f"No checkpoint in {remote.url}/{name} is usable: {'; '.join(problems)}.",
            remedy="Restore one of them, or start another run with --new; they were left as they are.",
        )
    return None


def _best(remote: RemoteRuns, name: str, files: dict[str, int]) -> str | None:
    """The checkpoint that is marked best there and is there; None otherwise."""
    if f"checkpoints/{BEST}" not in files:
        return None
    match = re.search(rb'"best": "(\d{12,}(?:\.\d+)?)"', remote.read(name, f"checkpoints/{BEST}"))
    best = None if match is None else match[1].decode()
    return best if best in remote.checkpoints(files) else None


def _get_checkpoint(
    remote: RemoteRuns,
    name: str,
    files: dict[str, int],
    checkpoint: str,
    spec_digest: str,
    folder: Path,
    tell: Callable[[str], None],
) -> None:
    """Fetch a checkpoint; one whose content is not as its manifest says is left out, and the one before is fetched.

    One of this name that is whole here stays; a damaged one is replaced.
    """
    manifest = remote.usable(name, files, checkpoint, spec_digest)
    if isinstance(manifest, str) or _is_whole(folder, checkpoint):
        return
    make_directories(folder)
    aside = aside_path(folder / checkpoint)
    disk().make_directory(aside)
    try:
        for file in (*(entry.name for entry in manifest.files), MANIFEST):
            _get(remote, name, f"checkpoints/{checkpoint}/{file}", aside / file)
        wrong = next((entry.name for entry in manifest.files if sha256_file(aside / entry.name) != entry.sha256), None)
        if wrong is None and manifest_from((aside / MANIFEST).read_bytes()) == manifest:
            disk().sync_directory(aside)
            if (folder / checkpoint).exists():
                remove_tree(folder / checkpoint)
            disk().rename(aside, folder / checkpoint)
            return
    finally:
        if aside.exists():
            remove_tree(aside)
    tell(f"checkpoint {checkpoint} in {remote.url}/{name} is passed over: {wrong or MANIFEST} is not as it was written")
    rest = {path: size for path, size in files.items() if not path.startswith(f"checkpoints/{checkpoint}/")}
    before = _newest(remote, name, rest, spec_digest, tell)
    if before is None:
        raise BadRun(
            f"No checkpoint in {remote.url}/{name} is usable.",
            remedy="Restore one of them, or start another run with --new.",
        )
    _get_checkpoint(remote, name, rest, before[0], spec_digest, folder, tell)


def _is_whole(folder: Path, checkpoint: str) -> bool:
    """Whether a checkpoint is here with all of its files, in their sizes."""
    try:
        CheckpointStore(folder).named(checkpoint)
    except BadRun:
        return False
    return True


def _get(remote: RemoteRuns, name: str, file: str, target: Path) -> None:
    """Fetch a file, durably; it is there as a whole or not at all."""
    make_directories(target.parent)
    with written_aside(target) as aside:
        remote.fs.get_file(remote.path(name, file), str(aside))
        sync_file(aside)

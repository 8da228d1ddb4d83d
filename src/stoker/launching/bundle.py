"""Files that are sent to a place: code, this Stoker and data, each a folder named by the SHA-256 of its contents.

What: the job file with what it imports from its folder, uncommitted changes included; links to its data; Stoker's own
package; data files. At the place they are `ROOT/code/DIGEST`, `ROOT/stoker/DIGEST` and `ROOT/data/DIGEST`: what is
there already is not sent, and existing files are complete, since a transfer is unpacked aside and renamed.
Use when: a launcher starts a run. Costs: hashing; data files are hashed once until they change.
Does not travel: other files that the job reads by itself, unless `--send FILE` names them; packages (see
`environment_lock.py`); environment variables, but for those that are named.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import io
import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from stoker.data.reading.file_listing import files_below
from stoker.errors import BadJob
from stoker.store.files import file_digests, sha256_file
from stoker.units import format_bytes

MOST_BYTES = 10 * 2**30
"""More than this is not sent unless a higher limit is given [bytes]."""

_WORTH_NAMING_BYTES = 1 << 20

_KEPT_BYTES = 1 << 20
"""Files up to this size are kept in memory from when they are hashed: what is sent is what the digest is of."""


@dataclass(frozen=True, kw_only=True)
class TreeFile:
    """A file, or a symbolic link, of a folder that is sent.

    Attributes:
        path: relative, with slashes.
        num_bytes: size.
        digest: SHA-256 of the content (hex); of a link "".
        content: the bytes, or the file here that has them.
        link: where a symbolic link points, relative to its own folder; "" for files.
    """

    path: str
    num_bytes: int = 0
    digest: str = ""
    content: bytes | Path = field(default=b"", repr=False)
    link: str = ""
    is_executable: bool = False

    @classmethod
    def of_bytes(cls, path: str, content: bytes) -> TreeFile:
        """A small file."""
        return cls(path=path, num_bytes=len(content), digest=hashlib.sha256(content).hexdigest(), content=content)

    @classmethod
    def of_file(cls, path: str, source: Path, digest: str | None = None) -> TreeFile:
        """A file here: a small one is read now, a large one when it is sent, and for its digest if that is not known.

        Raises:
            BadJob: it cannot be read.
        """
        try:
            status = source.stat()
            if status.st_size <= _KEPT_BYTES:
                return replace(cls.of_bytes(path, source.read_bytes()), is_executable=bool(status.st_mode & 0o100))
            digest = digest or sha256_file(source)
        except OSError as error:
            raise BadJob(f"{source} cannot be read: {error.strerror}") from error
        return cls(
            path=path,
            num_bytes=status.st_size,
            digest=digest,
            content=source,
            is_executable=bool(status.st_mode & 0o100),
        )

    def open(self) -> IO[bytes]:
        """The content as a binary file."""
        return io.BytesIO(self.content) if isinstance(self.content, bytes) else self.content.open("rb")


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """A folder that is sent, as a list of files, sorted by path.

    Attributes:
        kind: `code`, `stoker` or `data`: the folder at the place that contains its own folder.
        name: what people know it as: the job file, a data file.
        files: what is in it.
    """

    kind: str
    name: str
    files: tuple[TreeFile, ...]

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of paths, contents, links and permissions to execute."""
        return tree_digest(self.files)

    @property
    def folder(self) -> str:
        """Its folder below the place's root."""
        return f"{self.kind}/{self.digest[:32]}"

    @property
    def num_bytes(self) -> int:
        """Bytes of all files [bytes]."""
        return sum(file.num_bytes for file in self.files)


def tree_digest(files: Iterable[TreeFile]) -> str:
    """SHA-256 (hex) of a folder's paths, contents, links and permissions to execute; the order does not matter."""
    whole = hashlib.sha256()
    for file in sorted(files, key=lambda entry: entry.path):
        kind = "link" if file.link else "program" if file.is_executable else "file"
        whole.update(f"{file.path}\0{kind}\0{file.link or file.digest}\n".encode(errors="surrogateescape"))
    return whole.hexdigest()


@dataclass(frozen=True, kw_only=True)
class Data:
    """A file or folder that the job reads, as the job's folder shows it at the place.

    Attributes:
        path: relative to the job's folder.
        bundle: what it is.
        file: its name in the bundle if it is a file; "" for a folder.
    """

    path: str
    bundle: Bundle
    file: str = ""


def work_folder(job_file: Path) -> Path:
    """The folder rebuilt at the place: the working directory if the job file is below it, else the file's own."""
    here, job = Path.cwd().resolve(), job_file.resolve()
    return here if job.is_relative_to(here) else job.parent


def code_bundle(
    job_file: Path,
    sources: Mapping[str, str],
    data: Sequence[Data] = (),
    send: Sequence[Path] = (),
    extra: Mapping[str, bytes] | None = None,
) -> Bundle:
    """The job's folder at the place: its file and local imports, links to data, and files that were named.

    Args:
        job_file: the job file.
        sources: texts by path relative to its folder, as `Entry.sources`.
        data: what it reads.
        send: further files and folders, below `work_folder(job_file)`.
        extra: further small files, by path.

    Raises:
        BadJob: a named file is not there, or outside of that folder.
    """
    root, job = work_folder(job_file), job_file.resolve()
    below = job.parent.relative_to(root)
    files = {
        (below / name).as_posix(): TreeFile.of_file((below / name).as_posix(), job.parent / name) for name in sources
    }
    for data_file in data:
        depth = data_file.path.count("/") + 2
        files[data_file.path] = TreeFile(
            path=data_file.path, link="../" * depth + data_file.bundle.folder + f"/{data_file.file}".rstrip("/")
        )
    for path in send:
        inside = path_below(path, root, "--send")
        for file in files_of(path, inside):
            files[file.path] = file
    files |= {path: TreeFile.of_bytes(path, content) for path, content in (extra or {}).items()}
    return Bundle(kind="code", name=job_file.name, files=tuple(sorted(files.values(), key=lambda file: file.path)))


def data_of(path: Path, root: Path) -> Data:
    """A file or folder of data, as the job's folder shows it at the place.

    Raises:
        BadJob: it is not there, cannot be read, or is outside of `root`.
    """
    inside = path_below(path, root, "data")
    names = [below for below, _ in _walk(path)] if path.is_dir() else [path.name]
    folder = path if path.is_dir() else path.parent
    try:
        digests = file_digests(folder, names)
    except OSError as error:
        raise BadJob(f"data {path} cannot be read: {error}") from error
    files = tuple(TreeFile.of_file(name, folder / name, digest) for name, digest in digests.items())
    return Data(
        path=inside,
        bundle=Bundle(kind="data", name=Path(inside).name, files=files),
        file="" if path.is_dir() else path.name,
    )


def path_below(path: Path, root: Path, what: str) -> str:
    """`path` relative to `root`, with slashes; links in it are kept as they are.

    Raises:
        BadJob: it is not there, or outside.
    """
    if not path.exists():
        raise BadJob(f"{what} {path} is not there")
    whole = Path(os.path.normpath(path if path.is_absolute() else Path.cwd() / path))
    for start in (root, root.resolve()):
        if whole.is_relative_to(start):
            return whole.relative_to(start).as_posix()
    raise BadJob(
        f"{what} {path} is outside of {root}, the folder that is rebuilt at the place",
        remedy="Start from a folder that holds both the job file and its data, or put the data there yourself and give "
        "the job its path by a setting.",
    )


def files_of(path: Path, inside: str) -> list[TreeFile]:
    """The files of `path`, a file or a folder, under the relative path `inside`; bytecode is left out."""
    if path.is_file():
        return [TreeFile.of_file(inside, path)]
    return [TreeFile.of_file(f"{inside}/{below}" if inside else below, source) for below, source in _walk(path)]


def _walk(path: Path) -> Iterator[tuple[str, Path]]:
    """Files below a folder with their relative paths, as `stoker.data` finds them, and hidden ones; no bytecode."""
    for name in files_below(path, with_hidden=True):
        below = Path(name)
        if "__pycache__" not in below.parts and below.suffix != ".pyc" and (path / below).is_file():
            yield name, path / below


@functools.cache
def stoker_bundle() -> Bundle:
    """This Stoker as a folder for PYTHONPATH: its package, and the metadata by which Python knows its version."""
    package = Path(__file__).resolve().parents[1]
    version = importlib.metadata.version("stoker")
    about = f"stoker-{version}.dist-info"
    metadata = importlib.metadata.distribution("stoker").read_text("METADATA") or f"Name: stoker\nVersion: {version}\n"
    files = [*files_of(package, "stoker"), TreeFile.of_bytes(f"{about}/METADATA", metadata.encode())]
    return Bundle(kind="stoker", name=f"Stoker {version}", files=tuple(files))


def largest(bundles: Iterable[Bundle], count: int = 10) -> list[tuple[str, int]]:
    """The largest files of bundles, as names and bytes, the largest first."""
    files = [(f"{bundle.name}: {file.path}", file.num_bytes) for bundle in bundles for file in bundle.files]
    return sorted(files, key=lambda file: (-file[1], file[0]))[:count]


def sending_text(bundles: Sequence[Bundle], to: str) -> str:
    """A line on what will be sent, with its size, and the largest files where it is much."""
    total = sum(bundle.num_bytes for bundle in bundles)
    text = f"sending {', '.join(bundle.name for bundle in bundles)} to {to}: {format_bytes(total)}"
    named = [f"{name} ({format_bytes(size)})" for name, size in largest(bundles, 10) if size >= _WORTH_NAMING_BYTES]
    return f"{text}; the largest: {', '.join(named)}" if named else text


def require_sendable(bundles: Sequence[Bundle], most_bytes: float = MOST_BYTES) -> None:
    """Refuse to send more than a limit.

    Raises:
        BadJob: it is more; with the largest files.
    """
    total = sum(bundle.num_bytes for bundle in bundles)
    if total > most_bytes:
        named = ", ".join(f"{name} ({format_bytes(size)})" for name, size in largest(bundles, 5))
        raise BadJob(
            f"{format_bytes(total)} would be sent, and the limit is {format_bytes(most_bytes)}; the largest: {named}",
            remedy="Put the data at the place (STOKER_DATA there, or --place-option data=FOLDER), or raise "
            "--send-limit.",
        )


@dataclass(frozen=True)
class Commit:
    """A folder's state in Git: the commit, and later changes as a patch; "" without a repository."""

    name: str = ""
    diff: str = ""


def commit_of(folder: Path) -> Commit:
    """The commit of a folder and its uncommitted changes; empty where there is no Git, or no repository."""
    name = _git(folder, "rev-parse", "HEAD")
    return Commit(name.strip(), _git(folder, "diff", "HEAD", "--", ".")) if name else Commit()


def _git(folder: Path, *words: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace") if done.returncode == 0 else ""


def secret_values(names: Iterable[str], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The values of environment variables that are sent separately and never stored.

    Raises:
        BadJob: one is not set here.
    """
    missing = [name for name in names if name not in environ]
    if missing:
        raise BadJob(
            f"--secret {missing[0]}: there is no environment variable {missing[0]} here",
            remedy=f"export {missing[0]}=…, then the same command.",
        )
    return {name: environ[name] for name in names}

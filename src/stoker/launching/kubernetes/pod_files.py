"""Reads and writes a run's volume in a pod: its text is run by `python3 -c` there. Standard library of Python 3.9 on.

Standard input is never closed by what sends it (Kubernetes' exec has no message for that before 1.30): every command
knows from its arguments, or from the data, where its input ends.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Any

WHOLE = ".stoker-whole"
"""Last entry of a tar stream: without it the stream was cut."""


def read(path: Path, offset: int, most: int) -> None:
    """Print bytes of a file from `offset` on; nothing if it is not there."""
    if path.exists():
        with path.open("rb") as file:
            file.seek(offset)
            sys.stdout.buffer.write(file.read(most))


def listing(folder: Path) -> None:
    """Print the regular files below a folder as a JSON object: path to size and time of change."""
    entries = {}
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            status = path.stat()
            entries[path.relative_to(folder).as_posix()] = [status.st_size, int(status.st_mtime)]
    print(json.dumps(entries))  # noqa: T201  # the answer


def pack(folder: Path, num_bytes: int) -> None:
    """Print a tar stream of files whose paths come as a JSON list of `num_bytes` bytes on standard input."""
    paths = json.loads(sys.stdin.buffer.read(num_bytes))
    with tarfile.open(fileobj=sys.stdout.buffer, mode="w|", dereference=True) as archive:  # of hard links, the content
        for path in paths:
            try:
                archive.add(folder / path, arcname=path, recursive=False)
            except FileNotFoundError:  # removed since it was listed: the next call brings what replaced it
                continue


def link(folder: Path, data: str, num_bytes: int) -> None:
    """Print 1 if data are in `folder`, or in `data` or what is named in it, which is then linked; else 0.

    Name and SHA-256 of each file come as a JSON object of `num_bytes` bytes on standard input. What was linked before
    is looked at again: it may have been changed.
    """
    order = json.loads(sys.stdin.buffer.read(num_bytes))
    places = [Path(data), Path(data) / order["name"]] if data else []
    if folder.is_symlink():
        places.insert(0, folder.readlink())
        folder.unlink()
    elif folder.is_dir():
        print(1)  # noqa: T201  # the answer
        return
    target = next((place for place in places if _holds(place, order)), None)
    if target is not None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.symlink_to(target)
    print(int(target is not None))  # noqa: T201  # the answer


def _holds(place: Path, order: dict[str, Any]) -> bool:
    """Whether a folder has these files, and no more of them unless it is one file that was asked for."""
    files = order["files"]
    if any(not (place / path).is_file() or _sha256(place / path) != digest for path, digest in files.items()):
        return False
    if list(files) == [order["name"]]:
        return True
    return _num_files(place) == len(files)


def _num_files(place: Path) -> int:
    """Number of files below a folder, without bytecode; links are followed, into no folder twice."""
    seen, count = set(), 0
    for folder, inner, names in os.walk(place, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            inner.clear()
            continue
        seen.add(real)
        inner[:] = sorted(name for name in inner if name != "__pycache__")
        count += sum(not name.endswith(".pyc") and (Path(folder) / name).is_file() for name in names)
    return count


def _sha256(path: Path) -> str:
    whole = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            whole.update(block)
    return whole.hexdigest()


def unpack(folder: Path) -> None:
    """Make a folder of a tar stream on standard input, whole or not at all."""
    if folder.is_dir():
        return
    aside = folder.with_name(f"{folder.name}.aside-{os.getpid()}")
    try:
        with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as archive:
            # Links to data lead out of the folder, which Python forbids by default from 3.14 on.
            archive.extraction_filter = getattr(tarfile, "fully_trusted_filter", None)
            archive.extractall(aside)  # noqa: S202  # sent by the one whose code runs here
        (aside / WHOLE).unlink()
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def main(words: list[str]) -> None:
    """Run one of the commands above."""
    command, path, *rest = words
    if command == "read":
        read(Path(path), int(rest[0]), int(rest[1]))
    elif command == "list":
        listing(Path(path))
    elif command == "pack":
        pack(Path(path), int(rest[0]))
    elif command == "link":
        link(Path(path), rest[0], int(rest[1]))
    elif command == "unpack":
        unpack(Path(path))
    elif command == "has":
        print(int(Path(path).is_dir()))  # noqa: T201  # the answer
    elif command == "touch":
        Path(path).touch()


if __name__ == "__main__":
    main(sys.argv[1:])

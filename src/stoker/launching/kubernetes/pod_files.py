"""Reads and writes a run's volume in a pod: its text is run by `python3 -c` there. Standard library of Python 3.9 on.

Standard input is never closed by what sends it (Kubernetes' exec has no message for that before 1.30): every command
knows from its arguments, or from the data, where its input ends.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tarfile
from pathlib import Path

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
    found = {}
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            status = path.stat()
            found[path.relative_to(folder).as_posix()] = [status.st_size, int(status.st_mtime)]
    print(json.dumps(found))  # noqa: T201  # the answer


def pack(folder: Path, num_bytes: int) -> None:
    """Print a tar stream of files whose paths come as a JSON list of `num_bytes` bytes on standard input."""
    paths = json.loads(sys.stdin.buffer.read(num_bytes))
    with tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as archive:
        for path in paths:
            try:
                archive.add(folder / path, arcname=path, recursive=False)
            except FileNotFoundError:  # removed meanwhile: the next call brings what replaced it
                continue


def unpack(folder: Path) -> None:
    """Make a folder of a tar stream on standard input, whole or not at all."""
    if folder.is_dir():
        return
    aside = folder.with_name(f"{folder.name}.aside-{os.getpid()}")
    try:
        with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as archive:
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
    elif command == "unpack":
        unpack(Path(path))
    elif command == "has":
        print(int(Path(path).is_dir()))  # noqa: T201  # the answer
    elif command == "touch":
        Path(path).touch()


if __name__ == "__main__":
    main(sys.argv[1:])

"""The files of a folder.

Which files are taken for images, and how one is brought to a size. Without Pillow, which decodes them.

Shards of WebDataset: tar files whose members share a key, `KEY.jpg` with `KEY.cls` or `KEY.json`.

Source: https://github.com/webdataset/webdataset, "The WebDataset Format": the key is the name up to the first dot of
its last part. A `./` before it, as `tar cf shard.tar .` writes, is none of it.
"""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from stoker.data.reading.text_tables import BadTable
from stoker.errors import first_line


def files_below(root: Path) -> Iterator[str]:
    """Files in and below `root`, sorted folder by folder, as paths from it with slashes.

    Links are followed, but into no folder twice; what begins with a dot is left out.
    """
    seen: set[str] = set()
    for folder, inner, names in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            inner.clear()
            continue
        seen.add(real)
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        between = Path(folder).relative_to(root).as_posix()
        start = "" if between == "." else f"{between}/"
        yield from (f"{start}{name}" for name in sorted(names) if not name.startswith("."))


Resize = Literal["stretch", "crop", "pad"]
"""An image of another shape is distorted, cut at its longer sides, or put on black."""

SUFFIXES = frozenset({
    ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm",
    ".jp2", ".tga", ".ico", ".avif",
})  # fmt: skip
"""Files that are taken for images, in lower case."""


_NAME = re.compile(r"(?:\./)?((?:.*/)?[^./][^./]*)\.([^/]+)")


class TarMember(NamedTuple):
    """A part of a sample: the sample's key, what it is (`seg.png`, in lower case), and where it lies [bytes]."""

    key: str
    kind: str
    offset: int
    size: int


def members_of(path: Path, *, is_strict: bool = False) -> Iterator[TarMember]:
    """The parts of samples in a shard, in order; hidden files and those without a kind are none. Only headers are read.

    Args:
        path: the shard.
        is_strict: refuse one without the marker that a whole tar file ends with as well.

    Raises:
        BadTable: it is no tar file, or has a part without its content; or it is cut off, once what is there has been
            given, the part it ends within too.
    """
    try:
        num_bytes = path.stat().st_size
        with tarfile.open(path, "r:") as file:
            for member in file:
                vars(file)["members"] = []  # else it keeps a record of every member
                found = named(member.name)
                if found is not None:
                    _require_content(path, member)
                if found is not None and member.isreg():
                    yield TarMember(*found, member.offset_data, member.size)
                if member.offset_data + member.size > num_bytes:
                    raise tarfile.ReadError(f"it ends within {member.name}")
            if is_strict and not _has_end(path, file.offset):
                at = min(file.offset, num_bytes)
                raise tarfile.ReadError(f"it is cut off: after {at:,} bytes there is no end marker")
    except (tarfile.TarError, OSError, EOFError) as error:
        raise BadTable(
            path,
            f"cannot be read as tar: {first_line(error)}",
            remedy="Fetch the shard again; it is damaged or cut off.",
        ) from error


def _require_content(path: Path, member: tarfile.TarInfo) -> None:
    """Refuse a part of a sample that is a link, or whose zeros are left out: its bytes do not follow its header.

    Raises:
        BadTable: it is one.
    """
    if member.islnk() or member.issym():
        raise BadTable(path, f"has {member.name} as a link to {member.linkname}, and not its content",
                       remedy="Write it again with --dereference --hard-dereference.")  # fmt: skip
    if member.issparse():
        raise BadTable(path, f"has {member.name} with holes, whose zeros are left out",
                       remedy="Write it again without --sparse.")  # fmt: skip


def _has_end(path: Path, offset: int) -> bool:
    """Whether there is a block of zeros where the last header was looked for [bytes]."""
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(tarfile.BLOCKSIZE) == bytes(tarfile.BLOCKSIZE)


def named(name: str) -> tuple[str, str] | None:
    """The key and the kind that a member's name says; None where it is no part of a sample.

    >>> named("./a/0001.seg.PNG")
    ('a/0001', 'seg.png')
    """
    matched = _NAME.fullmatch(name)
    return None if matched is None else (matched[1], matched[2].lower())

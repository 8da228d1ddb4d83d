"""Lists of files in a folder, and of members in a WebDataset shard. Does not import Pillow.

Shards are tar files whose members share a key, `KEY.jpg` with `KEY.cls` or `KEY.json`. Source:
https://github.com/webdataset/webdataset, "The WebDataset Format": the key is the name up to the first dot of its last
part. A leading `./`, as `tar cf shard.tar .` writes, is not part of it.
"""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from stoker.data.reading.table_readers import BadTable
from stoker.errors import first_line


def files_below(root: Path, *, with_hidden: bool = False) -> Iterator[str]:
    """Files in and below `root`, sorted folder by folder, as paths from it with slashes.

    Links are followed, but into no folder twice; what begins with a dot is left out. `with_hidden` adds that, and takes
    nothing away: what is met below a hidden folder counts as met there alone.
    """
    seen: set[tuple[bool, str]] = set()
    for folder, inner, names in os.walk(root, followlinks=True):
        between = Path(folder).relative_to(root)
        is_hidden = any(part.startswith(".") for part in between.parts)
        if (real := (is_hidden, os.path.realpath(folder))) in seen:
            inner.clear()
            continue
        seen.add(real)
        inner[:] = sorted(name for name in inner if with_hidden or not name.startswith("."))
        found = sorted(name for name in names if with_hidden or not name.startswith("."))
        yield from ((between / name).as_posix() for name in found)


Resize = Literal["stretch", "crop", "pad"]
"""An image of another shape is distorted, cropped at its longer sides, or padded with black."""

SUFFIXES = frozenset(
    {
        ".jpg",
        ".jpeg",
        ".jpe",
        ".jfif",
        ".png",
        ".bmp",
        ".gif",
        ".webp",
        ".tif",
        ".tiff",
        ".ppm",
        ".pgm",
        ".pbm",
        ".pnm",
        ".jp2",
        ".tga",
        ".ico",
        ".avif",
    }
)
"""Suffixes of image files, in lower case."""

_NAME = re.compile(r"(?:\./)?((?:.*/)?[^./][^./]*)\.([^/]+)")


class TarMember(NamedTuple):
    """A part of a sample: the sample's key, its kind (`seg.png`, in lower case), its offset and size [bytes]."""

    key: str
    kind: str
    offset: int
    size: int


def members_of(path: Path, *, is_strict: bool = False) -> Iterator[TarMember]:
    """The parts of samples in a shard, in order, without hidden files and those without a kind. Reads only headers.

    Args:
        path: the shard.
        is_strict: also refuse a file without the end marker of a complete tar file.

    Raises:
        BadTable: it is no tar file, or has a part without its content (a link, or with holes); or it is cut off, raised
            after all parts that begin in the file.
    """
    try:
        num_bytes = path.stat().st_size
        with tarfile.open(path, "r:") as file:
            for member in file:
                vars(file)["members"] = []  # else it keeps a record of every member
                found = named(member.name)
                if found is not None:
                    if member.islnk() or member.issym():
                        raise BadTable(
                            path,
                            f"has {member.name} as a link to {member.linkname}, and not its content",
                            remedy="Write it again with --dereference --hard-dereference.",
                        )
                    if member.issparse():
                        raise BadTable(
                            path,
                            f"has {member.name} with holes, whose zeros are left out",
                            remedy="Write it again without --sparse.",
                        )
                if found is not None and member.isreg():
                    yield TarMember(*found, member.offset_data, member.size)
                if member.offset_data + member.size > num_bytes:
                    raise tarfile.ReadError(f"it ends within {member.name}")
            if is_strict:
                with path.open("rb") as raw:
                    raw.seek(file.offset)
                    has_end = raw.read(tarfile.BLOCKSIZE) == bytes(tarfile.BLOCKSIZE)
                if not has_end:
                    end = min(file.offset, num_bytes)
                    raise tarfile.ReadError(f"it is cut off: after {end:,} bytes there is no end marker")
    except (tarfile.TarError, OSError, EOFError) as error:
        what = f"cannot be read as tar: {first_line(error)}"
        raise BadTable(path, what, remedy="Fetch the shard again; it is damaged or cut off.") from error


def named(name: str) -> tuple[str, str] | None:
    """The key and the kind in a member's name; None if it is not part of a sample.

    >>> named("./a/0001.seg.PNG")
    ('a/0001', 'seg.png')
    """
    matched = _NAME.fullmatch(name)
    return None if matched is None else (matched[1], matched[2].lower())

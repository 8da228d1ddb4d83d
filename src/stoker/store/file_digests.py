"""Digests of files in caches, computed once a boot and again after a change: what was cached is what is read.

A damaged file may have the right size. Reading all of a cache at every start would take as long as making
it, so digests are kept in the user's own cache with what the system says of each file: device, inode, size, times of
change, and the boot. A disk that damages a file without a write is noticed at the first start after the next boot.

Source: the idea of Git's index (Documentation/technical/racy-git): a file whose stat data are equal is not read again.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from stoker.errors import StokerError
from stoker.records import dumps, loads
from stoker.store.files import make_directories, sha256_file, write_atomic
from stoker.store.locations import cache_root, is_own

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_SETTLED_S = 2.0
"""A file that changed in the last so many seconds may change again within the resolution of its time of change [s]."""

Stamp = tuple[int, ...]
"""Device, inode, size [bytes], times of change of content and of the inode [ns]."""


@dataclass(frozen=True)
class _Known:
    """Digests of the files of one folder, as they were in one boot."""

    schema: ClassVar[int] = 1
    folder: str
    boot: str
    stamps: dict[str, tuple[int, ...]] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)


def file_digests(
    folder: Path, names: Iterable[str], *, reading: Callable[[int], None] = lambda _bytes: None
) -> dict[str, str]:
    """SHA-256 (hex) of files in `folder`; in the order given, without those that are not there.

    Args:
        folder: where they are.
        names: of the files.
        reading: receives how much has to be read [bytes], if anything.

    Raises:
        OSError: a file cannot be read.
    """
    known, stamps = _known(folder), _stamps(folder, names)
    fresh = {name: known.digests[name] for name in stamps if known.stamps.get(name) == stamps[name]}
    missing = [name for name in stamps if name not in fresh]
    if not missing:
        return fresh
    reading(sum(stamps[name][2] for name in missing))
    found = {name: fresh.get(name) or sha256_file(folder / name) for name in stamps}
    remember_digests(folder, found)
    return found


def remember_digests(folder: Path, digests: Mapping[str, str]) -> None:
    """Keep digests of files that were just computed; a cache that cannot be written costs the next start a reading."""
    latest = time.time_ns() - int(_SETTLED_S * 1e9)
    stamps = {name: stamp for name, stamp in _stamps(folder, digests).items() if stamp[4] < latest}
    known = _known(folder)
    whole = _Known(
        str(folder.resolve()), _boot(), known.stamps | stamps, known.digests | {name: digests[name] for name in stamps}
    )
    with suppress(OSError, StokerError):
        make_directories(_path(folder).parent)
        write_atomic(_path(folder), dumps(whole, indent=None), what="digests of a cache")


def _stamps(folder: Path, names: Iterable[str]) -> dict[str, Stamp]:
    found: dict[str, Stamp] = {}
    for name in names:
        with suppress(FileNotFoundError):
            status = (folder / name).stat()
            found[name] = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return found


def _known(folder: Path) -> _Known:
    with suppress(OSError, ValueError):
        known = loads(_path(folder).read_bytes(), _Known) if is_own(_path(folder)) else _Known("", "")
        is_current = (known.folder, known.boot) == (str(folder.resolve()), _boot())
        if is_current and known.stamps.keys() == known.digests.keys():
            return known
    return _Known(str(folder.resolve()), _boot())


def _path(folder: Path) -> Path:
    name = hashlib.sha256(str(folder.resolve()).encode("utf-8", "surrogateescape")).hexdigest()
    return cache_root() / "verified" / f"{name[:32]}.json"


def _boot() -> str:
    """Identifies this boot of the machine; "" where the system does not say."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""

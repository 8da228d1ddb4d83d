"""Measured links, kept for the next plan. Machine, PyTorch and number of processes are in the key."""

from __future__ import annotations

import hashlib
from pathlib import Path

from stoker.errors import RunFailed
from stoker.records import dumps, loads
from stoker.records.links import Links
from stoker.store.disk_errors import disk_errors
from stoker.store.files import make_directories, write_atomic


class LinksCache:
    """What processes on this machine reach between them, by a key as `stoker.devices.cache_key` makes it.

    `directory` is `cache_root() / "links"`.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def read(self, key: str, world_size: int) -> Links | None:
        """What was stored for so many processes; None if nothing was, or it cannot be read."""
        try:
            return loads(self._path(key, world_size).read_bytes(), Links)
        except (OSError, ValueError):
            return None

    def write(self, key: str, links: Links) -> None:
        """Store under `key` for as many processes as measured them, replacing what was there.

        Raises:
            RunFailed: it cannot be written.
        """
        path = self._path(key, links.world_size)
        with disk_errors(path.parent, "measured links", error=RunFailed):
            make_directories(path.parent)
        write_atomic(path, dumps(links) + "\n", what="measured links")

    def _path(self, key: str, world_size: int) -> Path:
        name = hashlib.sha256(f"{key}, {world_size} processes".encode()).hexdigest()[:24]
        return self.directory / f"{name}.json"

"""Decisions in the cache, by what they depend on: the same job is planned once for a device."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

from stoker.errors import RunFailed
from stoker.records import dumps, loads
from stoker.records.plan import KeptDecision
from stoker.store.disk_errors import disk_errors
from stoker.store.files import make_directories, write_atomic
from stoker.store.places import is_own

LONGEST_KEPT_S = 30 * 86400.0
"""Decisions that are older are made anew: a machine changes."""


class PlanCache:
    """Decisions with the coupling they rest on, by a key that says what they depend on.

    `directory` is `cache_root() / "plans"`.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def read(self, key: str) -> KeptDecision | None:
        """What was stored under `key`; None if nothing was, if it is too old, of another user, or cannot be read."""
        path = self._path(key)
        try:
            if not is_own(path):  # how samples are coupled is believed of it
                return None
            is_old = time.time() - path.stat().st_mtime > LONGEST_KEPT_S
            return None if is_old else loads(path.read_bytes(), KeptDecision)
        except (OSError, ValueError):
            return None

    def write(self, key: str, kept: KeptDecision) -> None:
        """Store under `key`, replacing what was there.

        Raises:
            RunFailed: it cannot be written.
        """
        with disk_errors(self.directory, "a plan", error=RunFailed):
            make_directories(self.directory)
        write_atomic(self._path(key), dumps(kept), what="a plan")

    def _path(self, key: str) -> Path:
        return self.directory / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"

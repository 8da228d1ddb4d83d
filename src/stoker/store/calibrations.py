"""What is remembered between runs, in the cache: forecasts beside measurements, and what devices really reach.

Both may be deleted; the next plan then knows less. What cannot be read is passed over: the cache serves several
versions of Stoker at once.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from stoker.errors import RunFailed
from stoker.records import Calibration, Ceilings, dumps, loads
from stoker.store.disk_errors import disk_errors
from stoker.store.files import append_line, make_directories, read_lines, write_atomic


class CalibrationStore:
    """All calibrations made on this machine, one a line; several processes may add to it at once.

    `directory` is `cache_root() / "calibration"`.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / "calibrations.jsonl"

    def append(self, calibration: Calibration) -> None:
        """Add one.

        Raises:
            RunFailed: it cannot be written; what was there is intact.
        """
        _make(self.path.parent, "a calibration")
        append_line(self.path, dumps(calibration, indent=None), what="a calibration")

    def read(self, *, device_model: str | None = None) -> tuple[Calibration, ...]:
        """All that can be read, oldest first; of one device model if it is given."""
        try:
            lines = read_lines(self.path)
        except OSError:
            return ()
        known = (_calibration(line) for line in lines)
        return tuple(c for c in known if c is not None and device_model in (None, c.device_model))


class CeilingsCache:
    """What devices really reach, by a key that says what it depends on (device, threads, versions).

    `directory` is `cache_root() / "ceilings"`.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def read(self, key: str) -> Ceilings | None:
        """What was stored under `key`; None if nothing was, or it cannot be read."""
        try:
            return loads(self._path(key).read_bytes(), Ceilings)
        except (OSError, ValueError):
            return None

    def write(self, key: str, ceilings: Ceilings) -> None:
        """Store under `key`, replacing what was there.

        Raises:
            RunFailed: it cannot be written.
        """
        _make(self.directory, "measured ceilings")
        write_atomic(self._path(key), dumps(ceilings) + "\n", what="measured ceilings")

    def _path(self, key: str) -> Path:
        return self.directory / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


def _calibration(line: bytes) -> Calibration | None:
    try:
        return loads(line, Calibration)
    except ValueError:
        return None


def _make(directory: Path, what: str) -> None:
    with disk_errors(directory, what, error=RunFailed):
        make_directories(directory)

"""What is remembered between runs, in the cache: forecasts beside measurements, and what devices really reach.

Both may be deleted; the next plan then knows less. What cannot be read is passed over: the cache serves several
versions of Stoker at once.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TypeVar

from stoker.errors import RunFailed
from stoker.records import Calibration, Ceilings, MicroBenchmark, dumps, loads
from stoker.store.disk_errors import disk_errors
from stoker.store.files import append_line, make_directories, read_lines, write_atomic

Kept = TypeVar("Kept", Ceilings, MicroBenchmark)


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
        return _read(_path(self.directory, key), Ceilings)

    def write(self, key: str, ceilings: Ceilings) -> None:
        """Store under `key`, replacing what was there.

        Raises:
            RunFailed: it cannot be written.
        """
        _write(_path(self.directory, key), ceilings, "measured ceilings")


class MicroBenchmarkCache:
    """Times of single operations, by a key as in `CeilingsCache` and the number of threads on a CPU.

    `directory` is `cache_root() / "operations"`.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def read(self, key: str, threads: int | None = None) -> MicroBenchmark | None:
        """What was stored under `key` for so many threads (None: on all cores, or on a GPU); None if nothing was."""
        return _read(self._path(key, threads), MicroBenchmark)

    def write(self, key: str, benchmark: MicroBenchmark, threads: int | None = None) -> None:
        """Store under `key` for so many threads, replacing what was there.

        Raises:
            RunFailed: it cannot be written.
        """
        _write(self._path(key, threads), benchmark, "times of operations")

    def _path(self, key: str, threads: int | None) -> Path:
        return _path(self.directory, key if threads is None else f"{key}, {threads} threads")


def _read(path: Path, kind: type[Kept]) -> Kept | None:
    try:
        return loads(path.read_bytes(), kind)
    except (OSError, ValueError):
        return None


def _write(path: Path, record: Ceilings | MicroBenchmark, what: str) -> None:
    _make(path.parent, what)
    write_atomic(path, dumps(record) + "\n", what=what)


def _path(directory: Path, key: str) -> Path:
    return directory / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


def _calibration(line: bytes) -> Calibration | None:
    try:
        return loads(line, Calibration)
    except ValueError:
        return None


def _make(directory: Path, what: str) -> None:
    with disk_errors(directory, what, error=RunFailed):
        make_directories(directory)

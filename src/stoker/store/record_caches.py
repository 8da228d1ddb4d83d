"""What is remembered between runs, in the cache: forecasts beside measurements, and what devices really reach.

Both may be deleted; the next plan then knows less. What cannot be read is passed over: the cache serves several
versions of Stoker at once.

Which plans ran out of memory, remembered between runs in the cache.

It may be deleted; a plan that does not fit is then met once more. What cannot be read is passed over.

Measured links, kept for the next plan. Machine, PyTorch and number of processes are in the key.

Decisions in the cache, by what they depend on: the same job is planned once for a device.
"""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import TypeVar

from stoker.errors import RunFailed
from stoker.records import Calibration, Ceilings, MicroBenchmark, dumps, loads
from stoker.records.hardware import Links
from stoker.records.plan import KeptDecision, OutOfMemory
from stoker.store.disk_errors import disk_errors
from stoker.store.files import append_line, make_directories, read_lines, write_atomic
from stoker.store.locations import is_own

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


class OutOfMemoryStore:
    """All such plans met on this machine, one a line; several processes may add to it at once.

    `directory` is `cache_root() / "calibration"`.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / "out_of_memory.jsonl"

    def append(self, failure: OutOfMemory) -> None:
        """Add one.

        Raises:
            RunFailed: it cannot be written; what was there is intact.
        """
        with disk_errors(self.path.parent, "what ran out of memory"):
            make_directories(self.path.parent)
        append_line(self.path, dumps(failure, indent=None), what="what ran out of memory")

    def read(self, *, device_model: str, job: str) -> tuple[OutOfMemory, ...]:
        """Those of a job on a device model, oldest first."""
        try:
            lines = read_lines(self.path)
        except OSError:
            return ()
        known = (_parse_failure(line) for line in lines)
        return tuple(one for one in known if one is not None and (one.device_model, one.job) == (device_model, job))


def _parse_failure(line: bytes | str) -> OutOfMemory | None:
    try:
        return loads(line, OutOfMemory)
    except ValueError:
        return None


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

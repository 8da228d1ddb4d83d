"""Records remembered between runs, in the cache: one file for each key, or one line for each event.

All of it may be deleted; the next plan then knows less. What cannot be read counts as missing, since the cache serves
several versions of Stoker at once. `root` is `cache_root()`.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from stoker.errors import RunFailed
from stoker.records import Calibration, Ceilings, MicroBenchmark, Trace, dumps, loads
from stoker.records.hardware import Links
from stoker.records.plan import KeptDecision, OutOfMemory
from stoker.store.disk_errors import disk_errors
from stoker.store.files import append_line, make_directories, read_lines, write_atomic
from stoker.store.locations import is_own
from stoker.store.trace_format import packed, unpacked

R = TypeVar("R")

LONGEST_KEPT_S = 30 * 86400.0
"""Age from which a decision is planned again [s]: a machine changes."""


def ceilings_cache(root: Path) -> RecordCache[Ceilings]:
    """What devices really reach, by device and versions."""
    return RecordCache(root, "ceilings", Ceilings, what="measured ceilings")


def operations_cache(root: Path) -> RecordCache[MicroBenchmark]:
    """Times of single operations, by device and versions, and `N threads` where a CPU did not use all cores."""
    return RecordCache(root, "operations", MicroBenchmark, what="times of operations")


def operations_key(device_key: str, threads: int | None) -> tuple[str, ...]:
    """Key of a device's operation times; `threads` None: computed with all cores, or on a GPU."""
    return (device_key,) if threads is None else (device_key, f"{threads} threads")


def links_cache(root: Path) -> RecordCache[Links]:
    """What processes on this machine reach between them, by device and versions, and `N processes`."""
    return RecordCache(root, "links", Links, what="measured links")


def plan_cache(root: Path) -> RecordCache[KeptDecision]:
    """Decisions with the coupling they rest on: the same job is planned once for a device.

    The coupling decides what is learned, so a file that another user may have written is not read.
    """
    return RecordCache(
        root, "plans", KeptDecision, what="a plan", encode=dumps, longest_kept_s=LONGEST_KEPT_S, is_own_only=True
    )


def trace_cache(root: Path) -> RecordCache[Trace]:
    """Traces, by the job's identity, the settings and the version of PyTorch."""
    return RecordCache(root, "traces", Trace, what="a trace", encode=packed, decode=unpacked, suffix=".json.gz")


def calibration_log(root: Path) -> RecordLog[Calibration]:
    """Forecasts with what was measured, of all runs on this machine."""
    return RecordLog(root / "calibration" / "calibrations.jsonl", Calibration, what="a calibration")


def out_of_memory_log(root: Path) -> RecordLog[OutOfMemory]:
    """Plans that ran out of memory on this machine."""
    return RecordLog(root / "calibration" / "out_of_memory.jsonl", OutOfMemory, what="what ran out of memory")


@dataclass(frozen=True)
class RecordCache(Generic[R]):
    """Records of one kind, each in a file of its own named by a key.

    A key is one or more texts that together say what the record depends on.
    """

    root: Path
    folder: str
    kind: type[R]
    what: str
    """What a record is, for error messages."""
    encode: Callable[[R], str | bytes] = lambda record: dumps(record) + "\n"
    decode: Callable[[bytes], R] | None = None
    """From a file's bytes; without it, `records.loads`."""
    suffix: str = ".json"
    longest_kept_s: float = math.inf
    is_own_only: bool = False

    @property
    def directory(self) -> Path:
        """Where the files are."""
        return self.root / self.folder

    def read(self, *key: str) -> R | None:
        """The record under `key`; None if there is none, it is too old, another user's, or cannot be read."""
        path = self._path(key)
        try:
            if self.is_own_only and not is_own(path):
                return None
            if time.time() - path.stat().st_mtime > self.longest_kept_s:
                return None
            data = path.read_bytes()
            return loads(data, self.kind) if self.decode is None else self.decode(data)
        except (OSError, ValueError):
            return None

    def write(self, record: R, *key: str) -> None:
        """Store a record under `key`, replacing what was there.

        Raises:
            RunFailed: it cannot be written.
        """
        with disk_errors(self.directory, self.what, error=RunFailed):
            make_directories(self.directory)
        write_atomic(self._path(key), self.encode(record), what=self.what)

    def _path(self, key: tuple[str, ...]) -> Path:
        return self.directory / f"{hashlib.sha256(', '.join(key).encode()).hexdigest()[:24]}{self.suffix}"


@dataclass(frozen=True)
class RecordLog(Generic[R]):
    """Records of one kind, one a line; several processes may append at once."""

    path: Path
    kind: type[R]
    what: str

    def append(self, record: R) -> None:
        """Add one.

        Raises:
            RunFailed: it cannot be written; what was there is intact.
        """
        with disk_errors(self.path.parent, self.what, error=RunFailed):
            make_directories(self.path.parent)
        append_line(self.path, dumps(record, indent=None), what=self.what)

    def read(self, **fields: Any) -> tuple[R, ...]:
        """All records that can be read and have these values, oldest first: `log.read(device_model="A")`."""
        try:
            lines = read_lines(self.path)
        except OSError:
            return ()
        records = []
        for line in lines:
            with suppress(ValueError):
                records.append(loads(line, self.kind))
        return tuple(r for r in records if all(getattr(r, name) == value for name, value in fields.items()))

"""Which plans ran out of memory, remembered between runs in the cache.

It may be deleted; a plan that does not fit is then met once more. What cannot be read is passed over.
"""

from __future__ import annotations

from pathlib import Path

from stoker.records import dumps, loads
from stoker.records.out_of_memory import OutOfMemory
from stoker.store.disk_errors import disk_errors
from stoker.store.files import append_line, make_directories, read_lines


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
        known = (_read(line) for line in lines)
        return tuple(one for one in known if one is not None and (one.device_model, one.job) == (device_model, job))


def _read(line: bytes | str) -> OutOfMemory | None:
    try:
        return loads(line, OutOfMemory)
    except ValueError:
        return None

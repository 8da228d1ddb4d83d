"""A plan's malloc setting applied to this process, and the memory that it uses now.

The GNU C library maps requests above a threshold from the system, and returns them when freed; the threshold grows to
32 MiB as large blocks are freed. Then most tensors stay in the heap, whose free end is returned from 64 MiB on.
`mapped` fixes the threshold at 64 KiB: freed memory is returned at once. `retained` maps and returns nothing. Costs:
the system zeroes each page of a new mapped tensor; the retained heap is fragmented. See docs/log.md for measurements.

Source: mallopt(3), `M_MMAP_THRESHOLD`, `M_TRIM_THRESHOLD`, `M_MMAP_MAX`; glibc's malloc/malloc.c.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from pathlib import Path

from stoker.records import Malloc

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
"""Numbers of malloc's parameters, from malloc.h."""
MAPPED_FROM = 64 << 10
"""Threshold of `mapped` [bytes]."""
_MOST_MAPPINGS = 60_000
"""Most mapped blocks at a time; the kernel allows a process 65,530 mappings (`vm.max_map_count`)."""
_SETTLED_THRESHOLD = 32 << 20
"""Largest value of the moving threshold [bytes]; once fixed, it cannot be made to move again."""
_MOST = 2**31 - 1
"""Largest argument of mallopt: the heap's free end may grow to 2 GiB before it is returned."""

_SETTINGS: dict[Malloc, tuple[tuple[int, int], ...]] = {
    "retained": ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _MOST)),
    "default": (
        (_MMAP_MAX, _MOST_MAPPINGS),
        (_MMAP_THRESHOLD, _SETTLED_THRESHOLD),
        (_TRIM_THRESHOLD, 2 * _SETTLED_THRESHOLD),
    ),
    "mapped": ((_MMAP_MAX, _MOST_MAPPINGS), (_MMAP_THRESHOLD, MAPPED_FROM), (_TRIM_THRESHOLD, 0)),
}

_setting: Malloc = "default"


def apply_malloc(setting: Malloc) -> str | None:
    """Apply a setting to later allocations; existing blocks stay where they are.

    A moving threshold cannot be restored: `default` after another setting sets its final value.

    Returns:
        None on success; else the reason, and nothing has changed.
    """
    global _setting  # noqa: PLW0603 - the library's state is the process's own, and cannot be read back
    if setting == _setting:
        return None
    problem = _problem()
    if problem is not None:
        return problem
    library = ctypes.CDLL(None)
    if not all(library.mallopt(parameter, value) for parameter, value in _SETTINGS[setting]):
        return "the C library's mallopt refused the setting"
    _setting = setting
    library.malloc_trim(0)
    return None


def give_back() -> None:
    """Return malloc's unused memory to the system; does nothing without glibc."""
    if _problem() is None:
        ctypes.CDLL(None).malloc_trim(0)


def resident_bytes() -> int:
    """Resident memory of this process now [bytes]; its peak where the system has no present value."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * resource.getpagesize()
    except OSError:
        return peak_resident_bytes()


def peak_resident_bytes() -> int:
    """Peak resident memory of this process so far [bytes]."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _problem() -> str | None:
    """Why malloc cannot be set here, or None."""
    try:
        version = os.confstr("CS_GNU_LIBC_VERSION")
    except (AttributeError, ValueError, OSError):
        version = None
    if not version or not version.startswith("glibc"):
        return "the C library is not glibc: its malloc has no such setting"
    preloaded = os.environ.get("LD_PRELOAD", "")
    if "malloc" in preloaded:
        return f"another malloc is preloaded: {preloaded}"
    return None

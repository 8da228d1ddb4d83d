"""How this process has its memory from the system: applying a plan's malloc setting, and what it takes now.

With the GNU C library, a request from some size on is mapped from the system and goes back to it when freed; that size
grows as large blocks are freed, to 32 MiB, after which most tensors stay in the heap, whose free end still goes back to
the system from 64 MiB on. `mapped` fixes the size at 64 KiB: what is freed is gone at once. `retained` maps
nothing and gives nothing back: what was had once is had for good. Costs: each page of a mapped tensor is had anew,
zeroed by the system, each time one is made; what is retained has holes. How much either is: docs/log.md.

Source: mallopt(3), `M_MMAP_THRESHOLD`, `M_TRIM_THRESHOLD`, `M_MMAP_MAX`; glibc's malloc/malloc.c.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from stoker.records import Malloc

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
"""Numbers of malloc's parameters, from malloc.h."""
MAPPED_FROM = 64 << 10
"""`mapped` maps requests of at least so many bytes."""
_MOST_MAPPINGS = 60_000
"""Mapped blocks at a time; the kernel allows a process 65,530 mappings (`vm.max_map_count`)."""
_SETTLED_THRESHOLD = 32 << 20
"""Where the moving threshold ends up once a block so large was freed; it cannot be made to move again."""


_MOST = 2**31 - 1
"""mallopt takes no larger number: the heap's free end may grow to 2 GiB before it goes back."""

_SETTINGS: dict[Malloc, tuple[tuple[int, int], ...]] = {
    "retained": ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _MOST)),
    "default": ((_MMAP_MAX, _MOST_MAPPINGS), (_MMAP_THRESHOLD, _SETTLED_THRESHOLD),
                (_TRIM_THRESHOLD, 2 * _SETTLED_THRESHOLD)),
    "mapped": ((_MMAP_MAX, _MOST_MAPPINGS), (_MMAP_THRESHOLD, MAPPED_FROM), (_TRIM_THRESHOLD, 0)),
}  # fmt: skip

_setting: Malloc = "default"


def apply_malloc(setting: Malloc) -> str | None:
    """Set how this process has its memory from now on; blocks already there stay where they are.

    There is no way back to a threshold that moves: `default` after another setting sets the value at which it settles,
    and is nothing to do at first.

    Returns:
        None where it is done; else why it cannot be, and nothing has changed.
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
    """Return to the system what malloc holds and nobody uses; elsewhere than under glibc, nothing."""
    if _problem() is None:
        ctypes.CDLL(None).malloc_trim(0)


def resident_bytes() -> int:
    """What this process has of the machine's memory now [bytes]; 0 where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _problem() -> str | None:
    """Why malloc cannot be set here; None where it can."""
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

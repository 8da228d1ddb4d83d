"""A plan's malloc setting applied to this process, and the memory that it uses now.

The GNU C library maps requests above a threshold from the system, and returns them when freed; the threshold grows to
32 MiB as large blocks are freed. Then most tensors stay in the heap, whose free end is returned from 64 MiB on.
`mapped` fixes the threshold at 64 KiB: freed memory is returned at once. `retained` maps and returns nothing. Costs:
the system zeroes each page of a new mapped tensor; the retained heap is fragmented. See docs/log.md for measurements.
Work that is done once need not enlarge it for good (`heap_kept_small`), nor what comes and goes (`renew_heap`).

Source: mallopt(3), `M_MMAP_THRESHOLD`, `M_TRIM_THRESHOLD`, `M_MMAP_MAX`; glibc's malloc/malloc.c.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from stoker.records import Malloc

_STATM, _SMAPS = Path("/proc/self/statm"), Path("/proc/self/smaps")
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
    _empty_holes(library)
    library.malloc_trim(0)
    return None


def give_back() -> None:
    """Return malloc's unused memory to the system; does nothing without glibc."""
    if _problem() is None:
        ctypes.CDLL(None).malloc_trim(0)


class _HeapInfo(ctypes.Structure):
    """`struct mallinfo2` of malloc.h, ten numbers; `fordblks` are the heap's free bytes."""

    _fields_: ClassVar = [
        ("others", ctypes.c_size_t * 8),
        ("fordblks", ctypes.c_size_t),
        ("keepcost", ctypes.c_size_t),
    ]


_LARGE_PART = 8
"""Holes with at least one in so many of the bytes that tensors left are used again as they are."""

_fillers: list[int] = []
"""Addresses of the blocks that fill holes of the heap."""


def renew_heap() -> None:
    """Return a `retained` heap's unused memory to the system, and let later tensors lie close together.

    What stays between tensors that come and go, such as an optimiser's state, leaves holes. The tensors of an update
    are spread over all of them, and it takes up to twice the memory that these need. Here small holes are filled with
    blocks that are never written to: they take addresses, and a page each for malloc's notes. The next call frees them.
    Costs: the system has to zero each page again, half a second of a core for a GiB of tensors.
    Does nothing under other settings.
    """
    if _setting != "retained":
        return
    library = ctypes.CDLL(None)
    library.malloc.restype = library.sbrk.restype = ctypes.c_void_p
    size = 1 << 30
    if hasattr(library, "mallinfo2"):  # since glibc 2.33
        library.mallinfo2.restype = _HeapInfo
        size = max(MAPPED_FROM, library.mallinfo2().fordblks // _LARGE_PART)
    _empty_holes(library)
    library.malloc_trim(0)
    end = library.sbrk(0)

    def fill(size: int) -> list[int]:
        """Blocks of this size [bytes] in as many holes as have room."""
        taken: list[int] = []
        while (block := library.malloc(size)) is not None and block < end and not _is_elsewhere(block):
            taken.append(block)
        library.free(block)  # it was mapped, or is behind what the heap was: no hole has room
        return taken

    with heap_kept_small():
        large = fill(size)
        while (size := size // 2) >= MAPPED_FROM:
            _fillers.extend(fill(size))
        for block in large:
            library.free(block)


def _is_elsewhere(block: int) -> bool:
    """Whether a block was mapped, or is another thread's; mappings may lie below the heap, as without a stack limit.

    Source: glibc's malloc/malloc.c, `IS_MMAPPED` and `NON_MAIN_ARENA`, bits of the size in front of each block.
    """
    word = ctypes.sizeof(ctypes.c_size_t)
    return bool(ctypes.c_size_t.from_address(block - word).value & 0b110)


def _empty_holes(library: ctypes.CDLL) -> None:
    """Free the blocks that fill holes."""
    library.free.argtypes = [ctypes.c_void_p]
    while _fillers:
        library.free(_fillers.pop())


@contextlib.contextmanager
def heap_kept_small() -> Iterator[None]:
    """Within the block, tensors for which a `retained` heap has no room are mapped, and returned when freed.

    For work that is done once or twice and needs more than an update: the heap, which is never returned, would keep its
    peak for the rest of the run. Under other settings nothing changes.
    """
    global _maps_more  # noqa: PLW0603 - as above
    if _setting != "retained" or _maps_more:
        yield
        return
    library, _maps_more = ctypes.CDLL(None), True
    library.mallopt(_MMAP_THRESHOLD, MAPPED_FROM)
    library.mallopt(_MMAP_MAX, _MOST_MAPPINGS)
    try:
        yield
    finally:
        library.mallopt(_MMAP_MAX, 0)
        _maps_more = False


_maps_more = False
"""Whether tensors without room in a `retained` heap are mapped now."""


def resident_bytes() -> int:
    """Resident memory of this process now [bytes]; its peak where the system has no present value."""
    try:
        return _resident_pages()[0] * resource.getpagesize() - untouched_bytes()
    except OSError:
        return peak_resident_bytes()


_TOUCHED_SHARE = 0.25
"""Share of mapped files that is touched once Stoker and PyTorch are imported: 84 of 406 MiB with PyTorch 2.13."""


def untouched_bytes() -> int:
    """Memory that the system counts as resident in this process though nothing has touched it [bytes].

    0 on Linux. gVisor counts all of a mapped file, of PyTorch's libraries 400 MiB; its host holds only the pages that
    were touched, once for all processes. gVisor does not say which: `_TOUCHED_SHARE` is assumed.
    """
    try:
        if _resident_pages()[1]:
            return 0
        lines = _SMAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return 0
    mapped_bytes, is_file = 0, False
    for line in lines:
        name, *words = line.split()
        if not name.endswith(":"):
            is_file = " ".join(words[4:]).startswith("/")
        elif is_file and name in {"Shared_Clean:", "Private_Clean:"}:
            mapped_bytes += int(words[0]) << 10
    return round((1 - _TOUCHED_SHARE) * mapped_bytes)


def _resident_pages() -> tuple[int, int]:
    """Resident pages of this process, and how many of them are of files, which gVisor does not count apart: 0."""
    _, resident, of_files, *_ = _STATM.read_text(encoding="ascii").split()
    return int(resident), int(of_files)


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

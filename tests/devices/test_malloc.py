"""Setting malloc in a running process: each test in a process of its own, since there is no way back."""

from __future__ import annotations

import platform
import resource
import subprocess
import sys

import pytest

from stoker.devices import malloc

ON_GLIBC = platform.libc_ver()[0] == "glibc"

PROGRAM = """
import ctypes
from stoker.devices.malloc import apply_malloc, resident_bytes
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
library.free.argtypes = [ctypes.c_void_p]
def held():
    '''MiB still resident after 32 blocks of 4 MiB were written, and all but the last one freed.'''
    before = resident_bytes()
    blocks = [library.malloc(4 << 20) for _ in range(32)]
    for block in blocks:
        ctypes.memset(block, 1, 4 << 20)
    for block in blocks[:-1]:
        library.free(block)
    return (resident_bytes() - before) >> 20
"""


def run(program: str) -> list[str]:
    """What a fresh process prints."""
    done = subprocess.run([sys.executable, "-c", PROGRAM + program], check=True, capture_output=True, text=True)
    return done.stdout.split()


@pytest.mark.skipif(not ON_GLIBC, reason="needs the GNU C library")
def test_mapped_gives_freed_memory_back() -> None:
    """In a running process: the same blocks that stay resident by default are gone."""
    by_default = run("held(); print(held())")
    mapped = run("print(apply_malloc('mapped')); held(); print(held())")
    assert mapped[0] == "None"
    assert int(mapped[1]) < 8
    assert int(by_default[0]) > 100


@pytest.mark.skipif(not ON_GLIBC, reason="needs the GNU C library")
def test_what_nobody_uses_can_be_given_back() -> None:
    """Though the setting keeps it: what one piece of work had is not counted as the next one's."""
    kept, left = run(
        "from stoker.devices.malloc import give_back\n"
        "apply_malloc('retained'); start = resident_bytes(); print(held()); give_back()\n"
        "print((resident_bytes() - start) >> 20)"
    )
    assert int(kept) > 100
    assert int(left) < 8


@pytest.mark.skipif(not ON_GLIBC, reason="needs the GNU C library")
def test_retained_faults_no_page_twice() -> None:
    """Blocks of 64 MiB, which are mapped again for each use by default, come from the heap as they were left."""
    faults = """
import resource
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = library.malloc(64 << 20)
    ctypes.memset(block, 1, 64 << 20)
    library.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
"""
    by_default = run(faults + "print(faults())")
    retained = run("print(apply_malloc('retained'))" + faults + "print(faults())")
    assert retained[0] == "None"
    assert int(retained[1]) < 100 < int(by_default[0])


@pytest.mark.skipif(not ON_GLIBC, reason="needs the GNU C library")
def test_mapped_after_retained_gives_memory_back_again() -> None:
    """Each setting takes back what the other one set."""
    assert int(run("apply_malloc('retained'); apply_malloc('mapped'); held(); print(held())")[0]) < 8


@pytest.mark.skipif(not ON_GLIBC, reason="needs the GNU C library")
def test_default_after_mapped_keeps_freed_memory_again() -> None:
    """Not the moving threshold, but where it settles."""
    assert int(run("apply_malloc('mapped'); apply_malloc('default'); print(held())")[0]) > 100


@pytest.mark.skipif(not ON_GLIBC, reason="needs the GNU C library")
def test_a_heap_that_is_kept_small_does_not_keep_what_had_no_room() -> None:
    """Within the block, and one within that, what is freed is gone; after it the heap keeps everything again."""
    within, after = run(
        "from stoker.devices.malloc import heap_kept_small\n"
        "apply_malloc('retained')\n"
        "with heap_kept_small():\n"
        "    with heap_kept_small(): pass\n"
        "    print(held())\n"
        "print(held())"
    )
    assert int(within) < 8
    assert int(after) > 100


HOLES = """
from stoker.devices.malloc import renew_heap
def written(count, size):
    # addresses of blocks that were written
    blocks = [library.malloc(size) for _ in range(count)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    return blocks
apply_malloc("retained")
blocks = written(64, 1 << 20)
between, kept = blocks[::2], blocks[1::2]
for block in between:
    library.free(block)
before = resident_bytes()
renew_heap()
print((before - resident_bytes()) >> 20)
new = written(32, 1 << 20)
print(min(new) > max(kept))
for block in kept + new:
    library.free(block)
renew_heap()
print((before - resident_bytes()) >> 20, max(written(16, 1 << 20)) < max(new))
from stoker.devices import malloc
num_fillers = len(malloc._fillers)
apply_malloc("default")
print(num_fillers, len(malloc._fillers))
"""


COUNTED = """
import resource
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
renew_heap()
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
"""


@pytest.mark.skipif(not ON_GLIBC, reason="needs the GNU C library")
def test_a_renewed_heap_has_later_tensors_together_behind_what_is_kept() -> None:
    """Its 32 holes of 1 MiB are returned and not used again; once what lay between is freed, all of it is."""
    returned, are_behind, returned_later, is_reused, _, left_under_another_setting = run(HOLES)
    assert int(returned) >= 30
    assert are_behind == "True"
    assert int(returned_later) >= 60
    assert is_reused == "True"
    assert left_under_another_setting == "0"


@pytest.mark.skipif(
    not ON_GLIBC or resource.getrlimit(resource.RLIMIT_STACK)[1] != resource.RLIM_INFINITY,
    reason="needs the GNU C library, and the right to stacks without a limit",
)
def test_mappings_below_the_heap_fill_no_holes() -> None:
    """As without a limit of the stack; there each of 60,000 mapped blocks was taken for a hole's, with a page each."""
    program = HOLES.replace("renew_heap()\n", COUNTED, 1).partition("print(")[0] + "print(faults)"
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + program],
        check=True,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_STACK, unlimited),
    )
    assert int(done.stdout) < 10_000


def test_default_at_first_is_nothing_to_do() -> None:
    """Nothing is set, on any system."""
    assert malloc.apply_malloc("default") is None


def test_where_it_cannot_be_set_the_reason_is_told(monkeypatch) -> None:
    """Another C library, or another malloc in its place."""
    monkeypatch.setattr(malloc.os, "confstr", lambda _: "musl 1.2")
    assert "glibc" in str(malloc.apply_malloc("mapped"))
    monkeypatch.setattr(malloc.os, "confstr", lambda _: "glibc 2.36")
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libjemalloc.so")
    assert "libjemalloc" in str(malloc.apply_malloc("mapped"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="read from /proc")
def test_resident_memory_is_told() -> None:
    """A Python process takes some megabytes."""
    assert malloc.resident_bytes() > 5 << 20


SMAPS = """\
7f0000000000-7f0014000000 r-xp 00000000 00:1d 7                          /usr/lib/libtorch cpu.so
Size:             327680 kB
Rss:              327680 kB
Shared_Clean:          0 kB
Private_Clean:    327680 kB
Private_Dirty:         0 kB
Anonymous:             0 kB
7f0015000000-7f0015a00000 rw-p 14000000 00:1d 7                          /usr/lib/libtorch cpu.so
Rss:               10240 kB
Shared_Clean:          0 kB
Private_Clean:         0 kB
Private_Dirty:     10240 kB
7f0016000000-7f0026000000 rw-p 00000000 00:00 0
Rss:              262144 kB
Shared_Clean:          0 kB
Private_Clean:    262144 kB
Private_Dirty:         0 kB
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="read from /proc")
def test_a_kernel_that_counts_all_of_mapped_files_is_corrected(monkeypatch, tmp_path) -> None:
    """A quarter of the pages of files is taken to be touched where none are counted apart, as in gVisor."""
    (tmp_path / "statm").write_text("160000 153600 0 0 0 0 0\n")
    (tmp_path / "smaps").write_text(SMAPS)
    monkeypatch.setattr(malloc, "_STATM", tmp_path / "statm")
    monkeypatch.setattr(malloc, "_SMAPS", tmp_path / "smaps")
    assert malloc.untouched_bytes() == 240 << 20
    assert malloc.resident_bytes() == 153600 * resource.getpagesize() - (240 << 20)
    (tmp_path / "statm").write_text("160000 153600 20000 0 0 0 0\n")
    assert malloc.untouched_bytes() == 0
    assert malloc.resident_bytes() == 153600 * resource.getpagesize()

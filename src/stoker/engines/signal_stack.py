"""Where a thread handles signals, kept as it is while OpenVINO works.

When its CPU plug-in is loaded, OpenVINO 2026.4 gives the calling thread a stack for signal handlers, and takes it away
again when the plug-in goes. Of two that do not go in the opposite order of coming, one puts back the other's, which is
no more: the next signal ends the process. That was seen with SIGTERM after a few models had come and gone.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class _Stack(ctypes.Structure):
    """`stack_t` of Linux, see sigaltstack(2)."""

    _fields_ = (("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("num_bytes", ctypes.c_size_t))


@contextmanager
def kept() -> Iterator[None]:
    """After the block this thread has the signal stack that it had before, or none, as before."""
    if sys.platform != "linux":
        yield
        return
    library, before = ctypes.CDLL(None), _Stack()
    library.sigaltstack(None, ctypes.byref(before))
    try:
        yield
    finally:
        library.sigaltstack(ctypes.byref(before), None)

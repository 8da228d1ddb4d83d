"""Where a thread handles signals, kept as it is while OpenVINO works.

When its CPU plug-in is loaded, OpenVINO 2026.4 gives the calling thread a stack for signal handlers, and takes it away
again when the plug-in goes. Of two that do not go in the opposite order of coming, one puts back the other's, which is
no more: the next signal ends the process. That was seen with SIGTERM after a few models had come and gone.

OpenVINO and NNCF report their use to their makers, over the network; not from a process of Stoker's user.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Stack(ctypes.Structure):
    """`stack_t` of Linux, see sigaltstack(2)."""

    _fields_ = (("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("num_bytes", ctypes.c_size_t))


@contextmanager
def signal_stack_kept() -> Iterator[None]:
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


def withhold_telemetry() -> None:
    """Let OpenVINO and NNCF, imported next, go without the package that sends; they do so wherever it is absent.

    Without effect on what was imported before.
    """
    modules: dict[str, Any] = sys.modules  # None stands for a package that cannot be imported
    modules.setdefault("openvino_telemetry", None)

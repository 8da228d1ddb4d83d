"""What OpenVINO does to the process, undone: its signal stack and its telemetry.

OpenVINO 2026.4 gives the calling thread a stack for signal handlers when its CPU plug-in is loaded, and restores the
previous one when the plug-in is unloaded. Two plug-ins that are not unloaded in reverse order restore a stack that was
freed: the next signal ends the process. That was seen with SIGTERM after a few models were loaded and unloaded.

OpenVINO and NNCF send usage reports to their makers; Stoker prevents it.
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
    """Restore this thread's signal stack, or its absence, after the block."""
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
    """Hide the telemetry package from OpenVINO and NNCF, which run without it; call before importing them."""
    modules: dict[str, Any] = sys.modules  # None stands for a package that cannot be imported
    modules.setdefault("openvino_telemetry", None)

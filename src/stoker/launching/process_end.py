"""Waiting for a process beside training without taking the CPU's time from it."""

from __future__ import annotations

import os
import select
import subprocess
from contextlib import suppress
from typing import Any


def ends_within(process: subprocess.Popen[Any], timeout_s: float) -> bool:
    """Whether a process has ended after so long at most [s].

    `Popen.wait` looks 20 times a second or more; Linux wakes who waits for a file descriptor of the process.
    Source: pidfd_open(2).
    """
    if process.poll() is None:
        try:
            descriptor = os.pidfd_open(process.pid)
        except (AttributeError, OSError):  # another system, or an older kernel; or it has ended since
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout_s)
        else:
            try:
                waiting = select.poll()
                waiting.register(descriptor, select.POLLIN)
                waiting.poll(1000 * timeout_s)
            finally:
                os.close(descriptor)
    return process.poll() is not None

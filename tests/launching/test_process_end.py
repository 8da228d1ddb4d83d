"""Waiting for a process to end."""

from __future__ import annotations

import os
import resource
import subprocess
import time

import pytest

from stoker.launching.process_end import ends_within


def process(script: str) -> subprocess.Popen[bytes]:
    """A shell with a script; it reads its first line from a pipe."""
    return subprocess.Popen(["/bin/sh", "-c", script], stdin=subprocess.PIPE)


@pytest.mark.parametrize("has_descriptors", [True, False])
def test_a_process_is_waited_for_until_it_ends(has_descriptors: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it runs the time is waited for; it is known with its exit code at once when it ends, and afterwards."""
    if not has_descriptors:
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    one = process("read line; exit 3")
    assert one.stdin is not None
    began_s = time.monotonic()
    assert not ends_within(one, 0.2)
    assert time.monotonic() - began_s >= 0.2
    one.stdin.write(b"on\n")
    one.stdin.close()
    assert ends_within(one, 60)
    assert one.returncode == 3
    assert ends_within(one, 60)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="this system has no descriptors of processes")
def test_waiting_does_not_look_again_and_again() -> None:
    """The thread sleeps: it is switched to a few times in half a second, not 10 times as by `Popen.wait`."""
    one = process("read line")

    def switches() -> int:
        return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw

    before = switches()
    assert not ends_within(one, 0.5)
    assert switches() - before < 6
    assert one.stdin is not None
    one.stdin.close()
    assert ends_within(one, 60)

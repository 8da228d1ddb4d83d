"""Hosts that a scheduler has chosen ask each other before the ranks of a run meet."""

from __future__ import annotations

import errno
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from stoker.launching import reachable_ports
from stoker.launching.reachable_ports import port_of, silent_hosts

BOTH = ("127.0.0.1", "127.0.0.2")


@pytest.fixture
def port() -> int:
    """One above which two are free."""
    for _ in range(20):
        with socket.create_server(("", 0)) as first:
            number = int(first.getsockname()[1])
            try:
                socket.create_server(("", number + 1)).close()
            except OSError:
                continue
        return number - 1
    raise AssertionError("no two free ports in succession")


def test_hosts_that_begin_at_different_times_reach_each_other(port: int) -> None:
    """One that refuses is asked again: its program may not have begun."""
    with ThreadPoolExecutor() as pool:
        first = pool.submit(silent_hosts, BOTH, 0, port)
        until = time.monotonic() + 60
        while True:  # the first host listens, and asks in vain
            try:
                socket.create_connection((BOTH[0], port_of(port, 0)), timeout=1).close()
                break
            except ConnectionRefusedError:
                assert time.monotonic() < until
        assert not first.done()
        assert silent_hosts(BOTH, 1, port) == {}
        assert first.result() == {}


@pytest.mark.parametrize(
    ("error", "why"),
    [(TimeoutError(), "no answer in 5 s"), (OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH)), "No route")],
)
def test_a_host_behind_a_firewall_is_silent(
    monkeypatch: pytest.MonkeyPatch, port: int, error: OSError, why: str
) -> None:
    """Packets are dropped, or a router says so: then ranks would wait for each other in vain."""

    def refused(place: tuple[str, int], **_: Any) -> socket.socket:
        assert place == (BOTH[1], port_of(port, 1))
        raise error

    monkeypatch.setattr(socket, "create_connection", refused)
    assert list(silent_hosts(BOTH, 0, port)) == [1]
    assert silent_hosts(BOTH, 0, port)[1].startswith(why)


def test_a_host_that_never_begins_is_left_to_the_ranks(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """A node may take minutes; only a network says that it is in the way."""
    monkeypatch.setattr(reachable_ports, "FIRST_WAIT_S", 0.5)
    assert silent_hosts(BOTH, 0, port) == {}

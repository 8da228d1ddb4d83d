from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from stoker.errors import BadRun, PlaceFailed
from stoker.pool import events as on
from stoker.pool.client import PoolAddress, PoolClient
from stoker.pool.keys import Key, own_key
from stoker.pool.request_limits import MOST_WAITING
from stoker.pool.serve import serve_pool


@contextmanager
def served(folder: Path, *options: str) -> Iterator[PoolAddress]:
    """The address of `stoker pool serve` in a process of its own."""
    command = [sys.executable, "-m", "stoker", "pool", "serve", "--folder", str(folder), "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield PoolAddress.parse(process.stdout.readline().removeprefix("stoker pool: ").strip())
        finally:
            process.terminate()


def test_a_rendezvous_beside_the_pool(tmp_path: Path) -> None:
    """It says its UDP port and what forwarding costs; where a port is taken, that is a sentence."""
    pytest.importorskip("iroh", reason="stoker[p2p] is not installed")
    options = ("--p2p", "--forward-price", "0.05usd", "--forward-quota", "1GiB")
    with served(tmp_path / "one", *options) as address:
        pool = PoolClient(address).state("pool")
        assert pool["rendezvous"]["port"] > 0
        assert pool["forwarding"] == "0.05 credits per GiB, 1.0 GiB a lease at most"
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
            taken.bind(("127.0.0.1", 0))
            with pytest.raises(BadRun, match="cannot listen at UDP port"):
                serve_pool(tmp_path / "two", port=taken.getsockname()[1], is_p2p=True)


@pytest.mark.slow
def test_a_client_gets_in_while_another_holds_handshakes_open(tmp_path: Path) -> None:
    """More than an address may have: connections that say nothing, or half a word, and never end their handshake."""
    with served(tmp_path, "--tls") as address, ExitStack() as stack:
        parts = urlsplit(address.url)
        assert parts.hostname is not None
        assert parts.port is not None
        silent = []
        for number in range(MOST_WAITING + 50):
            one = stack.enter_context(socket.create_connection((parts.hostname, parts.port), timeout=60))
            one.sendall(b"\x16\x03\x01"[: number % 4])
            silent.append(one)
        operator = PoolClient(address, own_key("control", tmp_path))
        assert operator.post(on.Deposited(account="0" * 64, amount=1)).seq == 2
        for one in silent[:50]:
            with suppress(ConnectionError):
                assert one.recv(1) == b""  # ended for those that came after it


@pytest.mark.slow
def test_tls_is_of_the_pools_own_key(tmp_path: Path) -> None:
    """The certificate that the server shows has the key in its address; a client that wants another key stops."""
    with served(tmp_path, "--tls", "--name", "ours") as address:
        assert address.url.startswith("https://127.0.0.1:")
        operator = PoolClient(address, own_key("control", tmp_path))
        assert operator.post(on.Deposited(account="0" * 64, amount=1)).seq == 2
        assert operator.state("pool")["rules"]["name"] == "ours"
        with pytest.raises(PlaceFailed, match="in between"):
            PoolClient(replace(address, key=Key.made().public)).state("pool")
    assert (tmp_path / "tls.key").stat().st_mode & 0o777 == 0o600

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from stoker.errors import PlaceFailed
from stoker.pool import events as on
from stoker.pool.client import PoolAddress, PoolClient
from stoker.pool.keys import Key, own_key


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

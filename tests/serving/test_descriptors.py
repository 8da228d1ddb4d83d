"""A server that runs out of file descriptors: it outlives that, without a flood of log lines."""

from __future__ import annotations

import contextlib
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path

from stoker.testing.tiny_models import tiny_artifact

LIMIT, CLIENTS = 80, 120
SCRIPT = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (80, 80))
from stoker import api
api.serve(sys.argv[1], announce=lambda up: print(up.http, flush=True), http_port=0, grpc_port=None, admin_port=None,
          grace_s=1.0)
"""


def health(port: int) -> bytes:
    """The first bytes that the server says of itself; nothing where it does not answer within two seconds."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(b"GET /v2/health/ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        return client.recv(1000)[:12]
    return b""


def test_a_server_without_descriptors_left_answers_once_some_are_free(tmp_path: Path) -> None:
    """120 idle clients of a server with 80 descriptors: it stays up, is quiet, and answers once they are gone."""
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 2 * CLIENTS
    tiny_artifact(tmp_path / "models", name="digits")
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "models")]
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log) as server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline().rsplit(b":", 1)[-1].strip(b"/\n "))
            assert health(port) == b"HTTP/1.1 200"
            with contextlib.ExitStack() as clients:
                for _ in range(CLIENTS):
                    clients.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
                time.sleep(1.0)
                assert server.poll() is None
            deadline = time.monotonic() + 60
            while health(port) != b"HTTP/1.1 200":
                assert time.monotonic() < deadline, "it answers no more"
        finally:
            server.terminate()
    assert (tmp_path / "log").stat().st_size < 20_000

"""A control plane for tests: in a thread of this process, or in a process of its own that can be killed.

Its clock is the machine's plus seconds in a file, so that a test can let a minute pass.
"""

from __future__ import annotations

import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import uvicorn

from stoker.pool import control_plane
from stoker.pool.blobs import BlobLimits
from stoker.pool.client import PoolAddress, PoolClient
from stoker.pool.control_plane import ControlPlane
from stoker.pool.events import Founded
from stoker.pool.keys import Key, own_key
from stoker.pool.request_limits import RequestRates
from tests.forked import Forked

FAST = RequestRates(per_address=1e6, per_key=1e6)


def shifted(folder: Path) -> Callable[[], float]:
    """The machine's clock, plus the seconds in the folder's file `shift`."""

    def now() -> float:
        try:
            return time.time() + float((folder / "shift").read_text())
        except (FileNotFoundError, ValueError):
            return time.time()

    return now


def shift(folder: Path, seconds: float) -> None:
    """Let the control plane's clock be so far ahead."""
    aside = folder / "shift.new"
    aside.write_text(str(seconds))
    aside.replace(folder / "shift")


def until(is_there: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    """What `is_there` returns once that is true."""
    end, pause_s = time.monotonic() + timeout_s, 0.005
    while time.monotonic() < end:
        if found := is_there():
            return found
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, 0.05)  # each look is a request
    raise AssertionError(f"not within {timeout_s} s")


@contextmanager
def in_thread(
    folder: Path,
    *,
    rates: RequestRates = FAST,
    blob_limits: BlobLimits | None = None,
    custody: Any = None,
    bulk_bytes: int = 0,
    probe_every_s: float | None = None,
    **rules: Any,
) -> Iterator[tuple[ControlPlane, PoolClient]]:
    """A control plane that answers within the block, and its operator's client.

    `bulk_bytes`: peers meet there, and blobs are large from so many bytes on. `probe_every_s`: devices are probed.
    """
    key = own_key("control", folder)
    plane = ControlPlane(
        folder,
        key,
        Founded(name="test", **rules),
        rates=rates,
        blob_limits=blob_limits,
        now=shifted(folder),
        custody=custody,
        probe_every_s=probe_every_s,
    )
    if bulk_bytes:
        from stoker.pool.rendezvous import PeerRendezvous

        plane.admission.bulk_bytes, plane.rendezvous = bulk_bytes, PeerRendezvous(plane, "127.0.0.1", 0)
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(plane.application(), log_level="error", lifespan="on", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        until(lambda: server.started)
        yield plane, PoolClient(PoolAddress(f"http://127.0.0.1:{listener.getsockname()[1]}", key.public), key)
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


@contextmanager
def answering(answer: Any) -> Iterator[str]:
    """The address of a server that gives `answer(path)` to each request: bytes, or a document."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = answer(self.path)
            content = found if isinstance(found, bytes) else json.dumps(found).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}#{'ab' * 32}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Killable:
    """A control plane in a process of its own, on the same port after each start."""

    def __init__(self, folder: Path, rules: str = "") -> None:
        self.folder, self._rules = folder, rules
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self._port = listener.getsockname()[1]
        self.process: Forked | None = None

    def start(self) -> None:
        """Start it, and wait until it answers."""
        words = [str(self.folder), str(self._port), self._rules]
        self.process = Forked("tests.pool.server", words, stderr=sys.__stderr__, env=dict(os.environ))
        assert self.process.stdout.readline() == "ready\n"

    def kill(self) -> None:
        """SIGKILL."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    def client(self, key: Key | None = None) -> PoolClient:
        """A client with a key; without one, the operator's."""
        operator = own_key("control", self.folder)
        address = PoolAddress(f"http://127.0.0.1:{self._port}", operator.public)
        return PoolClient(address, operator if key is None else key)


def main(folder: str, port: str, rules: str) -> None:
    """Serve until killed."""
    control_plane._AWAY_S = math.inf  # its clock jumps
    key = own_key("control", Path(folder))
    given = {name: int(value) for name, _, value in (word.partition("=") for word in rules.split())}
    plane = ControlPlane(Path(folder), key, Founded(name="test", **given), rates=FAST, now=shifted(Path(folder)))
    listener = socket.create_server(("127.0.0.1", int(port)))
    config = uvicorn.Config(plane.application(), log_level="error", lifespan="on")

    class Ready(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            print("ready", flush=True)

    Ready(config).run(sockets=[listener])


if __name__ == "__main__":
    main(*sys.argv[1:])

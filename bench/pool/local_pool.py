"""A pool on this machine for benchmarks: control plane, agents and renters as processes, as their owners start them.

Everything lies in one folder; each process writes what it says into `NAME.log` there, and ends with the block.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from stoker.launching.bundle import Bundle, TreeFile, stoker_bundle
from stoker.launching.launcher import Submission
from stoker.pool import events as on
from stoker.pool.client import PoolAddress, PoolClient
from stoker.pool.events import CREDIT
from stoker.pool.keys import own_key, read_key
from stoker.pool.pool_launcher import LAUNCHER
from stoker.records.codec import to_json

ROOT = Path(__file__).resolve().parents[2]
JOB = "bench/pool/small_jobs.py"


class Link:
    """A way to the control plane that can be cut: what goes through it is then lost, and nobody is told.

    Attributes:
        port: on this machine, for one agent.
        is_cut: whether it is.
    """

    def __init__(self, to_port: int) -> None:
        self._to_port, self.is_cut = to_port, False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            threading.Thread(target=self._join, args=(near,), daemon=True).start()

    def _join(self, near: socket.socket) -> None:
        """Carry bytes both ways until one side ends; a connection that met the cut carries nothing any more."""
        with near, suppress(OSError):
            if self.is_cut:
                while self.is_cut:
                    time.sleep(0.1)
                return
            with socket.create_connection(("127.0.0.1", self._to_port)) as far:
                back = threading.Thread(target=self._carry, args=(far, near), daemon=True)
                back.start()
                self._carry(near, far)
                back.join()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while part := source.recv(1 << 16):
                while self.is_cut:
                    time.sleep(0.1)
                target.sendall(part)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)


class LocalPool:
    """Processes of one pool.

    Attributes:
        operator: client with the pool's own key.
        renter: client with the key `renter`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            **os.environ,
            "XDG_CONFIG_HOME": str(folder / "keys"),
            "STOKER_RUNS": str(folder / "runs"),
            "STOKER_CACHE": str(folder / "cache"),
            "PYTHONUNBUFFERED": "1",
            "COLUMNS": "160",
            "PYTHONPATH": str(ROOT / "src"),
        }
        os.environ.update({name: self.environment[name] for name in ("XDG_CONFIG_HOME", "STOKER_CACHE")})
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.links: dict[str, Link] = {}
        self._port = 0
        self.serve()
        self.environment["STOKER_POOL"] = os.environ["STOKER_POOL"] = self.address
        self.operator = PoolClient(PoolAddress.parse(self.address), read_key(folder / "control" / "control.key"))
        self.renter = self.client("renter", 10_000)

    def serve(self) -> None:
        """Start the control plane, on the same port each time, and wait until it answers."""
        already = self.text("control").count("stoker pool: ")
        self.start(
            "control",
            "pool",
            "serve",
            "--port",
            str(self._port),
            "--folder",
            str(self.folder / "control"),
            "--least-window",
            "1s",
        )
        until(lambda: self.text("control").count("stoker pool: ") > already, 120, "the control plane's address")
        self.address = re.findall(r"stoker pool: (\S+)", self.text("control"))[-1]
        self._port = int(re.findall(r":(\d+)#", self.address)[0])

    def client(self, name: str, credits_: float) -> PoolClient:
        """A client with the key of that name, which gets credits."""
        client = PoolClient(PoolAddress.parse(self.address), own_key(name))
        assert client.key is not None
        self.operator.post(on.Deposited(account=client.key.public, amount=round(credits_ * CREDIT)), patience_s=60)
        return client

    def lend(
        self,
        name: str,
        *,
        price: float,
        cores: float,
        beat_s: float = 2.0,
        memory: str = "2GiB",
        disk: str = "1GiB",
        more: tuple[str, ...] = (),
        measures: bool = False,
    ) -> None:
        """Start an agent in bubblewrap, and wait until its offer is there; `measures`: its device and link first."""
        before = self.text(name).count("offering")
        if not before:
            self.client(name, 1000)
        if name not in self.links:
            self.links[name] = Link(self._port)
        address = re.sub(r":\d+#", f":{self.links[name].port}#", self.address)
        self.start(
            name,
            "pool",
            "offer",
            "--pool",
            address,
            "--price",
            f"{price}usd/h",
            "--name",
            name,
            "--key",
            name,
            "--folder",
            str(self.folder / name),
            "--isolation",
            "bubblewrap",
            "--memory",
            memory,
            "--disk",
            disk,
            "--cores",
            str(cores),
            "--beat",
            str(beat_s),
            "--measure" if measures else "--no-measure",
            "--reclaim",
            "20s",
            *more,
        )
        until(lambda: self.text(name).count("offering") > before, 120, f"the offer {name}", lambda: self.text(name))

    def start(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        """Start a command of Stoker's, whose output goes to NAME.log."""
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "stoker", *words],
                cwd=ROOT,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.processes[name] = process
        return process

    def text(self, name: str) -> str:
        """What a process has said so far."""
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def leases(self) -> list[dict[str, Any]]:
        """All leases with their blocks, oldest first."""
        found = sorted(self.operator.leases(), key=lambda one: one.opened_s)
        return [to_json(self.operator.lease(one.lease_id)) for one in found]

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to one of the processes; wait for its end if it is SIGKILL."""
        process = self.processes[name]
        process.send_signal(number)
        if number == signal.SIGKILL:
            process.wait()

    def job_processes(self, name: str) -> list[int]:
        """Processes of the job that an agent runs, the one that trains last."""
        found = [self.processes[name].pid]
        for pid in found:
            for path in Path(f"/proc/{pid}/task").glob("*/children"):
                with suppress(OSError):
                    found += [int(word) for word in path.read_text().split()]
        return found[1:]

    def end(self) -> None:
        """End all processes, jobs before the control plane."""
        for name, process in reversed(self.processes.items()):
            for number in (signal.SIGCONT, signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
                if process.poll() is None:
                    process.send_signal(number)
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(0 if number == signal.SIGCONT else 3 if name.startswith("job") else 10)


def job_submission(
    run: str, settings: dict[str, Any], *, is_safe: bool, block: str, offer: str = "", limit_s: float = 3600.0
) -> Submission:
    """The order of a small job, which nobody replays, for the launcher that `stoker train --on pool` uses."""
    code = Bundle(
        kind="code", name="small_jobs.py", files=(TreeFile.of_bytes("small_jobs.py", (ROOT / JOB).read_bytes()),)
    )
    words = tuple(word for name, value in settings.items() for word in ("--set", f"{name}={value}"))
    return Submission(
        run=run,
        target=LAUNCHER.parse(offer),
        code=code,
        job_file="small_jobs.py",
        stoker=stoker_bundle(),
        arguments=(*words, *(("--plan", "safe") if is_safe else ())),
        time_limit_s=limit_s,
        owner="bench",
        options={"block": block, "verify": "none", "window": "1h", "key": "renter"},
    )


@contextmanager
def local_pool(keep: Path | None = None) -> Iterator[LocalPool]:
    """A pool in a folder that the users of isolated programs can reach, and that goes at the end."""
    folder = Path(tempfile.mkdtemp(prefix="stoker-bench-pool-", dir="/var/tmp")) if keep is None else keep
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that its processes end with it
    pool = LocalPool(folder)
    try:
        yield pool
    finally:
        pool.end()
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def until(
    is_so: Callable[[], Any], limit_s: float, what: str, said: Callable[[], str] = lambda: "", every_s: float = 0.1
) -> Any:
    """What `is_so` returns once that is true; the program ends with what was said where it does not come."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if found := is_so():
            return found
        time.sleep(every_s)
    sys.exit(f"{what}: not within {limit_s:.0f} s\n{said()[-3000:]}")

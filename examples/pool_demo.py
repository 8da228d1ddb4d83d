"""Three agents on this machine, one honest, one that dies, one that cheats: the job finishes, the cheat is slashed.

    make demo-pool                       # or: python examples/pool_demo.py

A pool with its own log and credits starts on a free port of 127.0.0.1. The cheapest agent is killed in the middle of
the job; the next cheapest skips updates and claims that it made them; the third one works. Everything lies in a folder
that goes at the end (`--keep FOLDER` keeps it). It takes about six minutes, 40 s of them silence: an agent counts as
lost after it.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stoker.pool import ShownLease

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
NAMES = ("mayfly", "magpie", "ox")
PRICES = {"mayfly": "0.10usd/h", "magpie": "0.20usd/h", "ox": "0.40usd/h"}
CHEAT = "skip"


class Demo:
    """The pool's processes, each with its output in a file."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self._stack = folder, stack
        self.environment = {
            **os.environ,
            "XDG_CONFIG_HOME": str(folder / "keys"),
            "STOKER_RUNS": str(folder / "runs"),
            "STOKER_CACHE": str(folder / "cache"),
            "PYTHONUNBUFFERED": "1",
            "COLUMNS": "160",
        }
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *words: str, module: str = "stoker") -> subprocess.Popen[bytes]:
        """Start a process whose output goes to NAME.log."""
        print(f"$ {name}: {module} {shlex.join(words)}", flush=True)
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *words],
                cwd=ROOT,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.processes[name] = process
        self._stack.callback(self._end, process)
        return process

    def run(self, *words: str) -> str:
        """Run a command of Stoker's to its end; what it prints."""
        done = subprocess.run(
            [sys.executable, "-m", "stoker", *words],
            cwd=ROOT,
            env=self.environment,
            check=False,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            sys.exit(f"stoker {shlex.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout

    def text(self, name: str) -> str:
        """What a process has said so far."""
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for(self, name: str, pattern: str, limit_s: float) -> str:
        """Wait until a process says something."""
        until = time.monotonic() + limit_s
        while (found := re.search(pattern, self.text(name))) is None:
            if time.monotonic() > until or self.processes[name].poll() is not None:
                sys.exit(f"{name} did not say {pattern!r}:\n{self.text(name)}")
            time.sleep(0.1)
        return found[1] if found.groups() else found[0]

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            if process.poll() is None:
                process.send_signal(number)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(10)


def offer(demo: Demo, name: str, isolation: str) -> None:
    """Start an agent."""
    words = [
        "--price",
        PRICES[name],
        "--name",
        name,
        "--key",
        name,
        "--folder",
        str(demo.folder / name),
        "--isolation",
        isolation,
        "--memory",
        "2GiB",
        "--disk",
        "1GiB",
        "--cores",
        "1",
        "--beat",
        "2",
        "--reclaim",
        "20s",
        "--no-measure",
    ]
    if name == "magpie":
        demo.start(name, CHEAT, *words, module="bench.pool.cheating_agent")
    else:
        demo.start(name, "pool", "offer", *words)


def leases_of(address: str) -> list[ShownLease]:
    """All leases of the pool, oldest first."""
    from stoker.pool.client import PoolClient

    client = PoolClient(address)
    return sorted((client.lease(one.lease_id) for one in client.leases()), key=lambda lease: lease.opened_s)


def wait_until_committed(demo: Demo, address: str, name: str, blocks: int) -> None:
    """Wait until an agent's lease has so many blocks."""
    until = time.monotonic() + 180
    while time.monotonic() < until and demo.processes["job"].poll() is None:
        for lease in leases_of(address):
            if lease.offer_id == name and len(lease.commitments) >= blocks:
                return
        time.sleep(0.2)
    sys.exit(f"{name} committed nothing:\n{demo.text(name)}\n{demo.text('job')}")


def main() -> int:
    """The demonstration; 0 if everything came as it should."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep logs, keys and the run there")
    parser.add_argument("--isolation", default="bubblewrap", help="gvisor, podman, bubblewrap or best")
    parser.add_argument("--epochs", type=float, default=1500)
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = (
            options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stoker-pool-")))
        ).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)
        demo = Demo(folder, stack)
        demo.start("pool", "pool", "serve", "--port", "0", "--folder", str(folder / "control"), "--least-window", "1s")
        address = demo.wait_for("pool", r"stoker pool: (\S+)", 60)
        demo.environment["STOKER_POOL"] = address
        os.environ["XDG_CONFIG_HOME"] = demo.environment["XDG_CONFIG_HOME"]
        from stoker.pool.keys import own_key

        wallets = {"renter": "5usd", **dict.fromkeys(NAMES, "1usd")}
        grants = [word for name, amount in wallets.items() for word in ("--grant", f"{own_key(name).public}={amount}")]
        demo.run("pool", "wallet", "--key", "renter", "--folder", str(folder / "control"), *grants)
        for name in NAMES:
            offer(demo, name, options.isolation)
        for name in NAMES:
            demo.wait_for(name, "offering", 120)
        time.sleep(2)
        job = demo.start(
            "job",
            "train",
            "examples/pool_job.py",
            "--set",
            f"epochs={options.epochs:g}",
            "--on",
            "pool/cpu",
            "--max-cost",
            "0.5usd",
            "--time-limit",
            "30min",
            "--verify",
            "100%",
            "--place-option",
            "key=renter",
            "--place-option",
            "block=4s",
            "--place-option",
            "window=20min",
        )
        threading.Thread(target=_show, args=(demo, job), daemon=True).start()
        wait_until_committed(demo, address, "mayfly", 2)
        print("mayfly is killed now (SIGKILL)", flush=True)
        demo.processes["mayfly"].kill()
        demo.processes["mayfly"].wait()
        wait_until_lost(address)
        print("mayfly is lost for the pool; its owner starts it again, as a verifier among others", flush=True)
        demo.start(
            "mayfly",
            "pool",
            "offer",
            "--price",
            "9usd/h",
            "--name",
            "mayfly",
            "--key",
            "mayfly",
            "--folder",
            str(folder / "mayfly"),
            "--isolation",
            options.isolation,
            "--memory",
            "2GiB",
            "--disk",
            "1GiB",
            "--cores",
            "1",
            "--beat",
            "2",
            "--no-measure",
        )
        code = job.wait(1500)
        return judge(demo, address, code)


def wait_until_lost(address: str) -> None:
    """Wait until the pool has given the first lease up."""
    until = time.monotonic() + 180
    while not any(lease.reason == "lost" for lease in leases_of(address)):
        if time.monotonic() > until:
            sys.exit("the killed agent was not given up")
        time.sleep(0.5)


def _show(demo: Demo, job: subprocess.Popen[bytes]) -> None:
    """Show what the renter sees, as it comes."""
    shown = 0
    while job.poll() is None:
        text = demo.text("job")
        for line in text[shown:].splitlines():
            if line.strip():
                print(f"  | {line}", flush=True)
        shown = len(text)
        time.sleep(0.5)


def judge(demo: Demo, address: str, code: int) -> int:
    """Hold what came out against what should; 0 if it is so."""
    leases = leases_of(address)
    by_offer = {lease.offer_id: lease for lease in leases}
    until = time.monotonic() + 60
    while time.monotonic() < until and not ("magpie" in by_offer and by_offer["magpie"].state in ("slashed", "final")):
        time.sleep(1)
        by_offer = {lease.offer_id: lease for lease in leases_of(address)}
    from stoker.pool.client import PoolClient
    from stoker.pool.keys import own_key

    balances = PoolClient(address).state("balances")
    records = PoolClient(address).state("records")
    slashed = {name: records.get(own_key(name).public, {}).get("slashed", 0) for name in NAMES}
    for lease in leases:
        paid = lease.paid_s * lease.rate_per_hour / 3600 / 1e6
        print(
            f"{lease.lease_id}: {lease.offer_id}, {lease.state} ({lease.reason}), "
            f"{len(lease.commitments)} blocks, {lease.running_s} s run, {paid:.6f} credits metered, "
            f"{sum(one.equal is True for one in lease.challenges)} replays equal, "
            f"{sum(one.equal is False for one in lease.challenges)} unequal"
        )
    last = leases[-1]
    checks = {
        "the job finished": code == 0,
        "the agent that died was replaced": "mayfly" in by_offer and by_offer["mayfly"].reason == "lost",
        "the cheat was caught and slashed": slashed["magpie"] == 1,
        "nobody honest was slashed": slashed["mayfly"] == slashed["ox"] == 0,
        "the job went on from a committed block": len(leases) == 3,
        "the last lease's blocks were all replayed, and equal": 0 < last.num_replayed == len(last.commitments),
        "the meter never ran ahead of the clock": all(
            lease.paid_s <= (lease.closed_s or time.time()) - lease.accepted_s + 2
            for lease in leases
            if lease.accepted_s
        ),
        "no credit was lost or made": sum(balances["balances"].values()) == balances["deposited"],
        "the weights came home": any((demo.folder / "runs").glob("*/model.safetensors")),
    }
    for text, is_so in checks.items():
        print(f"{'yes' if is_so else 'NO '}  {text}")
    audited = demo.run("pool", "audit", str(demo.folder / "control" / "log.db")).strip().splitlines()
    print(*audited[2:], sep="\n")
    if not all(checks.values()):
        for name in (*NAMES, "job"):
            print(f"--- {name}\n{demo.text(name)[-3000:]}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

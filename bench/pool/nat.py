"""Direct transfers between two homes behind NATs: time to a path, throughput, cuts, prices; a job through it all.

`python -m bench.pool.nat` as root; the result is `bench/results/pool_nat_DATE.json`. Both homes, their routers and the
internet are namespaces of one machine (`nat_lab.py`): figures say what the software costs, not what a line costs.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import itertools
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.pool.nat_lab import NatLab, RemotePeer, problem
from stoker.pool import events as on
from stoker.pool.client import PoolClient
from stoker.pool.events import CREDIT
from stoker.pool.keys import own_key
from stoker.pool.log import audit
from stoker.units import MIB

TRIES = 20
LARGE_BYTES = 64 * MIB
CUT_S = 30.0


@dataclass
class Homes:
    """A pool on the internet, a renter in home b, an agent in home a; a lease with an input that the renter keeps."""

    lab: NatLab
    folder: Path
    address: str
    operator: PoolClient
    renter_client: PoolClient
    agent_client: PoolClient
    renter: RemotePeer
    agent: RemotePeer
    size_bytes: int
    tree: str = ""

    def open(self, *, most_forwarding: int = 0) -> str:
        """Let the renter keep a file, and open a lease that names it; the blob."""
        source = self.folder / "tree"
        source.write_bytes(os.urandom(self.size_bytes))
        self.tree = self.renter.do("put", path=str(source))["digest"]
        self.agent_client.post(
            on.Offered(
                offer=on.Offer(
                    offer_id="box",
                    device=on.OfferedDevice(kind="cpu"),
                    isolation="bubblewrap",
                    price_per_hour=1000,
                    expires_s=time.time() + 3000,
                )
            )
        )
        self.renter_client.post(
            on.Opened(
                lease_id="lease",
                offer_id="box",
                order=self.renter_client.put_blob(b"order"),
                rate_per_hour=1000,
                deposit=CREDIT,
                forecast=on.Forecast(hours=1, credits=1000),
                inputs=(self.tree,),
                most_forwarding=most_forwarding,
            )
        )
        self.agent_client.post(on.Accepted(lease_id="lease"))
        return self.tree

    def get(self, digest: str) -> dict[str, Any]:
        """Let the agent fetch a blob."""
        target = self.folder / "got"
        target.unlink(missing_ok=True)
        return self.agent.do("get", digest=digest, path=str(target))

    def bulk(self) -> dict[str, int]:
        """Bytes of the lease that went directly, and through the pool."""
        return dict(self.operator.lease("lease").bulk)


@contextmanager
def homes(a: Any, b: Any, *options: str, size_bytes: int = 8 * MIB) -> Iterator[Homes]:
    """See `Homes`; `a`, `b`: their NATs."""
    with tempfile.TemporaryDirectory(prefix="stoker-nat-") as name, NatLab(a, b) as lab, lab.entered("internet"):
        folder = Path(name)
        with lab.serving(folder / "pool", *options, bulk_bytes=1000) as address:
            operator = PoolClient(address, own_key("control", folder / "pool"))
            clients = [PoolClient(address, own_key(name, folder / "keys")) for name in ("renter", "agent")]
            for client in clients:
                assert client.key is not None
                operator.post(on.Deposited(account=client.key.public, amount=100 * CREDIT))
            renter = RemotePeer(lab, "home-b", address, folder / "keys" / "renter.key", folder / "kept", keeps=True)
            agent = RemotePeer(lab, "home-a", address, folder / "keys" / "agent.key", folder / "agent")
            try:
                yield Homes(lab, folder, address, operator, clients[0], clients[1], renter, agent, size_bytes)
            finally:
                renter.kill()
                agent.kill()


def paths(tries: int = TRIES) -> dict[str, Any]:
    """Two port-preserving NATs: time to join the pool and to a direct path, with new sockets in each try [s]."""
    joined, met, direct = [], [], 0
    with homes("cone", "cone") as lab:
        for number in range(tries):
            lab.renter.send("join")
            joined.append(lab.agent.do("join")["took_s"])
            lab.renter.answer()
            digest = lab.tree if number else lab.open()
            path = lab.agent.do("path", digest=digest)
            direct += path["is_direct"]
            met.append(path["took_s"])
            lab.agent.do("leave")
            lab.renter.do("leave")
    return {"tries": tries, "direct": direct, "join_s": _spread(joined), "path_s": _spread(met)}


def throughput(rounds: int = 5) -> dict[str, Any]:
    """64 MiB directly, and through the pool, each way, in turns [MiB/s]."""
    found: dict[str, list[float]] = {"direct get": [], "direct put": [], "through the pool": []}
    with homes("cone", "cone", size_bytes=LARGE_BYTES) as lab:
        lab.renter.do("join"), lab.agent.do("join")
        digest = lab.open()
        lab.get(digest)
        for _ in range(rounds):
            found["direct get"].append(LARGE_BYTES / MIB / lab.get(digest)["took_s"])
            source = lab.folder / "checkpoint"
            source.write_bytes(os.urandom(LARGE_BYTES))
            found["direct put"].append(LARGE_BYTES / MIB / lab.agent.do("put", path=str(source))["took_s"])
            source.write_bytes(os.urandom(LARGE_BYTES))
            begun = time.monotonic()
            lab.renter_client.put_blob(source)
            lab.renter_client.get_blob(_sha256(source), lab.folder / "back")
            found["through the pool"].append(LARGE_BYTES / MIB / (time.monotonic() - begun))
            (lab.folder / "back").unlink()
        bulk = lab.bulk()
    return {**{name: _spread(values) for name, values in found.items()}, "lease": bulk}


def matrix() -> list[dict[str, Any]]:
    """Which NATs let which reach each other, and how long a blob of 8 MiB takes all the same [s]."""
    rows = []
    for a, b in itertools.product(("cone", "symmetric", "open"), repeat=2):
        with homes(a, b) as lab:
            words = lab.renter.do("join")["network"], lab.agent.do("join")["network"]
            got = lab.get(lab.open())
            rows.append(
                {
                    "agent": a,
                    "renter": b,
                    "said_of_agent": words[1],
                    "said_of_renter": words[0],
                    "bulk": lab.bulk(),
                    "took_s": got["took_s"],
                    "failed": got.get("failed", ""),
                }
            )
    return rows


def priced() -> dict[str, Any]:
    """One symmetric NAT: the way through the pool is refused without the renter's word, and paid with it."""
    options = ("--forward-price", "0.10usd", "--forward-quota", "20MiB")
    found: dict[str, Any] = {}
    for word, most in (("refused", 0), ("paid", CREDIT)):
        with homes("symmetric", "cone", *options) as lab:
            lab.renter.do("join")
            found["network"] = lab.agent.do("join")["network"]
            digest = lab.open(most_forwarding=most)
            got = lab.get(digest)
            if not most:
                found[word] = {"bulk": lab.bulk(), "failed": got["failed"]}
                continue
            lease = lab.operator.lease("lease")
            sources = [lab.folder / name for name in ("one", "two")]
            for source in sources:
                source.write_bytes(os.urandom(8 * MIB))
            for number, source in enumerate(sources):
                blob = lab.agent.do("put", path=str(source))["digest"]
                try:
                    lab.agent_client.post(
                        on.Committed(
                            lease_id="lease",
                            block=number,
                            update=number + 1,
                            state=f"{number + 1:064x}",
                            previous=f"{number:064x}" if number else "",
                            blob=blob,
                        )
                    )
                except on.Refused as refused:
                    found["over the quota"] = refused.message
            lease = lab.operator.lease("lease")
            found[word] = {
                "took_s": got["took_s"],
                "bulk": lab.bulk(),
                "forwarded_bytes": lease.forwarded_bytes,
                "forwarded_credits": lease.forwarded_credits / CREDIT,
                "log": audit(lab.folder / "pool" / "log.db").problem or "right",
            }
    return found


def cut(
    what: str, *, size_bytes: int = LARGE_BYTES // 2, after_s: float = 5.0, away_s: float = CUT_S
) -> dict[str, Any]:
    """A blob on a line of 20 Mbit/s; after a while the `line` is cut, or the `renter` killed, for `away_s` seconds."""
    with homes("cone", "cone", size_bytes=size_bytes) as lab:
        lab.renter.do("join"), lab.agent.do("join")
        digest = lab.open()
        lab.lab.slow("b", "20mbit")
        lab.agent.send("get", digest=digest, path=str(lab.folder / "got"))
        time.sleep(after_s)
        if what == "line":
            lab.lab.cut("b")
            time.sleep(away_s)
            lab.lab.mend("b")
        elif what == "renter":
            lab.renter.kill()
            time.sleep(away_s)
            lab.renter.start()
            lab.renter.do("join")
        got = lab.agent.answer()
        is_equal = (lab.folder / "got").exists() and _sha256(lab.folder / "got") == digest
        return {
            "took_s": round(got["took_s"], 1),
            "failed": got.get("failed", ""),
            "bulk": lab.bulk(),
            "is_equal": is_equal,
            "said": got["said"],
        }


def cuts() -> dict[str, Any]:
    """32 MiB without a cut, with the line cut for 30 s, and with the renter killed and away for 10 s."""
    return {"nothing": cut(""), "line cut for 30 s": cut("line"), "renter away for 10 s": cut("renter", away_s=10.0)}


JOB = """
from torch import nn

import stoker


def job(epochs: float = 40) -> stoker.Job:
    train, test = stoker.data.digits()
    return stoker.Job(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 1400), nn.ReLU(), nn.Linear(1400, 1400), nn.ReLU(),
                                    nn.Linear(1400, 10)),
        data=train, test=test, loss="cross_entropy", metrics=["accuracy"], optimizer=stoker.AdamW(lr=1e-3), batch=128,
        until=stoker.epochs(epochs),
    )
"""


Lent = tuple[PoolClient, dict[str, dict[str, str]]]
"""The operator's client, and the environment of each party, which has credits."""


@contextmanager
def lent(lab: NatLab, folder: Path, address: str, offers: dict[str, tuple[str, str]], *options: str) -> Iterator[Lent]:
    """Agents that lend this machine, once all are there.

    Args:
        lab: where they are.
        folder: of all files.
        address: of the pool.
        offers: place and price by name.
        options: more words of each `stoker pool offer`.
    """
    operator = PoolClient(address, own_key("control", folder / "pool"))
    home = {
        name: {
            **os.environ,
            "STOKER_POOL": address,
            "XDG_CONFIG_HOME": str(folder / name / "config"),
            "XDG_CACHE_HOME": str(folder / name / "cache"),
        }
        for name in ("renter", *offers)
    }
    for name in home:
        key = own_key("default", folder / name / "config" / "stoker" / "pool")
        operator.post(on.Deposited(account=key.public, amount=100 * CREDIT))
    agents = []
    for name, (place, hour) in offers.items():
        words = f"-m stoker pool offer --price {hour} --name {name} --no-measure --isolation bubblewrap --beat 1"
        command = lab.command(place, sys.executable, *words.split(), "--folder", str(folder / f"at-{name}"), *options)
        with (folder / f"{name}.log").open("w") as log:
            agents.append(subprocess.Popen(command, env=home[name], stderr=log))
    try:
        _until(lambda: sum(one["is_present"] for one in operator.state("offers")) == len(offers), 60)
        yield operator, home
    finally:
        for process in agents:
            process.terminate()
        for process in agents:
            process.wait(60)


def trained(lab: NatLab, place: str, folder: Path, home: Lent, words: str) -> dict[str, Any]:
    """Train `job.py` of a folder with the pool, with these options; how it went, and what all have said."""
    operator, environments = home
    begun = time.monotonic()
    command = "-m stoker train job.py --on pool --time-limit 20min --place-option forwarding=1usd --run-dir run"
    done = subprocess.run(
        lab.command(place, sys.executable, *command.split(), *words.split()),
        check=False,
        env=environments["renter"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=840,
    )
    leases = [operator.lease(one.lease_id) for one in operator.leases()]
    blocks = [one for lease in leases for one in lease.challenges]
    return {
        "exit_code": done.returncode,
        "took_s": round(time.monotonic() - begun, 1),
        "networks": {one["offer"]["offer_id"]: one["network"] for one in operator.state("offers")},
        "leases": [
            {
                "state": one.state,
                "reason": one.reason,
                "blocks": len(one.commitments),
                "messages": len(one.messages),
                "bulk": one.bulk,
                "forwarded_credits": one.forwarded_credits,
            }
            for one in leases
        ],
        "replays_equal": sum(one.equal is True for one in blocks),
        "replays": len(blocks),
        "log": audit(folder / "pool" / "log.db").problem or "right",
        "at_home": (folder / "run" / "model.safetensors").exists(),
        "renter_said": done.stderr.splitlines()[-3:],
        **{
            f"{name}_said": (folder / f"{name}.log").read_text().splitlines()[1:]
            for name in environments
            if name != "renter"
        },
    }


def _folder_with(job_file: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="stoker-nat-", dir="/var/tmp"))
    folder.chmod(0o755)
    (folder / "job.py").write_text(job_file)
    return folder


def job(a: Any = "cone", b: Any = "cone", *, price: str = "0", epochs: int = 40) -> dict[str, Any]:
    """A job from home b, run by an agent in home a, each block replayed by an agent on the internet.

    `a`, `b`: the NATs; `price`: of a GiB that goes through the pool, on which the renter spends a credit at most.
    """
    folder = _folder_with(JOB)
    offers = {"agent": ("home-a", "0.40usd/h"), "checker": ("internet", "4usd/h")}
    words = f"--verify 100% --set epochs={epochs} --place-option block=8s --place-option window=30min"
    with (
        NatLab(a, b) as lab,
        lab.entered("internet"),
        lab.serving(folder / "pool", "--forward-price", price) as address,
        lent(lab, folder, address, offers) as home,
    ):
        return trained(lab, "home-b", folder, home, words)


def gang(a: Any = "cone", b: Any = "cone", *, parted: bool = False, epochs: int = 6) -> dict[str, Any]:
    """A job of two sites, from the internet, run by an agent in each home, whose messages have 17 MB.

    `a`, `b`: the NATs; `parted`: once the link between the homes was measured, nothing goes from one to the other.
    """
    sync = 'sync=stoker.DiLoCo(every=stoker.updates(24), compress="none"), batch=128,'
    folder = _folder_with(JOB.replace("1400", "2048").replace("batch=128,", sync))
    offers = {"a": ("home-a", "0.40usd/h"), "b": ("home-b", "0.40usd/h")}
    with (
        NatLab(a, b) as lab,
        lab.entered("internet"),
        lab.serving(folder / "pool") as address,
        lent(lab, folder, address, offers) as home,
    ):
        with suppress(TimeoutError):  # where there is no path, none is listed
            _until(lambda: len(home[0].state("links")) == 2, 60)
        links = home[0].state("links")
        if parted:
            lab.part()
        words = f"--verify none --set epochs={epochs} --place-option agents=2 --place-option block=20s"
        return {"links": links, **trained(lab, "internet", folder, home, words)}


def _until(is_so: Any, limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {limit_s} s")
        time.sleep(0.2)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _spread(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 4),
        "least": round(min(values), 4),
        "most": round(max(values), 4),
    }


STAGES = {
    "paths": paths,
    "throughput": throughput,
    "matrix": matrix,
    "priced": priced,
    "cuts": cuts,
    "job": job,
    "job, agent behind a symmetric NAT": lambda: job("symmetric", price="0.05usd"),
    "gang": gang,
    "gang behind symmetric NATs": lambda: gang("symmetric", "symmetric"),
    "gang whose path is gone": lambda: gang(parted=True),
}


def main() -> None:
    """Run what is asked for, and add it to the day's result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("stages", nargs="*", default=list(STAGES), choices=[*STAGES, []], metavar="STAGE")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if why := problem():
        sys.exit(f"no NAT lab here: {why}")
    today = datetime.now(UTC).date().isoformat()
    out = given.out or Path(__file__).parents[1] / "results" / f"pool_nat_{today}.json"
    result = json.loads(out.read_text()) if out.exists() else {}
    result |= {
        "command": shlex.join(["python", "-m", "bench.pool.nat", *given.stages]),
        "date": today,
        "machine": {
            "cpus": os.cpu_count(),
            "kernel": platform.release(),
            "python": platform.python_version(),
            "iroh": importlib.metadata.version("iroh"),
        },
    }
    for name in given.stages or STAGES:
        load = os.getloadavg()[0]
        result[name] = {"load_before": round(load, 1), "result": STAGES[name]()}
        print(json.dumps({name: result[name]}, indent=1), flush=True)
        out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

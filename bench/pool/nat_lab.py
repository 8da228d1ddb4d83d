"""Two homes behind NATs, and the internet between them, in network namespaces of this machine; needs root and nft.

```
home-a ── router-a ─┐                      a router masquerades what comes from its home, and drops what comes unasked;
                    ├── internet (bridge)  "cone": the port stays as it is, for all destinations;
home-b ── router-b ─┘                      "symmetric": a random port for each destination; "open": no NAT, no filter
```
`python -m bench.pool.nat_lab peer ADDRESS KEY FOLDER [keeps]` is a peer in one of the homes: a JSON document a line in,
one a line out.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from stoker.cli.main import main as stoker
from stoker.errors import StokerError
from stoker.pool import admission
from stoker.pool.client import PoolClient
from stoker.pool.keys import read_key
from stoker.pool.peer import Peer

Nat = Literal["cone", "symmetric", "open"]
INTERNET = "10.77.0.1"
_CLONE_NEWNET = 0x40000000


def problem() -> str:
    """Why there can be no lab on this machine; "" if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "nft", "nsenter", "sysctl") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} is not installed"
    trial = ["unshare", "-n", "nft", "add", "table", "ip", "t"]
    tried = subprocess.run(trial, check=False, capture_output=True, text=True)
    return "" if tried.returncode == 0 else f"no namespace with nft: {tried.stderr.strip()[:200]}"


class NatLab:
    """The lab, within its `with` block.

    Args:
        a, b: the NAT of each home.
    """

    def __init__(self, a: Nat = "cone", b: Nat = "cone") -> None:
        self._nats = {"a": a, "b": b}
        self._prefix = f"sk{secrets.token_hex(2)}"

    def name(self, place: str) -> str:
        """The namespace of `internet`, `home-a`, `router-a`, `home-b` or `router-b`."""
        return f"{self._prefix}-{place}"

    def __enter__(self) -> Self:
        """Make it."""
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self) -> None:
        for place in ("internet", "home-a", "router-a", "home-b", "router-b"):
            _run("ip", "netns", "add", self.name(place))
            self.run(place, "ip", "link", "set", "lo", "up")
        self.run("internet", "ip", "link", "add", "br0", "type", "bridge")
        self.run("internet", "ip", "addr", "add", f"{INTERNET}/24", "dev", "br0")
        self.run("internet", "ip", "link", "set", "br0", "up")
        for number, (side, nat) in enumerate(self._nats.items(), 2):
            router, home = f"router-{side}", f"home-{side}"
            inner = f"10.88.{number}"
            self._wire("internet", f"to-{side}", router, "wan")
            self._wire(router, "lan", home, "eth0")
            self.run("internet", "ip", "link", "set", f"to-{side}", "master", "br0")
            self.run(router, "ip", "addr", "add", f"10.77.0.{number}/24", "dev", "wan")
            self.run(router, "ip", "addr", "add", f"{inner}.1/24", "dev", "lan")
            self.run(home, "ip", "addr", "add", f"{inner}.2/24", "dev", "eth0")
            self.run(home, "ip", "route", "add", "default", "via", f"{inner}.1")
            self.run(router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
            if nat == "open":
                continue
            ports = " random,fully-random" if nat == "symmetric" else ""
            self.run(
                router,
                "nft",
                "-f",
                "-",
                text=f"""
                table ip t {{
                    chain post {{ type nat hook postrouting priority 100; oifname wan masquerade{ports}; }}
                    chain fw {{ type filter hook forward priority 0; policy drop;
                                ct state established,related accept; iifname != wan accept; }}
                    chain inp {{ type filter hook input priority 0; iifname wan ct state new drop; }}
                }}""",
            )
        for number, (side, nat) in enumerate(self._nats.items(), 2):
            for place in ("internet", f"router-{'b' if side == 'a' else 'a'}") if nat == "open" else ():
                self.run(place, "ip", "route", "add", f"10.88.{number}.0/24", "via", f"10.77.0.{number}")

    def _wire(self, one: str, device: str, other: str, other_device: str) -> None:
        self.run(
            one, "ip", "link", "add", device, "type", "veth", "peer", "name", other_device, "netns", self.name(other)
        )
        self.run(one, "ip", "link", "set", device, "up")
        self.run(other, "ip", "link", "set", other_device, "up")

    def __exit__(self, *_: object) -> None:
        """Remove it; processes in it are ended by whoever started them."""
        for place in ("internet", "home-a", "router-a", "home-b", "router-b"):
            subprocess.run(["ip", "netns", "del", self.name(place)], check=False, capture_output=True)

    def command(self, place: str, *words: str) -> list[str]:
        """A command that runs there, with this machine's files."""
        return ["nsenter", f"--net=/run/netns/{self.name(place)}", *words]

    def run(self, place: str, *words: str, text: str | None = None) -> None:
        """Run a command there."""
        _run(*self.command(place, *words), text=text)

    def slow(self, side: str, rate: str) -> None:
        """Let a home's line carry no more than this, in each direction; such as `20mbit`."""
        for device in ("wan", "lan"):
            self.run(
                f"router-{side}",
                "tc",
                "qdisc",
                "add",
                "dev",
                device,
                "root",
                "tbf",
                "rate",
                rate,
                "burst",
                "128kb",
                "latency",
                "200ms",
            )

    def cut(self, side: str) -> None:
        """Drop every packet from and to a home."""
        self.run(
            f"router-{side}",
            "nft",
            "add table ip cut; add chain ip cut dropped { type filter hook forward priority -10; policy drop; }",
        )

    def part(self) -> None:
        """Drop every packet from one home to the other; both still reach the internet."""
        self.run(
            "router-a",
            "nft",
            "add table ip part; add chain ip part dropped { type filter hook forward priority -10; }; "
            "add rule ip part dropped ip daddr 10.77.0.3 drop; add rule ip part dropped ip saddr 10.77.0.3 drop",
        )

    def mend(self, side: str) -> None:
        """Let packets through again."""
        self.run(f"router-{side}", "nft", "delete", "table", "ip", "cut")

    @contextlib.contextmanager
    def entered(self, place: str) -> Iterator[None]:
        """This thread, and threads that it starts, are there within the block."""
        libc = ctypes.CDLL(None, use_errno=True)
        own, other = Path("/proc/thread-self/ns/net"), Path("/run/netns") / self.name(place)
        with own.open() as before, other.open() as there:
            if libc.setns(there.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
            try:
                yield
            finally:
                libc.setns(before.fileno(), _CLONE_NEWNET)

    @contextlib.contextmanager
    def serving(self, folder: Path, *options: str, bulk_bytes: int | None = None) -> Iterator[str]:
        """The address of a pool on the internet."""
        words = (
            ("-m", "stoker", "pool", "serve")
            if bulk_bytes is None
            else ("-m", "bench.pool.nat_lab", "serve", str(bulk_bytes))
        )
        command = self.command(
            "internet", sys.executable, *words, "--folder", str(folder), "--host", INTERNET, "--p2p", *options
        )
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                yield process.stdout.readline().removeprefix("stoker pool: ").strip()
            finally:
                process.terminate()


class RemotePeer:
    """A peer in a home."""

    def __init__(self, lab: NatLab, place: str, address: str, key: Path, folder: Path, *, keeps: bool = False) -> None:
        self._command = lab.command(
            place,
            sys.executable,
            "-m",
            "bench.pool.nat_lab",
            "peer",
            address,
            str(key),
            str(folder),
            "keeps" if keeps else "",
        )
        self.start()

    def start(self) -> None:
        """Start its process."""
        self.process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def send(self, do: str, **what: Any) -> None:
        """Let it do something; `answer` waits for what comes of it."""
        assert self.process.stdin is not None
        print(json.dumps({"do": do, **what}), file=self.process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        """What came of the last thing."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the peer ended with {self.process.wait()}")
        return json.loads(line)

    def do(self, do: str, **what: Any) -> dict[str, Any]:
        """Both."""
        self.send(do, **what)
        return self.answer()

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def _peer(address: str, key: str, folder: str, keeps: str) -> None:
    """Answer a line for each line."""
    client, said, peer = PoolClient(address, read_key(Path(key))), list[str](), None
    for line in sys.stdin:
        asked, begun = json.loads(line), time.monotonic()
        answer: dict[str, Any] = {}
        try:
            match asked["do"]:
                case "join":
                    peer = Peer(client, Path(folder), keeps=bool(keeps), tell=said.append)
                    answer = {"ready": peer.wait_ready(20), "network": peer.network}
                case "leave":
                    assert peer is not None
                    peer.close()
                case "put":
                    answer = {"digest": client.put_blob(Path(asked["path"]))}
                case "get":
                    client.get_blob(asked["digest"], Path(asked["path"]))
                case "path":  # to whoever holds a blob
                    assert peer is not None
                    answer = {"is_direct": peer.route_to(asked["digest"]) is not None}
        except (StokerError, OSError) as failed:
            answer = {"failed": str(failed)}
        print(json.dumps({**answer, "took_s": time.monotonic() - begun, "said": said}), flush=True)
        said.clear()


def _run(*words: str, text: str | None = None) -> None:
    done = subprocess.run(words, check=False, capture_output=True, text=True, input=text)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")


def main(words: Sequence[str]) -> None:
    """A peer; or a pool in which blobs are large from so many bytes on."""
    if words[0] == "peer":
        _peer(*words[1:])
        return
    admission.BULK_BYTES = int(words[1])
    stoker(["pool", "serve", *words[2:]])


if __name__ == "__main__":
    main(sys.argv[1:])

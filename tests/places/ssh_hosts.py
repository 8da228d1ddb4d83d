"""Machines to log into, for tests: an sshd on loopback, or one in each of several network namespaces.

As little privilege as possible: on loopback sshd runs as the present user, with keys, configuration and log in one
temporary folder, and is ended by its process number. Namespaces need root (`ip netns`), and are removed at the end.
"""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

SSHD = shutil.which("sshd") or ("/usr/sbin/sshd" if Path("/usr/sbin/sshd").exists() else None)


@dataclass
class Host:
    """A machine: `name` is an alias in the client's configuration; `folder` is its disk for Stoker."""

    name: str
    address: str
    port: int
    folder: Path
    namespace: str = ""
    servers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def inside(self, *command: str) -> list[str]:
        """A command for this machine's network."""
        return ["ip", "netns", "exec", self.namespace, *command] if self.namespace else list(command)

    def cut_line(self) -> None:
        """Let no packet through, and tell neither end."""
        subprocess.run(self.inside("ip", "link", "set", "eth0", "down"), check=True)

    def mend_line(self) -> None:
        """Let packets through again."""
        subprocess.run(self.inside("ip", "link", "set", "eth0", "up"), check=True)

    def kill(self) -> None:
        """End all that runs there at once, as a power cut does: sshd and every process of the namespace."""
        told = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=True)
        for pid in map(int, told.stdout.split()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@dataclass
class Hosts:
    """Machines, and the configuration by which a client reaches them."""

    folder: Path
    config: Path
    hosts: list[Host] = field(default_factory=list)

    def start(self, host: Host) -> None:
        """Start sshd on a machine."""
        assert SSHD is not None
        etc = self.folder / f"etc-{host.name}"
        if not etc.exists():
            etc.mkdir()
            keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f"]
            subprocess.run([*keygen, str(etc / "host_key")], check=True)
            (etc / "sshd_config").write_text(
                f"Port {host.port}\nListenAddress {host.address}\nHostKey {etc}/host_key\nPidFile {etc}/pid\n"
                f"AuthorizedKeysFile {self.folder}/id.pub\nStrictModes no\nUsePAM no\nPasswordAuthentication no\n"
                "KbdInteractiveAuthentication no\nPermitRootLogin prohibit-password\nAcceptEnv none\n"
                "ClientAliveInterval 5\nClientAliveCountMax 3\n"
            )
        Path("/run/sshd").mkdir(exist_ok=True)
        server = subprocess.Popen(
            host.inside(SSHD, "-D", "-f", str(etc / "sshd_config"), "-E", str(etc / "log")), start_new_session=True
        )
        host.servers.append(server)
        until = time.monotonic() + 60
        while True:
            with suppress(OSError), socket.create_connection((host.address, host.port), timeout=1):
                return
            if time.monotonic() > until or server.poll() is not None:
                raise RuntimeError((etc / "log").read_text())
            time.sleep(0.05)

    def write_config(self) -> None:
        """Write the client's configuration."""
        self.config.write_text(
            "".join(f"Host {host.name}\n  HostName {host.address}\n  Port {host.port}\n" for host in self.hosts)
            + f"Host *\n  User {getpass.getuser()}\n  IdentityFile {self.folder}/id\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {self.folder}/known\n  StrictHostKeyChecking accept-new\n"
        )


@contextmanager
def loopback(folder: Path) -> Iterator[Hosts]:
    """One machine, `box`, on loopback."""
    with _running(folder) as hosts, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        _add(hosts, Host("box", "127.0.0.1", port, folder / "disk-box"))
        yield hosts


@contextmanager
def namespaces(folder: Path, names: Sequence[str] = ("box1", "box2")) -> Iterator[Hosts]:
    """Machines in network namespaces behind one bridge, with addresses 10.87.N.2, 10.87.N.3 and so on.

    Raises:
        subprocess.CalledProcessError: this user may not make namespaces.
    """
    tag = f"st{os.getpid() % 10000}"
    bridge, net = f"{tag}br", f"10.87.{os.getpid() % 255}"
    with _running(folder) as hosts:
        made: list[list[str]] = []
        try:
            _ip("link", "add", bridge, "type", "bridge")
            made.append(["link", "del", bridge])
            _ip("addr", "add", f"{net}.1/24", "dev", bridge)
            _ip("link", "set", bridge, "up")
            for number, name in enumerate(names, start=2):
                namespace, outer = f"{tag}{name}", f"{tag}v{number}"
                _ip("netns", "add", namespace)
                made.append(["netns", "del", namespace])
                _ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", namespace)
                _ip("link", "set", outer, "master", bridge, "up")
                for words in (
                    ["addr", "add", f"{net}.{number}/24", "dev", "eth0"],
                    ["link", "set", "eth0", "up"],
                    ["link", "set", "lo", "up"],
                ):
                    _ip("-n", namespace, *words)
                _add(hosts, Host(name, f"{net}.{number}", 22, folder / f"disk-{name}", namespace))
            yield hosts
        finally:
            for host in hosts.hosts:
                host.kill()
            for words in reversed(made):
                subprocess.run(["ip", *words], check=False)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _add(hosts: Hosts, host: Host) -> None:
    host.folder.mkdir()
    hosts.hosts.append(host)
    hosts.write_config()
    hosts.start(host)


@contextmanager
def _running(folder: Path) -> Iterator[Hosts]:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "id")], check=True)
    hosts = Hosts(folder, folder / "config")
    try:
        yield hosts
    finally:
        for host in hosts.hosts:
            subprocess.run(["ssh", "-F", str(hosts.config), "-O", "exit", host.name], capture_output=True, check=False)
            for server in host.servers:
                if server.poll() is None:
                    server.terminate()
                server.wait(60)

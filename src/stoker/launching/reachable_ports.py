"""Whether hosts of one run reach each other: a listener on each of them, and a connection from each to each other.

What: the ranks of several hosts meet at the first host, and then exchange gradients between all of them, on ports that
the systems choose. Each host listens on such a port for some seconds (the first one on the port of the meeting), and
prints its number and the address by which it reaches the first host, which is the one that gloo listens on. Then each
connects to all others. Use when: before a run of several hosts is sent. Costs: two commands to each host.
Does not do: networks of NCCL other than sockets (InfiniBand); a firewall that lets through some ports of the range.

Where a scheduler has chosen the hosts, each of them asks the others as the first thing of the run (`silent_hosts`).

The text of this file is the program that runs there, so that nothing has to be sent before:

- `listen FIRST PORT OTHERS SECONDS TOKEN`: prints `port N`, or `taken` and why not, `address A`, `range LOW HIGH` and
  `process P`, which answers as many connections as there are other hosts with the token, and stays for so many seconds
  at most.
- `reach TOKEN HOST:PORT…`: prints a line for each: `ok`, or why it cannot be reached.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

CONNECT_S = 5.0
"""Time for a connection to another host [s]: a firewall that drops packets gives no answer at all."""


FIRST_WAIT_S = 60.0
"""Time in which all hosts of a run begin [s]; one that has not by then is left to the ranks, which wait longer."""

_CUT_OFF = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EACCES, errno.EPERM})
"""Errors of a connection that a network or a firewall does not let through; others may pass."""


def port_of(port: int, host: int) -> int:
    """The port of a host, where it answers the others; `port`, in which ranks meet, stays free."""
    return port + 1 + host


def silent_hosts(addresses: tuple[str, ...], host: int, port: int) -> dict[int, str]:
    """The hosts that this one cannot reach, each with the reason; every host asks at about the same time.

    Each listens on its `port_of` for `FIRST_WAIT_S`, also after this call. A host that refuses is asked again for as
    long, since it may not have begun.

    Args:
        addresses: of all hosts.
        host: number of this one.
        port: in which ranks meet.
    """
    until, silent = time.monotonic() + FIRST_WAIT_S, dict[int, str]()
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    with suppress(OSError):  # another program listens there, and shows as much
        server = socket.create_server(("", port_of(port, host)), family=family, dualstack_ipv6=is_dual)
        threading.Thread(target=_accept, args=(server, until), daemon=True).start()

    def ask(other: int) -> None:
        if why := _why_silent(addresses[other], port_of(port, other), until):
            silent[other] = why

    _at_once(ask, [other for other in range(len(addresses)) if other != host])
    return silent


def _at_once(ask: Callable[[int], None], numbers: Iterable[int]) -> None:
    threads = [threading.Thread(target=ask, args=(number,)) for number in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _accept(server: socket.socket, until: float) -> None:
    with server:
        while (left_s := until - time.monotonic()) > 0:
            server.settimeout(left_s)
            with suppress(OSError):
                server.accept()[0].close()


def _why_silent(address: str, port: int, until: float) -> str:
    """Why a network lets no connection through; "" for one that is made, or that no program took until then."""
    while time.monotonic() < until:
        try:
            socket.create_connection((address, port), timeout=CONNECT_S).close()
            break
        except TimeoutError:
            return f"no answer in {CONNECT_S:g} s"
        except OSError as error:
            if error.errno in _CUT_OFF:
                return error.strerror or str(error)
        time.sleep(0.2)
    return ""


def listen(first: str, port: int, num_others: int, seconds: float, token: str) -> None:
    """Print port, address and range of ports, and answer connections with the token from a process that stays."""
    server = socket.socket(socket.AF_INET6 if ":" in first else socket.AF_INET, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind(("", port))
    except OSError as error:
        _tell(f"taken {error.strerror}")
        return
    server.listen(64)
    _tell(f"port {server.getsockname()[1]}")
    with socket.socket(server.family, socket.SOCK_DGRAM) as towards:  # connecting it sends nothing
        towards.connect((first, 9))
        _tell(f"address {towards.getsockname()[0]}")
    _tell("range " + " ".join(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()))
    if process := os.fork():
        _tell(f"process {process}")
        return
    os.setsid()  # it outlives the command, whose ends of pipes it must not hold
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)
    until = time.time() + seconds
    while num_others > 0 and time.time() < until:
        server.settimeout(max(0.1, until - time.time()))
        try:
            connection, _ = server.accept()
        except OSError:
            break
        with connection:
            connection.sendall(token.encode())
        num_others -= 1


def reach(token: str, others: list[str]) -> None:
    """Print for each `HOST:PORT` whether it answers with the token."""
    answers = [""] * len(others)

    def ask(index: int) -> None:
        host, _, port = others[index].rpartition(":")
        try:
            with socket.create_connection((host, int(port)), timeout=CONNECT_S) as connection:
                text = b""
                while len(text) < len(token) and (part := connection.recv(64)):
                    text += part
            answers[index] = "ok" if text == token.encode() else "something else answers there"
        except TimeoutError:
            answers[index] = f"no answer in {CONNECT_S:g} s"
        except OSError as error:
            answers[index] = error.strerror or str(error)

    _at_once(ask, range(len(others)))
    for answer in answers:
        _tell(answer)


def _tell(line: str) -> None:
    """Print a line at once: a process that is made later must not print it again."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1] == "listen":
        listen(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]), sys.argv[6])
    else:
        reach(sys.argv[2], sys.argv[3:])

"""A slow line between two network namespaces: frames are carried by hand, late and at a limited rate, and counted.

    python -m bench.many.relay          # tries it out: rate and round trip that TCP sees

Linux has delays in its own queues (`tc netem`), but not every kernel is built with them; TAP devices are nearly
everywhere. Needs root and /dev/net/tun. Each namespace has one end, a network card of frames up to 9,000 bytes.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import mmap
import os
import select
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_TUN = Path("/dev/net/tun")
_LONGEST_QUEUE_S = 1.0
"""A frame that would wait longer for the line is lost, as in a router whose memory is full."""

CARD = "slow0"
"""The network card's name in both namespaces."""

ADDRESSES = ("10.79.0.1", "10.79.0.2")


@dataclass(frozen=True)
class Line:
    """Bytes a second each way, and seconds from one end to the other."""

    bytes_per_s: float
    delay_s: float


def why_not() -> str | None:
    """Why there can be no such line here; None if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not _TUN.exists():
        return f"there is no {_TUN}"
    try:
        subprocess.run(["ip", "netns", "list"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as problem:
        return f"`ip netns` does not work: {problem}"
    return None


class Relay:
    """The line while the block lasts: two namespaces, `namespaces`, and a process that carries frames between them."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.namespaces = tuple(f"stoker-{os.getpid()}-{end}" for end in "ab")
        self._counts = tempfile.NamedTemporaryFile(prefix="stoker-line-")  # noqa: SIM115 - closed with the line
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def counts(self) -> Path:
        """A file that `carried` reads, from anywhere on this machine."""
        return Path(self._counts.name)

    def command(self, end: int, *command: str) -> list[str]:
        """What runs `command` at one end."""
        return ["ip", "netns", "exec", self.namespaces[end], *command]

    def __enter__(self) -> Self:
        os.truncate(self.counts, 16)
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            cards = [self._end(name, address) for name, address in zip(self.namespaces, ADDRESSES, strict=True)]
            arguments = [*map(str, cards), str(self.line.bytes_per_s), str(self.line.delay_s), str(self.counts)]
            self._process = subprocess.Popen([sys.executable, "-m", "bench.many.relay", *arguments], pass_fds=cards)
            for card in cards:
                os.close(card)
            stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Take the line down."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        for name in self.namespaces:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
        self._counts.close()

    def _end(self, namespace: str, address: str) -> int:
        """A namespace with its card up; the file by which frames are read and written."""
        card = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
        given = f"st{os.getpid() % 10**6}{namespace[-1]}"
        fcntl.ioctl(card, _TUNSETIFF, struct.pack("16sH", given.encode(), _IFF_TAP | _IFF_NO_PI))
        inside = ["ip", "-n", namespace]
        for command in (
            ["ip", "netns", "add", namespace],
            ["ip", "link", "set", given, "netns", namespace],
            [*inside, "link", "set", given, "name", CARD, "mtu", "9000", "txqueuelen", "10000"],
            [*inside, "addr", "add", f"{address}/24", "dev", CARD],
            [*inside, "link", "set", CARD, "up"],
            [*inside, "link", "set", "lo", "up"],
        ):
            subprocess.run(command, check=True, capture_output=True)
        return card


def carried(counts: Path) -> int:
    """Bytes that a line has carried so far, both ways together, with all headers."""
    return sum(struct.unpack("QQ", counts.read_bytes()))


class _Lane:
    """One direction: frames that are under way, in order."""

    def __init__(self, into: int, line: Line) -> None:
        self._into, self._line = into, line
        self._under_way: collections.deque[tuple[float, bytes]] = collections.deque()
        self._free_at = 0.0
        self.num_bytes = 0

    def take(self, frame: bytes, now: float) -> None:
        """Send a frame off, after those before it."""
        if self._free_at - now > _LONGEST_QUEUE_S:
            return
        self._free_at = max(self._free_at, now) + len(frame) / self._line.bytes_per_s
        self._under_way.append((self._free_at + self._line.delay_s, frame))
        self.num_bytes += len(frame)

    def deliver(self, now: float) -> float:
        """Hand over what has arrived; when the next one arrives."""
        while self._under_way and self._under_way[0][0] <= now:
            _, frame = self._under_way.popleft()
            with contextlib.suppress(BlockingIOError, OSError):  # a full card loses frames, as they do
                os.write(self._into, frame)
        return self._under_way[0][0] if self._under_way else now + 0.1


def carry(cards: tuple[int, int], line: Line, counts: Path) -> None:
    """Carry frames until whoever started this is gone."""
    with contextlib.suppress(PermissionError):
        os.nice(-10)  # a line does not wait for a processor
    with counts.open("r+b") as file, mmap.mmap(file.fileno(), 16) as told:
        lanes, parent = (_Lane(cards[1], line), _Lane(cards[0], line)), os.getppid()
        while os.getppid() == parent:
            next_s = min(lane.deliver(time.monotonic()) for lane in lanes)
            ready, _, _ = select.select(cards, [], [], max(0.0, next_s - time.monotonic()))
            for card in ready:
                lane = lanes[cards.index(card)]
                with contextlib.suppress(BlockingIOError):
                    for _ in range(64):
                        lane.take(os.read(card, 65536), time.monotonic())
            told[:] = struct.pack("QQ", *(lane.num_bytes for lane in lanes))


_RECEIVE = """
import socket, sys
server = socket.create_server((sys.argv[1], 7001))
print("ready", flush=True)
for _ in range(2):
    peer, _ = server.accept()
    while peer.recv(1 << 20):
        pass
    peer.sendall(b".")
    peer.close()
"""
_SEND = """
import socket, sys, time
def seconds(size):
    started = time.monotonic()
    peer = socket.create_connection((sys.argv[1], 7001))
    peer.sendall(bytes(size))
    peer.shutdown(socket.SHUT_WR)
    peer.recv(1)
    return time.monotonic() - started
print(seconds(1), seconds(20_000_000))
"""


def try_out(line: Line) -> None:
    """Print what TCP makes of the line."""
    with Relay(line) as relay:
        python = [sys.executable, "-c"]
        receiver = subprocess.Popen(relay.command(0, *python, _RECEIVE, ADDRESSES[0]), stdout=subprocess.PIPE)
        assert receiver.stdout is not None
        receiver.stdout.readline()
        sender = subprocess.run(relay.command(1, *python, _SEND, ADDRESSES[0]), check=True, capture_output=True)
        receiver.wait()
        one_byte_s, many_s = map(float, sender.stdout.split())
        print(f"one byte there and back, with a new connection: {1e3 * one_byte_s:.0f} ms")
        print(f"20 MB: {many_s:.2f} s, {160 / many_s:.0f} Mbit/s; carried {carried(relay.counts):,} bytes")


def main() -> None:
    """Carry frames between open files, for a `Relay`; or try a line out."""
    if len(sys.argv) == 1:
        reason = why_not()
        print(reason or "100 Mbit/s, 50 ms each way:")
        if reason is None:
            try_out(Line(100e6 / 8, 0.05))
        return
    first, second, rate, delay, counts = sys.argv[1:]
    carry((int(first), int(second)), Line(float(rate), float(delay)), Path(counts))


if __name__ == "__main__":
    main()

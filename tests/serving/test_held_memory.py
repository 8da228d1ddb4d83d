"""What a server holds while it is attacked, by the resident memory of a process: bounded by its memory budget."""

from __future__ import annotations

import contextlib
import re
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import orjson
import pytest

from stoker.serving.grpc import inference_pb2
from stoker.serving.service import InFlight, RequestLimits, ServerContext
from tests.serving.fakes import FakeService
from tests.serving.held import BODY_BYTES, BUDGET_BYTES, MIB
from tests.serving.running import running

ALLOWED_BYTES = 2 * BUDGET_BYTES + 16 * MIB
"""Growth that is allowed: the budget twice, once for what gRPC's library holds, and what allocators keep."""
CHUNKED = b"Host: x\r\nTransfer-Encoding: chunked\r\n\r\n"
LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"


@dataclass(frozen=True)
class Attacked:
    """A server in a process of its own."""

    process: subprocess.Popen[str]
    http: tuple[str, int]
    grpc: str

    def resident_bytes(self) -> int:
        """What it holds now."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        match = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert match
        return int(match[1]) * 1024

    def connect(self) -> socket.socket:
        """A connection to its HTTP door."""
        return socket.create_connection(self.http, timeout=60)

    def is_alive(self) -> bool:
        """Whether it answers a question after health."""
        with self.connect() as client:
            client.sendall(LIVE)
            return client.recv(1000).startswith(b"HTTP/1.1 200")


@pytest.fixture
def server() -> Iterator[Attacked]:
    """A server with a budget of 16 MiB, bodies of 4 MiB."""
    command = [sys.executable, "-m", "tests.serving.held"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdin
        http, grpc_address = process.stdout.readline().split()
        host, port = http.split(":")
        yield Attacked(process, (host, int(port)), grpc_address)
        process.stdin.close()
        process.wait(60)


def pushed(client: socket.socket, piece: bytes, most_bytes: int) -> int:
    """Send a piece again and again, until the server hangs up or so much was sent; how many bytes were."""
    sent = 0
    with contextlib.suppress(OSError):
        while sent < most_bytes:
            client.sendall(piece)
            sent += len(piece)
    return sent


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"POST /v2/models/digits/infer HTTP/1.1\r\n" + CHUNKED + b"2\r\n{}\r\n0\r\n", b"a: b\r\n" * 20_000),
        (b"GET /v2/health/live HTTP/1.1\r\n" + CHUNKED + b"0\r\n", b"a: b\r\n" * 20_000),
        (b"POST /v2/models/digits/infer HTTP/1.1\r\n" + CHUNKED + b"2\r\n{}\r\n0\r\nx: ", b"y" * MIB),
        (b"POST /v2/models/digits/infer HTTP/1.1\r\n" + CHUNKED, b"2;" + b"e" * MIB),
        (b"GET / HTTP/1.1\r\n", b"a:\r\n" * 200_000),
    ],
    ids=["trailers", "trailers of a page without a body", "one endless trailer", "a chunk's extension", "headers"],
)
def test_trailers_and_headers_are_cut(server: Attacked, begin: bytes, piece: bytes) -> None:
    """Whatever is neither body nor needed is refused after some kilobytes, and not kept before."""
    before = server.resident_bytes()
    with server.connect() as client:
        client.sendall(begin)
        assert pushed(client, piece, 64 * MIB) < 64 * MIB
        assert server.resident_bytes() - before < 8 * MIB
    assert server.is_alive()


def test_tiny_chunks_take_what_they_carry(server: Attacked) -> None:
    """A body of two bytes a chunk is held in one buffer."""
    before = server.resident_bytes()
    with server.connect() as client:
        client.sendall(b"POST /v2/models/digits/infer HTTP/1.1\r\n" + CHUNKED)
        pushed(client, b"2\r\nab\r\n" * 50_000, 3 * MIB // 2 * 7)
        assert server.is_alive()
        assert server.resident_bytes() - before < 16 * MIB


def test_requests_that_wait_for_others_are_few(server: Attacked) -> None:
    """A client that asks without end and reads nothing is cut off; each short request took kilobytes."""
    before = server.resident_bytes()
    with contextlib.ExitStack() as clients:
        for _ in range(8):
            client = clients.enter_context(server.connect())
            pushed(client, LIVE * 5000, 4 * MIB)
        assert server.resident_bytes() - before < ALLOWED_BYTES
    assert server.is_alive()


def test_a_body_without_a_key_is_not_kept(server: Attacked) -> None:
    """The key is checked before the body is gathered."""
    before = server.resident_bytes()
    head = f"POST /v2/models/digits/infer HTTP/1.1\r\nHost: x\r\nX-Api-Key: no\r\nContent-Length: {BODY_BYTES}\r\n\r\n"
    with contextlib.ExitStack() as clients:
        for _ in range(20):
            client = clients.enter_context(server.connect())
            client.sendall(head.encode())
            assert client.recv(1000).startswith(b"HTTP/1.1 401")
            pushed(client, bytes(MIB), BODY_BYTES - MIB)
        assert server.resident_bytes() - before < 16 * MIB
    assert server.is_alive()


def test_answers_that_nobody_reads_are_counted(server: Attacked) -> None:
    """Sixty clients ask for 3 MiB each and read nothing: what has no room is refused, and memory stays."""
    tensor = {"name": "x", "shape": [1, 750_000], "datatype": "FP32", "parameters": {"binary_data_size": 3_000_000}}
    text = orjson.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}})
    head = (
        "POST /v2/models/echo-fp32/infer HTTP/1.1\r\nHost: x\r\n"
        f"Inference-Header-Content-Length: {len(text)}\r\nContent-Length: {len(text) + 3_000_000}\r\n\r\n"
    )
    before = server.resident_bytes()
    statuses = []
    with contextlib.ExitStack() as clients:
        for _ in range(60):
            client = socket.socket()
            clients.enter_context(client)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(60)
            client.connect(server.http)
            client.sendall(head.encode() + text + bytes(3_000_000))
            statuses.append(client.recv(12)[9:12])
        assert server.resident_bytes() - before < ALLOWED_BYTES
        assert {b"200", b"429"} == set(statuses)
    assert server.is_alive()


def test_connections_have_a_cap(server: Attacked) -> None:
    """Of one address as well; those over it are refused with the reason, and those within it are answered."""
    with contextlib.ExitStack() as clients:
        mine = [clients.enter_context(server.connect()) for _ in range(160)]
        until = time.monotonic() + 60
        while len(refused := select.select(mine, [], [], 0)[0]) < 10:
            assert time.monotonic() < until, len(refused)
            time.sleep(0.01)
        time.sleep(0.2)
        assert len(refused := select.select(mine, [], [], 0)[0]) == 10
        assert refused[0].recv(1000).startswith(b"HTTP/1.1 503")
        mine[0].sendall(LIVE)
        assert mine[0].recv(1000).startswith(b"HTTP/1.1 200")


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _literal(prefix: bytes, value: bytes) -> bytes:
    return prefix + bytes([len(value)]) + value


class HalfMessages:
    """A client of HTTP/2 that opens calls of a method and sends parts of their messages, as flow control lets it.

    Args:
        address: `host:port`.
        method: of the inference service.
        announced: bytes that each message is said to have.
        begin: what each message begins with; zeros follow.
    """

    def __init__(self, address: str, method: bytes, announced: int, begin: bytes = b"") -> None:
        host, port = address.split(":")
        self._socket = socket.create_connection((host, int(port)), timeout=60)
        self._socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0, b""))
        self._headers = (
            b"\x83\x86"
            + _literal(b"\x04", b"/inference.GRPCInferenceService/" + method)
            + _literal(b"\x01", b"x")
            + b"\x00\x02te\x08trailers"
            + _literal(b"\x0f\x10", b"application/grpc")
        )
        self._first = b"\x00" + struct.pack(">I", announced) + begin
        self._window = self._initial = 65535
        self._windows: dict[int, int] = {}
        self._buffer = b""
        self.closed: set[int] = set()

    def open(self, number: int) -> None:
        """Open so many calls."""
        self.pump(0.2)
        for index in range(number):
            stream = 2 * index + 1
            self._windows[stream] = self._initial - len(self._first)
            self._window -= len(self._first)
            self._socket.sendall(_frame(1, 4, stream, self._headers) + _frame(0, 0, stream, self._first))

    def push(self, most_bytes: int) -> int:
        """Send as much of each message as may be sent, and at most so much; how much was sent in all."""
        sent = dict.fromkeys(self._windows, 0)
        idle = 0
        while idle < 10:
            self.pump(0.0)
            is_moving = False
            for stream, window in self._windows.items():
                size = min(window, self._window, most_bytes - sent[stream], 16384)
                if size > 0 and stream not in self.closed:
                    self._socket.sendall(_frame(0, 0, stream, bytes(size)))
                    self._windows[stream] -= size
                    self._window -= size
                    sent[stream] += size
                    is_moving = True
            idle = 0 if is_moving else idle + 1
            if not is_moving:
                self.pump(0.05)
        return sum(sent.values())

    def pump(self, wait_s: float) -> None:
        """Read what the server says."""
        while select.select([self._socket], [], [], wait_s)[0]:
            data = self._socket.recv(65536)
            assert data, "the server hung up"
            self._buffer += data
            while len(self._buffer) >= 9:
                size = int.from_bytes(self._buffer[:3], "big")
                if len(self._buffer) < 9 + size:
                    break
                kind, flags = self._buffer[3], self._buffer[4]
                stream = int.from_bytes(self._buffer[5:9], "big") & 0x7FFFFFFF
                self._taken(kind, flags, stream, self._buffer[9 : 9 + size])
                self._buffer = self._buffer[9 + size :]
            wait_s = 0.0

    def wait_for_end(self) -> None:
        """Take nothing of what is answered until the server hangs up; TimeoutError if it does not within 20 s."""
        with contextlib.suppress(ConnectionError):
            while self._socket.recv(65536):
                pass

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def _taken(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == 4 and not flags & 1:
            for start in range(0, len(payload), 6):
                name, value = struct.unpack(">HI", payload[start : start + 6])
                if name == 4:
                    self._initial = value
            self._socket.sendall(_frame(4, 1, 0, b""))
        elif kind == 8:
            grown = int.from_bytes(payload, "big")
            if stream == 0:
                self._window += grown
            elif stream in self._windows:
                self._windows[stream] += grown
        elif kind == 6 and not flags & 1:
            self._socket.sendall(_frame(6, 1, 0, payload))
        elif kind == 3 or (kind == 1 and flags & 1):
            self.closed.add(stream)


@pytest.mark.parametrize("method", [b"ModelInfer", pytest.param(b"ModelStreamInfer", marks=pytest.mark.slow)])
def test_half_messages_of_grpc_are_bounded(server: Attacked, method: bytes) -> None:
    """A hundred calls that send 3.9 of 4 MiB and wait: most are refused, the rest fit; others are answered."""
    before = server.resident_bytes()
    client = HalfMessages(server.grpc, method, BODY_BYTES - 100)
    client.open(100)
    client.push(BODY_BYTES - 200)
    grown = server.resident_bytes() - before
    assert grown < ALLOWED_BYTES, f"{grown / MIB:.0f} MiB"
    with grpc.insecure_channel(server.grpc) as channel:
        live = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
        assert live(b"", timeout=60) == inference_pb2.ServerLiveResponse(live=True).SerializeToString()
    client.close()
    assert server.is_alive()


@pytest.mark.parametrize("method", [b"ModelInfer", b"ModelStreamInfer"])
def test_who_does_not_read_an_answer_of_grpc_is_hung_up_on(method: bytes) -> None:
    """Flow control holds most of a large answer back: its connection is closed, what it took given back, others stay.

    The client reads the socket, but never lets the server send more than the first window.
    """
    num = 100_000
    asked = inference_pb2.ModelInferRequest(model_name="echo-fp32", raw_input_contents=[bytes(4 * num)])
    asked.inputs.add(name="x", datatype="FP32", shape=[1, num])
    raw = asked.SerializeToString()
    limits = RequestLimits(body_bytes=BODY_BYTES, body_s=1.0, least_bytes_per_s=10**9)
    edge = ServerContext(service=FakeService(), limits=limits, in_flight=InFlight(BUDGET_BYTES))
    with running(edge) as where, grpc.insecure_channel(where.grpc) as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        assert len(infer(raw, timeout=60)) > 4 * num
        client = HalfMessages(where.grpc, method, len(raw), begin=raw[: -4 * num])
        client.open(1)
        assert client.push(4 * num) == 4 * num
        assert edge.in_flight.num_bytes > 4 * num
        client.wait_for_end()
        client.close()
        while edge.in_flight.num_bytes:  # gRPC ends the call a moment later
            time.sleep(0.01)
        assert len(infer(raw, timeout=60)) > 4 * num

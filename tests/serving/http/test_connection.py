"""What arrives on a socket: malformed, endless, slow, in pieces, several at once, gone."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import select
import socket
import threading
import time
from collections.abc import Iterator
from typing import Self

import orjson
import pytest

from stoker.serving.service import AccessEntry, InFlight, RequestLimits, ServerContext
from tests.serving.fakes import FakeService
from tests.serving.running import Running, running

LIMITS = RequestLimits(body_bytes=100_000, header_bytes=4096, body_s=0.3, header_s=0.3, linger_s=0.3)
BODY = orjson.dumps({"inputs": [{"name": "image", "shape": [1, 8, 8], "datatype": "FP32", "data": [0.5] * 64}]})
LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"


def infer(body: bytes = BODY, headers: str = "", length: int | None = None) -> bytes:
    """A whole request."""
    announced = len(body) if length is None else length
    head = f"POST /v2/models/digits/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {announced}\r\n{headers}\r\n"
    return head.encode() + body


@pytest.fixture(scope="module")
def where() -> Iterator[Running]:
    """Both edges, with limits that are soon reached."""
    with running(ServerContext(service=FakeService(), limits=LIMITS)) as found:
        yield found


class Client:
    """A socket that reads answers one by one."""

    def __init__(self, where: Running) -> None:
        self.socket = socket.create_connection(where.address, timeout=60)
        self._received = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> Client:
        self.socket.sendall(data)
        return self

    def answer(self, *, has_body: bool = True) -> tuple[int, dict[str, str], bytes]:
        """The next answer: status, headers, body."""
        while b"\r\n\r\n" not in self._received:
            self._more()
        head, _, self._received = self._received.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        length = int(headers["content-length"]) if has_body else 0
        while len(self._received) < length:
            self._more()
        body, self._received = self._received[:length], self._received[length:]
        return int(first.split(" ")[1]), headers, body

    def _more(self) -> None:
        data = self.socket.recv(65536)
        assert data, f"the connection was closed after {self._received!r}"
        self._received += data

    def is_closed(self) -> bool:
        """Wait until the server closes."""
        return self.socket.recv(65536) == b""


def test_a_connection_answers_again_and_again(where: Running) -> None:
    """Kept alive; HEAD has the headers alone; an error that is the request's does not end it."""
    with Client(where) as client:
        for request, status in ((LIVE, 200), (infer(), 200), (infer(b"{"), 400), (infer(), 200)):
            assert client.send(request).answer()[0] == status
        status, headers, _ = client.send(LIVE.replace(b"GET", b"HEAD")).answer(has_body=False)
        assert (status, headers["content-length"]) == (200, str(len(b'{"live":true}')))
        assert client.send(LIVE).answer()[2] == b'{"live":true}'


def test_requests_sent_together_are_answered_in_order(where: Running) -> None:
    """Pipelining, and bodies in chunks."""
    chunked = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (BODY[:50], BODY[50:], b""))
    head = b"POST /v2/models/digits/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with Client(where) as client:
        client.send(infer() + LIVE + head + chunked + LIVE)
        bodies = [client.answer()[2] for _ in range(4)]
    assert [b"outputs" in body for body in bodies] == [True, False, True, False]


def test_a_request_may_come_byte_by_byte(where: Running) -> None:
    """However it is cut."""
    with Client(where) as client:
        client.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in LIVE:
            client.send(bytes([byte]))
        assert client.answer()[0] == 200


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /v2 HTTP/9.9\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\nno colon here\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcde",
        b"POST /v2 HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v2 HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused_and_ends_the_connection(where: Running, data: bytes) -> None:
    """In JSON as everything else; two lengths, or a length and chunks, never leave it open where a request ends."""
    with Client(where) as client:
        status, headers, body = client.send(data).answer()
        assert status in {400, 404, 405}
        assert json.loads(body)["error"]
        if status == 400:
            assert headers["connection"] == "close"
            assert client.is_closed()


@pytest.mark.parametrize(
    "data",
    [
        b"GET /v2 HTTP/1.1\r\nX: " + b"a" * 5000 + b"\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\nX: " + b"a" * 5000,
        b"GET /v2 HTTP/1.1\r\n" + b"".join(b"X%d: y\r\n" % number for number in range(1000)),
        b"GET /" + b"v" * 5000,
        infer(headers="X: " + "a" * 5000 + "\r\n") + LIVE,
    ],
)
def test_endless_headers_are_cut(where: Running, data: bytes) -> None:
    """However they are long: the path, one header, many; what follows is not looked at."""
    with Client(where) as client:
        status, headers, body = client.send(data).answer()
        assert (status, headers["connection"]) == (431, "close")
        assert json.loads(body) == {"error": "the headers have more than 4.0 KiB"}
        assert client.is_closed()


def test_headers_that_do_not_come_are_not_waited_for(where: Running) -> None:
    """A client that says nothing is hung up on; one that began gets an error."""
    with Client(where) as silent, Client(where) as slow:
        slow.send(LIVE[:20])
        status, _, body = slow.answer()
        assert status == 408
        assert json.loads(body)["error"] == "the headers did not arrive within 300 ms"
        assert slow.is_closed()
        assert silent.is_closed()


def test_the_second_requests_headers_have_a_limit_as_well(where: Running) -> None:
    """A connection that answered before is no exception."""
    with Client(where) as client:
        assert client.send(LIVE).answer()[0] == 200
        assert client.send(LIVE[:20]).answer()[0] == 408


def test_a_body_that_does_not_come_is_not_waited_for(where: Running) -> None:
    """The client has its answer and loses its connection."""
    with Client(where) as client:
        status, headers, body = client.send(infer(length=5000)).answer()
        assert (status, headers["connection"]) == (408, "close")
        assert "did not arrive within 300 ms" in json.loads(body)["error"]
        assert client.is_closed()


def test_a_giant_body_is_refused_and_its_client_can_read_so(where: Running) -> None:
    """What is still sent is thrown away, so that the answer is read; the next request is answered."""
    giant = bytes(1_000_000)
    with Client(where) as client:
        client.send(infer(giant))
        status, _, body = client.answer()
        assert (status, "takes 97.7 KiB" in json.loads(body)["error"]) == (413, True)
        assert client.send(LIVE).answer()[0] == 200


def test_a_giant_body_that_never_ends_is_left(where: Running) -> None:
    """It is thrown away for so long, and no longer."""
    with Client(where) as client:
        assert client.send(infer(b"", length=10**15)).answer()[0] == 413
        assert client.is_closed()


def test_who_expects_a_word_before_sending_gets_it(where: Running) -> None:
    """`Expect: 100-continue`: curl asks with it before it sends a large body."""
    with Client(where) as client:
        client.send(infer(b"", headers="Expect: 100-continue\r\n", length=len(BODY)))
        assert client.socket.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert client.send(BODY).answer()[0] == 200


@pytest.mark.parametrize(
    ("refused", "status"),
    [
        (b"no request\r\n\r\n", 400),
        (b"GET /v2 HTTP/1.1\r\nX: " + b"a" * 5000, 431),
        (b"GET /v2 HTTP/1.1\r\nX: ", 408),
        (LIVE * 70, 429),
        (b"POST /v2 HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
    ],
    ids=["no HTTP", "long headers", "late headers", "too many", "no chunk"],
)
def test_a_refusal_comes_after_the_answers_to_earlier_requests(refused: bytes, status: int) -> None:
    """A client that sends several at once takes answers by their order: what it sent before has its own."""
    service = FakeService(hold=asyncio.Event())
    edge = ServerContext(service=service, limits=LIMITS)
    with running(edge) as found, Client(found) as client:
        client.send(infer() + refused)
        assert select.select([client.socket], [], [], 0.4) == ([], [], [])
        found.do(service.hold.set)
        statuses = [client.answer()[0] for _ in range(2 if status != 429 else 66)]
        assert statuses == [200] * (len(statuses) - 1) + [status]
        assert client.is_closed()
    assert edge.in_flight.num_bytes == 0


def test_a_client_that_goes_away_takes_its_request_along() -> None:
    """The service's wait is cancelled, the log has it, and others are answered on."""
    lines: list[AccessEntry] = []
    service, was_logged = FakeService(hold=asyncio.Event()), threading.Event()

    def log(line: AccessEntry) -> None:
        lines.append(line)
        was_logged.set()

    with running(ServerContext(service=service, log=log)) as where:
        with Client(where) as client:
            client.send(infer())
            asyncio.run_coroutine_threadsafe(service.held.wait(), where.loop).result(60)
        asyncio.run_coroutine_threadsafe(service.cancelled.wait(), where.loop).result(60)
        assert was_logged.wait(60)
        assert [(line.status, line.reason) for line in lines] == [(499, "cancelled")]
        with Client(where) as another:
            assert another.send(LIVE).answer()[0] == 200


def test_another_protocol_is_not_offered(where: Running) -> None:
    """Who asks for an upgrade gets an answer in HTTP/1.1 and then no more; with a body it is refused."""
    upgrade = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAA\r\n"
    with Client(where) as client:
        client.send(LIVE.replace(b"\r\n\r\n", b"\r\n" + upgrade.encode() + b"\r\n"))
        assert client.answer()[0] == 200
        assert client.is_closed()
    with Client(where) as client:
        status, _, body = client.send(infer(headers=upgrade)).answer()
        assert (status, "without Upgrade" in json.loads(body)["error"]) == (400, True)
        assert client.is_closed()


def test_a_client_that_does_not_read_is_dropped(where: Running) -> None:
    """Its answer does not stay in memory; others are answered in that time."""
    big = infer(b"", headers="", length=90_000)
    with Client(where) as client:
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        tensor = {"name": "x", "shape": [1, 22_000], "datatype": "FP32", "parameters": {"binary_data_size": 88_000}}
        text = orjson.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}})
        body = text + bytes(88_000)
        head = big.replace(b"digits", b"echo-fp32").replace(b"90000", b"%d" % len(body))
        asked = head.replace(b"Host: x", b"Host: x\r\nInference-Header-Content-Length: %d" % len(text)) + body
        gone = select.poll()
        gone.register(client.socket, 0)
        client.socket.setblocking(False)
        try:
            while not gone.poll(0):  # asks on and on and reads nothing, until it is hung up on
                select.select([], [client.socket], [], 20)
                client.socket.send(asked)
        except ConnectionError:
            pass
        assert gone.poll(0)
    with Client(where) as another:
        assert another.send(LIVE).answer()[0] == 200


@pytest.mark.parametrize(
    "request_",
    [b"GET /v2/health/live HTTP/1.0\r\n\r\n", LIVE.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")],
)
def test_who_wants_the_connection_closed_has_it_closed(where: Running, request_: bytes) -> None:
    """HTTP/1.0, and a client that says so; the answer says so too."""
    with Client(where) as client:
        status, headers, body = client.send(request_).answer()
        assert (status, headers["connection"], body) == (200, "close", b'{"live":true}')
        assert client.is_closed()


def test_an_answer_comes_whole(where: Running) -> None:
    """Head and body are written at once: no client waits for the second of two packets."""
    with Client(where) as client:
        for _ in range(20):
            client.send(LIVE)
            assert client.socket.recv(65536).endswith(b'\r\n\r\n{"live":true}')


def test_a_client_that_asks_nothing_more_is_hung_up_on() -> None:
    """After as long as a connection is kept, counted from the last answer; one whose answer takes longer is not."""
    service = FakeService(hold=asyncio.Event())
    edge = ServerContext(service=service, limits=RequestLimits())
    with running(edge, timeout_keep_alive=0.2) as found, Client(found) as idle, Client(found) as waiting:
        waiting.send(infer())
        for _ in range(3):
            began = time.monotonic()
            assert idle.send(LIVE).answer()[0] == 200
        assert idle.is_closed()
        assert time.monotonic() - began > 0.19  # libuv counts whole milliseconds
        assert select.select([waiting.socket], [], [], 0.1) == ([], [], [])
        found.do(service.hold.set)
        assert waiting.answer()[0] == 200
        assert waiting.is_closed()


def test_bodies_are_bounded_together() -> None:
    """While one client holds most of what there may be, another is refused; afterwards it is not; nothing is left."""
    edge = ServerContext(service=FakeService(), limits=LIMITS, in_flight=InFlight(100_000))
    half = b"x" * 60_000
    with running(edge) as found, Client(found) as first, Client(found) as second:
        first.send(infer(half, length=60_001))
        while edge.in_flight.num_bytes < len(half):
            threading.Event().wait(0.001)
        status, headers, body = second.send(infer(half)).answer()
        assert (status, headers["retry-after"]) == (429, "1")
        assert re.search(rb"holds [\d.]+ KiB of requests, of 97.7 KiB", body)  # with what came of the second one
        assert first.send(b"x").answer()[0] == 400  # it was whole, and no JSON
        with Client(found) as third:
            assert third.send(infer(half)).answer()[0] == 400
            third.send(infer(half, length=60_001))
        while edge.in_flight.num_bytes:  # of the one who left as well
            threading.Event().wait(0.001)


def test_a_body_that_unpacks_to_too_much_is_bounded_as_well() -> None:
    """Small on the wire, it counts as what it becomes."""
    edge = ServerContext(service=FakeService(), limits=LIMITS, in_flight=InFlight(50_000))
    packed = gzip.compress(b"x" * 90_000)
    with running(edge) as found, Client(found) as client:
        assert client.send(infer(packed, "Content-Encoding: gzip\r\n")).answer()[0] == 429
        assert client.send(infer(gzip.compress(BODY), "Content-Encoding: gzip\r\n")).answer()[0] == 200
        assert edge.in_flight.num_bytes == 0

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import BadJob, ServiceError
from stoker.loadtesting.http_connection import Address, HttpAnswer, address_of, ask, closes, parse
from tests.loadtesting.servers import OK, REQUEST, served

SIZED = b"HTTP/1.1 503 Busy\r\ncontent-LENGTH: 5\r\nConnection: close\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;x=1\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"
AFTER_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n" + OK
EMPTY = b"HTTP/1.1 204 No Content\r\nServer: x\r\n\r\n"


@pytest.mark.parametrize(
    ("received", "status", "body"),
    [(SIZED, 503, b"hello"), (CHUNKED, 200, b"hello"), (AFTER_CONTINUE, 200, b"ok"), (EMPTY, 204, b"")],
)
def test_an_answer_is_whole_with_its_last_byte(received: bytes, status: int, body: bytes) -> None:
    """Cut anywhere before, there is none yet; whole, its status and body are right."""
    answer = parse(received)
    assert answer is not None
    assert (answer.status, answer.body) == (status, body)
    assert all(parse(received[:end]) is None for end in range(len(received) - 2))


@given(st.binary(max_size=200))
def test_no_bytes_break_the_parser(received: bytes) -> None:
    """Whatever comes is an answer, none yet, or reported as no HTTP."""
    try:
        assert parse(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + received) is None or b"0" in received
        parse(received)
    except ServiceError as error:
        assert "answer" in error.message  # noqa: PT017 - either outcome is right


def test_a_closing_answer_is_noticed() -> None:
    """By its header, or as HTTP/1.0; others keep the connection."""
    closing, open_ = parse(SIZED), parse(OK)
    assert closing is not None
    assert open_ is not None
    assert closes(closing)
    assert not closes(open_)
    assert closes(HttpAnswer(200, b"HTTP/1.0 200 OK\r\n\r\n", b""))


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://127.0.0.1:8000", Address("127.0.0.1", 8000)),
        ("localhost:9", Address("localhost", 9)),
        ("http://[::1]:80/a/", Address("::1", 80, "/a")),
    ],
)
def test_urls_are_addresses(url: str, address: Address) -> None:
    """With a scheme or without, with a path before all others or without."""
    assert address_of(url) == address


@pytest.mark.parametrize("url", ["https://x", "ftp://x", "http://", "http://x:99999", "http://x:y"])
def test_what_cannot_be_asked_is_refused(url: str) -> None:
    """The text names the URL."""
    with pytest.raises(BadJob, match="http"):
        address_of(url)


def test_asking_gets_the_answer_or_says_why_not() -> None:
    """One request over a socket; then the port is closed."""

    async def answer(body: bytes) -> bytes:
        return SIZED if body == b"what" else OK

    with served(answer) as address:
        assert ask(address, REQUEST).body == b"hello"
    with pytest.raises(ServiceError, match="does not answer"):
        ask(address, REQUEST)

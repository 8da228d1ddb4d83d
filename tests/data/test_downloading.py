from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from stoker.data.idx_files import fetch


class Answers(BaseHTTPRequestHandler):
    """A server of one file, one that breaks off, and nothing else."""

    def do_GET(self) -> None:
        if self.path not in ("/whole", "/broken"):
            self.send_error(404, "Not Found")
            return
        self.send_response(200)
        self.send_header("Content-Length", "5" if self.path == "/whole" else "500")
        self.end_headers()
        self.wfile.write(b"bytes")

    def log_message(self, *_args) -> None:
        """Say nothing."""


@pytest.fixture
def home():
    """The address of a server on this machine."""
    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def fetched(url: str, *, at_most_bytes: int = 100) -> bytes:
    """What a patient user gets."""
    return fetch(url, at_most_bytes=at_most_bytes, silence_s=5.0, total_s=30.0)


def test_a_file_comes_whole(home):
    """The bytes that the server sent."""
    assert fetched(f"{home}/whole", at_most_bytes=5) == b"bytes"


@pytest.mark.parametrize(
    ("path", "at_most_bytes", "complaint"),
    [
        ("absent", 100, r"HTTP status 404 \(Not Found\)"),
        ("broken", 1000, "5 of 500 bytes, then broke off"),
        ("whole", 4, "more than 4 B"),
    ],
)
def test_anything_less_is_an_error_in_words(home, path, at_most_bytes, complaint):
    """No such file, a connection that broke off, more than was expected."""
    with pytest.raises(OSError, match=complaint):
        fetched(f"{home}/{path}", at_most_bytes=at_most_bytes)


def test_no_server_is_an_error_in_words():
    """Nothing listens there: said as no answer, with the system's reason."""
    with pytest.raises(OSError, match="no answer"):
        fetched("http://127.0.0.1:9/file")

from __future__ import annotations

import socket
import threading

import pytest

from stoker.training.elastic.worker import Connections


def test_who_waits_on_a_connection_of_the_block_is_freed() -> None:
    """At both ends; what was open before, and what listens, stays."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        before = socket.create_connection(address), listener.accept()[0]
        with Connections() as connections:
            within = socket.create_connection(address), listener.accept()[0]
        threading.Timer(0.05, connections.cut).start()
        assert [end.recv(1) for end in within] == [b"", b""]
        with pytest.raises(OSError, match="Broken pipe"):
            within[0].send(b"x")
        before[0].send(b"x")
        assert before[1].recv(1) == b"x"
        after = socket.create_connection(address), listener.accept()[0]
        connections.cut()
        after[0].send(b"x")
        assert after[1].recv(1) == b"x"
        for end in (*before, *within, *after):
            end.close()

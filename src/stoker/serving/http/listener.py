"""A socket that is bound before its server is made: a port that is taken is reported at once, and without uvicorn."""

from __future__ import annotations

import socket

from stoker.errors import BadRun


def bound_listener(host: str, port: int) -> socket.socket:
    """A socket bound to an address; port 0 takes any free one.

    Raises:
        BadRun: the port is taken, or the address is none of this machine.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as problem:
        listener.close()
        raise BadRun(
            f"cannot listen at {host}:{port}: {problem.strerror}",
            remedy="Give another port with --port (0: any free one).",
        ) from problem
    return listener

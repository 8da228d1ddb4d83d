"""Messages between the supervisor and a worker: lines of JSON over a pair of sockets."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

Message = dict[str, Any]
"""`kind`, and what belongs to it."""

_CHUNK = 1 << 16


class Channel:
    """One end of a pair of sockets. Several threads may send; one receives."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._lock = threading.Lock()
        self._begun = b""

    def fileno(self) -> int:
        """The descriptor, to be waited for."""
        return self._end.fileno()

    def send(self, kind: str, /, **fields: Any) -> bool:
        """Send a message; False if there is nobody any more who could receive it."""
        line = json.dumps({"kind": kind, **fields}).encode() + b"\n"
        try:
            with self._lock:
                self._end.sendall(line)
        except OSError:
            return False
        return True

    def pending(self) -> tuple[list[Message], bool]:
        """Whole messages that are here already, and whether more may come."""
        messages: list[Message] = []
        while True:
            try:
                chunk = self._end.recv(_CHUNK, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return messages, True
            except OSError:
                chunk = b""
            if not chunk:
                return messages, False
            messages.extend(self._whole(chunk))

    def messages(self) -> Iterator[Message]:
        """Messages as they come, until the other end is closed."""
        while True:
            try:
                chunk = self._end.recv(_CHUNK)
            except OSError:
                return
            if not chunk:
                return
            yield from self._whole(chunk)

    def close(self) -> None:
        """Close this end."""
        self._end.close()

    def _whole(self, chunk: bytes) -> list[Message]:
        *lines, self._begun = (self._begun + chunk).split(b"\n")
        return [json.loads(line) for line in lines]

"""The worker processes of one machine: started, heard, relayed and ended on the supervisor's decision.

The supervisor and a worker exchange lines of JSON over a pair of sockets (`MessageChannel`). The output of rank 0 is
shown; other workers' output only where it differs (`OutputRelay`).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

Message = dict[str, Any]
"""A `kind`, and its fields."""

_CHUNK = 1 << 16


class MessageChannel:
    """One end of a pair of sockets. Several threads may send; one receives."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._lock = threading.Lock()
        self._begun = b""

    def fileno(self) -> int:
        """File descriptor of the socket [fd], for a selector."""
        return self._end.fileno()

    def send(self, kind: str, /, **fields: Any) -> bool:
        """Send a message; False if the other end is closed."""
        line = json.dumps({"kind": kind, **fields}).encode() + b"\n"
        try:
            with self._lock:
                self._end.sendall(line)
        except OSError:
            return False
        return True

    def pending(self) -> tuple[list[Message], bool]:
        """Complete messages received so far, and whether more may come."""
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
        """Messages as they arrive, until the other end is closed."""
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


KEPT, REMEMBERED = 60, 1000
"""Lines kept of each worker, and lines shown that are recognised."""


class WorkerOutput:
    """Lines of a worker's output, read from `descriptor` without blocking."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self.last: deque[str] = deque(maxlen=KEPT)
        self._begun = b""

    def pending(self) -> tuple[list[str], bool]:
        """Complete lines so far, and whether more may come; at the end also an incomplete line."""
        chunks: list[bytes] = []
        is_open = True
        while is_open:
            try:
                chunk = os.read(self.descriptor, 1 << 16)
            except BlockingIOError:
                break
            is_open = bool(chunk)
            chunks.append(chunk)
        return self._lines(b"".join(chunks), is_open=is_open), is_open

    def rest(self) -> list[str]:
        """All remaining lines, also an incomplete one; nothing is read after this."""
        return [*self.pending()[0], *self._lines(b"", is_open=False)]

    def _lines(self, read: bytes, *, is_open: bool) -> list[str]:
        *whole, self._begun = (self._begun + read).split(b"\n")
        if not is_open and self._begun:
            whole, self._begun = [*whole, self._begun], b""
        lines = [line.decode(errors="replace") for line in whole]
        self.last.extend(lines)
        return lines


class OutputRelay:
    """Shows lines, and recognises them, so that nothing is shown twice.

    Args:
        show: receives each line; None: standard error.
    """

    def __init__(self, show: Callable[[str], None] | None = None) -> None:
        self._show = show or (lambda line: print(line, file=sys.stderr, flush=True))  # noqa: T201 - what workers print
        self._shown: deque[str] = deque(maxlen=REMEMBERED)

    def say(self, lines: Iterable[str]) -> None:
        """Show lines of rank 0."""
        for line in lines:
            self._shown.append(line)
            self._show(line)

    def add(self, title: str, lines: Iterable[str]) -> None:
        """Show another worker's lines under a title, unless all of them were shown before."""
        lines = list(lines)
        if any(line.strip() and line not in self._shown for line in lines):
            self.say([title, *lines])


MEMBER_VARIABLE = "STOKER_MEMBER"
"""Environment variable for a worker: JSON of its number, the descriptor of its channel and the store's address."""

Address = tuple[str, int]
"""Host and port."""


class WorkerProcess:
    """A process of `command`, with a channel of messages and its output.

    Args:
        number: of the worker, from 0; a restarted process has the same number.
        command: program and arguments.
        environment: variables in addition to those of this process.
        store: address of the store.
        secret: authenticates the workers of a run; sent over the channel, not through the environment.
    """

    def __init__(
        self, number: int, command: Sequence[str], environment: Mapping[str, str], store: Address, secret: str
    ) -> None:
        self.number = number
        mine, theirs = socket.socketpair()
        with theirs:
            about = {"worker": number, "descriptor": theirs.fileno(), "host": store[0], "port": store[1]}
            self._process = subprocess.Popen(
                list(command),
                env={**os.environ, **environment, MEMBER_VARIABLE: json.dumps(about)},
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        assert self._process.stdout is not None
        self.channel = MessageChannel(mine)
        self.channel.send("secret", secret=secret)
        self.printed = WorkerOutput(self._process.stdout.fileno())
        self.started_at = self.heard_at = time.monotonic()
        self.verdict: str | None = None

    @property
    def code(self) -> int | None:
        """The exit code, or the negative number of a signal; None while it runs."""
        return self._process.poll()

    @property
    def end_in_words(self) -> str:
        """Text for the end of the process: why it was killed, or its exit code with the last line that it printed."""
        code = self.code
        assert code is not None, "still running"
        last = next((line.strip() for line in reversed(self.printed.last) if line.strip()), "")
        return self.verdict or in_words(code) + (f": {last}" if code > 0 and last else "")

    @property
    def is_stopped(self) -> bool:
        """Whether the process is stopped, as by SIGSTOP."""
        with contextlib.suppress(OSError):
            state = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
            return state == "T"
        return False

    def signal(self, number: int) -> None:
        """Send a signal, if the process still runs."""
        self._process.send_signal(number)

    def kill(self, verdict: str) -> None:
        """End the process at once, for the reason `verdict`."""
        self.verdict = self.verdict or verdict
        self._process.kill()

    def close(self) -> None:
        """End the process if it still runs, and close its channel and output."""
        self._process.kill()
        self._process.wait()
        self.channel.close()
        assert self._process.stdout is not None
        self._process.stdout.close()


def in_words(code: int) -> str:
    """Text for an exit code.

    >>> in_words(-9), in_words(1)
    ('killed by SIGKILL', 'exited with 1')
    """
    if code >= 0:
        return f"exited with {code}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"


_PAUSE_S = 1.0


class WorkerPool:
    """The workers by number.

    Args:
        command: program and arguments of each.
        environment: variables for them, in addition to those of this process.
        store: address of the store.
        relay: shows what they print.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], store: Address, relay: OutputRelay
    ) -> None:
        self._command, self._environment, self._store, self._relay = command, environment, store, relay
        self._secret = secrets.token_hex(32)
        self._selector = selectors.DefaultSelector()
        self._workers: dict[int, WorkerProcess] = {}
        self._looked_at: float | None = None

    def start(self, number: int) -> None:
        """Start a process for this number."""
        worker = WorkerProcess(number, self._command, self._environment, self._store, self._secret)
        self._workers[number] = worker
        self._selector.register(worker.channel, selectors.EVENT_READ, (worker, "channel"))
        self._selector.register(worker.printed.descriptor, selectors.EVENT_READ, (worker, "printed"))

    @property
    def running(self) -> list[int]:
        """Numbers of the workers whose end has not been seen."""
        return list(self._workers)

    def send(self, worker: int, kind: str, /, **fields: Any) -> None:
        """Send a message to a worker, if it still runs."""
        if worker in self._workers:
            self._workers[worker].channel.send(kind, **fields)

    def signal(self, number: int, signal_number: int) -> None:
        """Send a signal to a worker, if it still runs."""
        if number in self._workers:
            self._workers[number].signal(signal_number)

    def kill(self, number: int, verdict: str) -> None:
        """End a worker at once, if it still runs, for the reason `verdict`."""
        if number in self._workers:
            self._workers[number].kill(verdict)

    def look(self, longest_s: float, leader: int) -> Iterator[tuple[int, Message]]:
        """Messages within `longest_s` [s], each with its worker; the output of worker `leader` is shown.

        The last one of a worker is `ended`, with `code`, `why`, running time `lasted_s`, and its last `words`: lines
        that were not shown, unless it was killed here.
        """
        ready = self._selector.select(longest_s)
        now = time.monotonic()
        if self._looked_at is not None and now - self._looked_at > longest_s + _PAUSE_S:
            for worker in self._workers.values():  # this process was stopped itself, and heard nothing
                worker.heard_at += now - self._looked_at
        self._looked_at = now
        for key, _ in ready:
            worker, what = key.data
            yield from self._receive(worker, what, leader)
        for worker in [known for known in self._workers.values() if known.code is not None]:
            yield from self._end(worker, leader)

    def silent(self, silence_s: float) -> list[tuple[int, float, bool]]:
        """Workers without a sign of life for `silence_s`: number, silence [s], and whether the process is stopped."""
        now = time.monotonic()
        return [
            (number, now - worker.heard_at, worker.is_stopped)
            for number, worker in self._workers.items()
            if now - worker.heard_at > silence_s
        ]

    def close(self) -> None:
        """End all workers that still run."""
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()
        self._selector.close()

    def _receive(
        self, worker: WorkerProcess, what: Literal["channel", "printed"], leader: int
    ) -> Iterator[tuple[int, Message]]:
        if what == "printed":
            lines, is_open = worker.printed.pending()
            if worker.number == leader:
                self._relay.say(lines)
            if not is_open:
                self._selector.unregister(worker.printed.descriptor)
            return
        messages, is_open = worker.channel.pending()
        if messages:
            worker.heard_at = time.monotonic()
        if not is_open:
            self._selector.unregister(worker.channel)
        for message in messages:
            if message["kind"] != "alive":
                yield worker.number, message

    def _end(self, worker: WorkerProcess, leader: int) -> Iterator[tuple[int, Message]]:
        """The last messages, then the end. Does not wait for the sockets: the worker's children may hold them open."""
        messages, _ = worker.channel.pending()
        for message in messages:
            if message["kind"] != "alive":
                yield worker.number, message
        lines = worker.printed.rest()
        if worker.number == leader:
            self._relay.say(lines)
        is_shown = worker.verdict is not None or worker.number == leader
        ended = {
            "code": worker.code,
            "why": worker.end_in_words,
            "lasted_s": time.monotonic() - worker.started_at,
            "words": [] if is_shown else list(worker.printed.last),
        }
        for end in (worker.channel, worker.printed.descriptor):
            if end in self._selector.get_map():
                self._selector.unregister(end)
        del self._workers[worker.number]
        worker.close()
        yield worker.number, {"kind": "ended", **ended}

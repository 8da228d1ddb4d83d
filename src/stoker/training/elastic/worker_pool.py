"""Messages between the supervisor and a worker: lines of JSON over a pair of sockets.

What workers print: one speaks for all, the others are heard only where they say something else.

A worker process, as its supervisor sees it.

The worker processes of one machine: started, heard, and seen to end. Decides nothing.
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
"""`kind`, and what belongs to it."""

_CHUNK = 1 << 16


class MessageChannel:
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


KEPT, REMEMBERED = 60, 1000
"""Lines of each worker that are kept, and lines shown that are known again."""


class WorkerOutput:
    """Lines from a worker's output.

    Args:
        descriptor: where they are read from, without waiting.
    """

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self.last: deque[str] = deque(maxlen=KEPT)
        self._begun = b""

    def pending(self) -> tuple[list[str], bool]:
        """Whole lines that are here already, and whether more may come; at the end also what has no end of line."""
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
        """All that is left, also without an end of line: nothing more will be read."""
        return [*self.pending()[0], *self._lines(b"", is_open=False)]

    def _lines(self, read: bytes, *, is_open: bool) -> list[str]:
        *whole, self._begun = (self._begun + read).split(b"\n")
        if not is_open and self._begun:
            whole, self._begun = [*whole, self._begun], b""
        lines = [line.decode(errors="replace") for line in whole]
        self.last.extend(lines)
        return lines


class OutputRelay:
    """Shows lines, and remembers which, so that the same is not said twice.

    Args:
        show: called with each line.
    """

    def __init__(self, show: Callable[[str], None] | None = None) -> None:
        self._show = show or _to_standard_error
        self._shown: deque[str] = deque(maxlen=REMEMBERED)

    def say(self, lines: Iterable[str]) -> None:
        """Show lines of the one that speaks for all."""
        for line in lines:
            self._shown.append(line)
            self._show(line)

    def add(self, title: str, lines: Iterable[str]) -> None:
        """Show lines of another one under a title, unless all of them were shown before."""
        lines = list(lines)
        if any(line.strip() and line not in self._shown for line in lines):
            self.say([title, *lines])


def _to_standard_error(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201 - what workers print belongs there


MEMBER_VARIABLE = "STOKER_MEMBER"
"""Environment variable by which a worker finds its supervisor: JSON of its number, a descriptor and the store."""

Address = tuple[str, int]
"""Host and port."""


class WorkerProcess:
    """A process of `command`, with a channel of messages and what it prints.

    Args:
        number: of the worker, from 0; a process started again in its place has the same.
        command: program and arguments.
        environment: variables beside those of this process.
        store: where the store is.
        secret: of the run, by which workers know each other; goes over the channel, not through the environment.
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
        """With what the process ended: an exit code, or the negative number of a signal; None while it runs."""
        return self._process.poll()

    @property
    def end_in_words(self) -> str:
        """What the process ended by: what it was killed for, or its code with the last line that it printed."""
        code = self.code
        assert code is not None, "still running"
        last = next((line.strip() for line in reversed(self.printed.last) if line.strip()), "")
        return self.verdict or in_words(code) + (f": {last}" if code > 0 and last else "")

    @property
    def is_stopped(self) -> bool:
        """Whether the process stands still by SIGSTOP and the like."""
        with contextlib.suppress(OSError):
            state = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
            return state == "T"
        return False

    def signal(self, number: int) -> None:
        """Send a signal, if the process still runs."""
        self._process.send_signal(number)

    def kill(self, verdict: str) -> None:
        """End the process at once; `verdict` says what for."""
        self.verdict = self.verdict or verdict
        self._process.kill()

    def close(self) -> None:
        """End the process if it still runs, and let go of everything."""
        self._process.kill()
        self._process.wait()
        self.channel.close()
        assert self._process.stdout is not None
        self._process.stdout.close()


def in_words(code: int) -> str:
    """What a process ended with.

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
    """Workers by number, of which one speaks for all.

    Args:
        command: program and arguments of each.
        environment: variables for them, beside those of this process.
        store: where the store is.
        speaker: shows what they print.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], store: Address, speaker: OutputRelay
    ) -> None:
        self._command, self._environment, self._store, self._speaker = command, environment, store, speaker
        self._secret = secrets.token_hex(32)
        self._selector = selectors.DefaultSelector()
        self._workers: dict[int, WorkerProcess] = {}
        self._looked_at: float | None = None

    def start(self, number: int) -> None:
        """Start a process in this place."""
        worker = WorkerProcess(number, self._command, self._environment, self._store, self._secret)
        self._workers[number] = worker
        self._selector.register(worker.channel, selectors.EVENT_READ, (worker, "channel"))
        self._selector.register(worker.printed.descriptor, selectors.EVENT_READ, (worker, "printed"))

    @property
    def running(self) -> list[int]:
        """Numbers of those that have not been seen to end."""
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
        """End a worker at once, if it still runs; `verdict` says what for."""
        if number in self._workers:
            self._workers[number].kill(verdict)

    def look(self, longest_s: float, leader: int) -> Iterator[tuple[int, Message]]:
        """Messages that come within a time [s], each with its worker; `leader` is the one that speaks for all.

        The last of a worker is `ended`, with its `code`, `why`, how long it had run, `lasted_s`, and its last `words`:
        lines that were not shown, unless we have killed it.
        """
        ready = self._selector.select(longest_s)
        self._forgive_pause(longest_s)
        for key, _ in ready:
            worker, what = key.data
            yield from self._heard(worker, what, leader)
        for worker in [one for one in self._workers.values() if one.code is not None]:
            yield from self._ended(worker, leader)

    def silent(self, silence_s: float) -> list[tuple[int, float, bool]]:
        """Workers without a sign of life for so long [s]: for how long [s], and whether the process was stopped."""
        now = time.monotonic()
        return [
            (number, now - worker.heard_at, worker.is_stopped)
            for number, worker in self._workers.items()
            if now - worker.heard_at > silence_s
        ]

    def close(self) -> None:
        """End whoever still runs."""
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()
        self._selector.close()

    def _forgive_pause(self, longest_s: float) -> None:
        """If this process itself stood still, it could not hear anybody."""
        now = time.monotonic()
        if self._looked_at is not None and now - self._looked_at > longest_s + _PAUSE_S:
            for worker in self._workers.values():
                worker.heard_at += now - self._looked_at
        self._looked_at = now

    def _heard(
        self, worker: WorkerProcess, what: Literal["channel", "printed"], leader: int
    ) -> Iterator[tuple[int, Message]]:
        if what == "printed":
            lines, is_open = worker.printed.pending()
            self._say(worker, lines, leader)
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

    def _ended(self, worker: WorkerProcess, leader: int) -> Iterator[tuple[int, Message]]:
        """What was still under way, then the end. Its children may hold its ends open: nothing is waited for."""
        messages, _ = worker.channel.pending()
        for message in messages:
            if message["kind"] != "alive":
                yield worker.number, message
        self._say(worker, worker.printed.rest(), leader)
        is_heard = worker.verdict is not None or worker.number == leader
        ended = {
            "code": worker.code, "why": worker.end_in_words, "lasted_s": time.monotonic() - worker.started_at,
            "words": [] if is_heard else list(worker.printed.last),
        }  # fmt: skip
        for end in (worker.channel, worker.printed.descriptor):
            if end in self._selector.get_map():
                self._selector.unregister(end)
        del self._workers[worker.number]
        worker.close()
        yield worker.number, {"kind": "ended", **ended}

    def _say(self, worker: WorkerProcess, lines: list[str], leader: int) -> None:
        if worker.number == leader:
            self._speaker.say(lines)

"""A worker process, as its supervisor sees it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from stoker.launching.channel import Channel
from stoker.launching.words import Printed

MEMBER_VARIABLE = "STOKER_MEMBER"
"""Environment variable by which a worker finds its supervisor: JSON of its number, a descriptor and the store."""

Address = tuple[str, int]
"""Host and port."""


class Worker:
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
        self.channel = Channel(mine)
        self.channel.send("secret", secret=secret)
        self.printed = Printed(self._process.stdout.fileno())
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

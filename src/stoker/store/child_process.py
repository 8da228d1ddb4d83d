"""A function in a process of its own: started, listened to, ended; what goes wrong in it arrives in words.

The process begins afresh (`spawn`): it inherits no threads, locks or CUDA context, and imports the function again. It
gets SIGTERM when this process ends, however that ends.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

from stoker.errors import BadJob, StokerError, first_line


@dataclass(frozen=True)
class Raised:
    """An exception in another process that is no StokerError, in words."""

    words: str


class ChildProcess:
    """A process that runs `function(*arguments)`; what that returns or raises is its last message.

    Args:
        function: can be imported by another process; with `talks` it gets a connection as its last argument, for
            messages before the last.
        arguments: of the function; pickled.
        name: of the process.
        talks: see `function`.
        cpus: numbers of the logical CPUs it may use; None: all.
        output: the file that its standard output and error are appended to; None: those of this process.

    Attributes:
        pipe: the connection to it, for `multiprocessing.connection.wait`.
        pid: its number.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        name: str,
        talks: bool = False,
        cpus: Collection[int] | None = None,
        output: Path | None = None,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, there = context.Pipe()
        self._kills = _kills_for_memory()
        self._process = context.Process(target=_run, args=(function, arguments, there, talks, cpus, output), name=name)
        self._process.start()
        self.pid = self._process.pid or 0
        there.close()

    def receive(self) -> Any:
        """Its next message: what it sent or returned, a StokerError, or `Raised`; None once it has ended."""
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionResetError):
            return None

    def answer(self, value: Any) -> None:
        """Send it a value; if it has ended, `receive` notices."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self.pipe.send(value)

    def stop(self) -> None:
        """Ask it to end, by SIGTERM."""
        self._process.terminate()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def close(self, patience_s: float | None = None) -> None:
        """Wait for its end, and release it; after `patience_s` [s] (None: never), or on an exception, it is killed."""
        self.pipe.close()
        try:
            self._process.join(patience_s)
        finally:
            if self._process.is_alive():
                self._process.kill()
                self._process.join()
            self._process.close()

    def ending(self) -> tuple[bool, str]:
        """Waits for its end: whether the system killed it for want of memory; and how it ended, in words."""
        self._process.join()
        code = self._process.exitcode
        is_for_memory = code == -signal.SIGKILL and _kills_for_memory() > self._kills
        return is_for_memory, exit_in_words(code)


def exit_in_words(code: int | None) -> str:
    """How a process ended, by its exit code as `multiprocessing` gives it.

    >>> exit_in_words(7), exit_in_words(-9)
    ('ended with exit code 7', 'was killed by SIGKILL')
    """
    code = code or 0
    return f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"


def require_picklable(function: Callable[..., Any]) -> None:
    """Refuse a function that no other process can be given.

    Raises:
        BadJob: it cannot be pickled.
    """
    try:
        pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError) as problem:
        raise BadJob(
            f"{function} cannot be given to another process: {first_line(problem)}",
            remedy="Define it at the top of a module, or put the job into a file with a function `job`.",
        ) from problem


def _kills_for_memory() -> int:
    """Number of processes that the kernel has killed for want of memory [processes]; 0 where it is unknown.

    Source: Linux kernel, mm/vmstat.c: `oom_kill` counts those of control groups too.
    """
    try:
        lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def _run(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    pipe: connection.Connection,
    talks: bool,  # noqa: FBT001 - arguments of a process are positional
    cpus: Collection[int] | None,
    output: Path | None,
) -> None:
    """The process: settle on its CPUs before anything counts them, run the function, send how that ended."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if output is not None:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number in (1, 2):
            os.dup2(descriptor, number)
        os.close(descriptor)
    if cpus is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cpus)
    try:
        last = function(*arguments, pipe) if talks else function(*arguments)
    except StokerError as error:
        # A subclass may take other arguments than it keeps: the nearest class of `stoker.errors` surely travels.
        kind = next(base for base in type(error).__mro__ if base.__module__ == "stoker.errors")
        last = kind(error.message, remedy=error.remedy)
    except Exception as error:  # noqa: BLE001 - it goes to the process that asked
        traceback.print_exc()
        last = Raised(f"{type(error).__name__}: {first_line(error)}")
    with suppress(BrokenPipeError, ConnectionResetError):  # that one may listen no more
        pipe.send(last)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)

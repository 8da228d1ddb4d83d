"""A supervisor in a thread of the test, and what it tells."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from stoker.launching import Supervisor

WORKER = Path(__file__).with_name("worker.py")
LONGEST_S = 60.0
"""Longest that anything is waited for [s]; nothing takes nearly so long unless it fails."""


@dataclass
class Told:
    """What a supervisor told, in order; `lines` are events of members, `shown` what workers printed."""

    folder: Path
    supervisor: Supervisor | None = None
    lines: list[dict[str, Any]] = field(default_factory=list)
    news: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)
    code: int | None = None
    problem: BaseException | None = None

    def of(self, kind: str) -> list[dict[str, Any]]:
        """News of one kind."""
        return [fields for one, fields in self.news if one == kind]

    def updates(self, generation: int) -> list[int]:
        """Updates told by a generation's rank 0."""
        return [one["update"] for one in self.lines if one["kind"] == "update" and one["generation"] == generation]

    def wait(self, is_so: Callable[[], object]) -> None:
        """Wait until something is so, or the run is over."""
        until = time.monotonic() + LONGEST_S
        while not is_so() and self.code is None and self.problem is None:
            assert time.monotonic() < until, (self.news, self.lines[-3:], self.shown)
            time.sleep(0.005)
        assert is_so(), (self.code, self.problem, self.news, self.lines[-3:], self.shown)

    def pid(self, worker: int) -> int:
        """The process id that a worker has now."""
        return int((self.folder / f"pid-of-{worker}").read_text(encoding="utf-8"))

    def signal(self, worker: int, number: signal.Signals) -> None:
        """Send a worker a signal from outside."""
        os.kill(self.pid(worker), number)

    def over(self) -> bool:
        """Whether the run is."""
        return self.code is not None or self.problem is not None


@contextmanager
def apart(folder: Path, *arguments: object, workers: int) -> Iterator[tuple[int, TextIO]]:
    """A supervisor in the main thread of a process of its own, which leads a process group; its id, and what it tells.

    The process is forked, since a fresh one would import PyTorch for seconds. It has made updates when the block
    begins, and is ended with its group after it.
    """
    mine, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        told_to = os.fdopen(theirs, "w", encoding="utf-8")
        command = [sys.executable, str(WORKER), str(folder), *map(str, arguments)]
        supervisor = Supervisor(
            command,
            workers=workers,
            on_line=lambda line: print(line, file=told_to, flush=True),
            tell=lambda *_: None,
        )
        code = 1
        try:
            code = supervisor.run()
        finally:
            os._exit(code)
    os.close(theirs)
    with os.fdopen(mine, encoding="utf-8") as told:
        while json.loads(told.readline())["kind"] != "update":
            pass
        try:
            yield pid, told
        finally:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


@contextmanager
def supervised(folder: Path, *arguments: object, script: Path = WORKER, **settings: Any) -> Iterator[Told]:
    """Run workers in a thread; all of them are ended after the block."""
    told = Told(folder)
    command = [sys.executable, str(script), str(folder), *map(str, arguments)]
    supervisor = told.supervisor = Supervisor(
        command,
        on_line=lambda line: told.lines.append(json.loads(line)),
        tell=lambda kind, fields: told.news.append((kind, fields)),
        show=told.shown.append,
        **settings,
    )

    def run() -> None:
        try:
            told.code = supervisor.run()
        except BaseException as problem:  # noqa: BLE001 - looked at by the test
            told.problem = problem

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield told
    finally:
        supervisor.stop(signal.SIGINT)
        supervisor.stop(signal.SIGINT)
        thread.join(LONGEST_S)
    assert not thread.is_alive()

"""A supervisor in a thread of the test, and what it reports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import pytest

from stoker.training.elastic.supervisor import Supervisor
from tests.forked import Forked, forked_by_nursery

WORKER = Path(__file__).with_name("worker.py")
LONGEST_S = 60.0
"""Longest that anything is waited for [s]; nothing takes nearly so long unless it fails."""


@dataclass
class Told:
    """What a supervisor reported, in order; `lines` are events of members, `shown` what workers printed."""

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
        """Updates reported by a generation's rank 0."""
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
def apart(folder: Path, *arguments: object, workers: int) -> Iterator[tuple[Forked, TextIO]]:
    """A supervisor in the main thread of a process of its own, which leads a process group, and what it reports.

    It has made updates when the block begins, and is ended with its group after it.
    """
    module = "tests.training.elastic.supervising"
    with (folder / "errors.txt").open("w", encoding="utf-8") as errors:
        words = [str(workers), str(folder), *map(str, arguments)]
        process = Forked(module, words, stderr=errors, env=dict(os.environ))
    try:
        while json.loads(process.stdout.readline())["kind"] != "update":
            pass
        yield process, process.stdout
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


@contextmanager
def supervised(folder: Path, *arguments: object, script: Path = WORKER, **settings: Any) -> Iterator[Told]:
    """Run workers in a thread, as forks; all of them are ended after the block."""
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
    with pytest.MonkeyPatch.context() as patch:
        given = types.SimpleNamespace(**vars(subprocess) | {"Popen": forked_by_nursery})
        patch.setattr("stoker.training.elastic.worker_pool.subprocess", given)
        thread.start()
        try:
            yield told
        finally:
            supervisor.stop(signal.SIGINT)
            supervisor.stop(signal.SIGINT)
            thread.join(LONGEST_S)
    assert not thread.is_alive()


if __name__ == "__main__":
    _workers, *_arguments = sys.argv[1:]
    _supervisor = Supervisor(
        [sys.executable, str(WORKER), *_arguments],
        workers=int(_workers),
        on_line=lambda line: print(line, flush=True),
        tell=lambda *_: None,
    )
    sys.exit(_supervisor.run())

"""The command line: in this process for what it says, in one of its own for how it ends."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from typer.testing import CliRunner

from stoker.cli.main import app
from stoker.records import dumps
from tests.flow.builders import PLAN
from tests.forked import Forked

CNN = Path(__file__).parent / "jobs" / "cnn.py"
"""A job with everything that could break exact resuming."""

BLOBS = '''\
import torch
from torch import nn

import stoker


def job(lr: float = 0.1, epochs: float = 3, width: int = 8):
    """A classifier of 100 points."""
    inputs = torch.randn(100, 6, generator=torch.Generator().manual_seed(0))
    target = (inputs.sum(1) > 0).long()
    settings = dict(
        model=lambda: nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 2)), data=(inputs, target),
        valid=stoker.holdout(0.2), test=(inputs[:30], target[:30]), loss="cross_entropy", metrics=["accuracy"],
        optimizer=stoker.SGD(lr=lr, momentum=0.9), batch=16, until=stoker.epochs(epochs),
    )
    # CHANGES
    return stoker.Job(**settings)
'''
"""A job file; `job_file` puts statements that change `settings` in the marked place."""


@dataclass(frozen=True)
class Outcome:
    """How a command ended: its exit code, and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def events(self) -> list[dict[str, Any]]:
        """Standard output as JSON lines."""
        return [json.loads(line) for line in self.out.splitlines()]

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The events of a kind."""
        return [event for event in self.events if event["event"] == kind]


def job_file(changes: str = "", *, name: str = "blobs.py", head: str = "") -> Path:
    """A job file in the working directory: BLOBS with statements added at the top, and before the job is made."""
    path = Path(name)
    path.write_text(head + BLOBS.replace("# CHANGES", changes.replace("\n", "\n    ")))
    return path


def plan_file() -> Path:
    """A file with PLAN."""
    path = Path("plan.json")
    path.write_text(dumps(PLAN))
    return path


def stoker_here(*arguments: str | Path) -> Outcome:
    """The command in this process: everything but the start of Python, and signals."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Outcome(result.exit_code, result.stdout, result.stderr)


def command(*arguments: str | Path) -> list[str]:
    """The command as a list of words for a process of its own."""
    return [sys.executable, "-m", "stoker", *map(str, arguments)]


def stoker_process(*arguments: str | Path, forks_workers: bool = True, **environment: str) -> Outcome:
    """The command in a process of its own, as are the workers it starts: forks, or else fresh interpreters."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        process = Forked(
            "stoker",
            [*map(str, arguments)],
            stderr=errors,
            env=os.environ | environment,
            forks_workers=forks_workers,
            leaves_memory=True,
        )
        out = process.communicate()
        errors.seek(0)
        return Outcome(process.wait(), out, errors.read())


class Running:
    """The command in a process of its own, heard through its events; killed with its workers after the `with` block."""

    def __init__(self, *arguments: str | Path, **environment: str) -> None:
        self.events: list[dict[str, Any]] = []
        self.errors = Path(f"errors-{time.monotonic_ns()}.txt")
        with self.errors.open("w") as errors:
            words = [*map(str, arguments), "--json"]
            self.process = Forked("stoker", words, stderr=errors, env=os.environ | environment)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()

    def until(self, kind: str, count: int = 1) -> dict[str, Any]:
        """Wait for so many events of a kind; the last of them."""
        for line in self.process.stdout:
            self.events.append(json.loads(line))
            count -= self.events[-1]["event"] == kind
            if not count:
                return self.events[-1]
        raise AssertionError(f"it ended without {kind}: {self.errors.read_text()}")

    def kill(self) -> None:
        """Send SIGKILL to the trainer; its loader workers, which hold its output open, live on for a while."""
        self.process.kill()
        assert self.process.wait() == -signal.SIGKILL

    def end(self, number: signal.Signals | None = None) -> Outcome:
        """Send a signal, if one is given, and wait for the end."""
        if number is not None:
            self.process.send_signal(number)
        out = self.process.communicate()
        self.events += [json.loads(line) for line in out.splitlines() if line.endswith("}")]
        text = "\n".join(json.dumps(event) for event in self.events)
        return Outcome(self.process.wait(), text, self.errors.read_text())

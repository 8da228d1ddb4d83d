"""The command line: in this process for what it says, in one of its own for how it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from stoker.cli.main import app
from stoker.records import dumps
from tests.flow.builders import PLAN

JOBS = Path(__file__).parent / "jobs"

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


def stoker_process(*arguments: str | Path, **environment: str) -> Outcome:
    """The command in a process of its own."""
    done = subprocess.run(
        command(*arguments), capture_output=True, text=True, check=False, env=os.environ | environment, timeout=60
    )
    return Outcome(done.returncode, done.stdout, done.stderr)

"""Start-up at a place that has shown nothing: from the command to training there, beyond the queue and the transfer.

What: `stoker train --on PLACE` loads PyTorch and Stoker, sends what is missing, and starts a program there that does
the same once more, behind one that watches it. So the start of such a program is measured here, and counts twice, the
second time scaled by how much slower the place computes. Use when: no run has come home from the place, or from others
of its kind (`place_history`). Costs: a Python with PyTorch is started once here, and a loop of 0.1 s runs there and
here.
Does not do: an environment that has to be made there first, an image that has to be pulled, a cold disk.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import time
from dataclasses import dataclass

SEND_S, BEGIN_S = 1.5, 0.5
"""Beyond loading programs: reading the job here, and commands that look, send and start [s]; the program that watches
the run, and what the run does before its first update [s]: of first runs by SSH and on Slurm here
(bench/results/place_first_*.json)."""

TRIED_S = 1.0
"""What the plans cost that a run's first updates try [s], where none was chosen there before: 0.3 to 1.5 of them."""

_MOST_START_S = 60.0

FEWEST_UPDATES = 40
"""In a run of fewer updates none are tried (`training.plan_trials`)."""


def loop_s() -> float:
    """Time of a computation of Python's own, by which hosts are compared [s]: starting a program is mostly that."""
    fastest = float("inf")
    for _ in range(20):
        started = time.perf_counter()
        sum(number * number for number in range(100_000))
        fastest = min(fastest, time.perf_counter() - started)
    return fastest


LOOP_PROGRAM = f"import time\n{inspect.getsource(loop_s)}print(loop_s())"
"""The text of a program that prints `loop_s` of a host."""


@dataclass(frozen=True, kw_only=True)
class StartUp:
    """Parts of the start-up of a run.

    Attributes:
        submit_s: from the command to the submission [s].
        startup_s: from the start of the processes there to training [s].
        slowness: time of the same computation there over that here [1].
    """

    submit_s: float
    startup_s: float
    slowness: float


def expected_start(here_s: float, loop_there_s: float) -> StartUp:
    """The start-up of a run, from what a program takes here and how fast the place is.

    Args:
        here_s: time to start a program here (`program_start_s`) [s].
        loop_there_s: time of `loop_s` there [s]; 0: unknown, and taken as here.
    """
    slowness = loop_there_s / loop_s() if loop_there_s > 0 else 1.0
    return StartUp(submit_s=here_s + SEND_S, startup_s=(here_s + BEGIN_S) * slowness, slowness=slowness)


def program_start_s() -> float | None:
    """Time to start Python, Stoker and PyTorch on this machine, as they are before a job is read [s]; None: unknown."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, filter(None, sys.path)))}
    started = time.perf_counter()
    program = [sys.executable, "-c", "import stoker; stoker.train; stoker.plan"]
    try:
        ended = subprocess.run(program, env=environment, capture_output=True, check=False, timeout=_MOST_START_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return time.perf_counter() - started if ended.returncode == 0 else None

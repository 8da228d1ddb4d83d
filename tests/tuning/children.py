"""What processes of trials do in tests; light to import, as each process imports it again."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from stoker.errors import DoesNotFit
from stoker.tuning.processes import Judge, TrialReading, TrialRequest, TrialResult, TrialSlot

TOTAL = 400


def climb(request: TrialRequest, slot: TrialSlot, judge: Judge) -> TrialResult:
    """Four evaluations; stops on request."""
    print(f"trial {request.number} on {slot.on}")
    for samples in range(100, TOTAL + 1, 100):
        if judge(
            TrialReading(samples=samples, total_samples=TOTAL, metrics={"score": samples * request.parameters["x"]})
        ):
            return TrialResult(kind="stopped", samples=samples)
    cpus = len(os.sched_getaffinity(0))
    return TrialResult(kind="finished", metrics={"score": float(cpus), "pid": float(os.getpid())}, samples=TOTAL)


def misbehave(request: TrialRequest, slot: TrialSlot, judge: Judge) -> TrialResult:
    """Ends as the setting `how` says."""
    match request.parameters["how"]:
        case "raise":
            raise ZeroDivisionError("a mistake of its own")
        case "exit":
            sys.exit(7)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "too wide":
            raise DoesNotFit("too wide", remedy="Take a smaller one.")
    return TrialResult(kind="finished", metrics={"score": 1.0}, samples=1)


def endless(request: TrialRequest, slot: TrialSlot, judge: Judge) -> TrialResult:
    """Goes on until SIGTERM, and then writes that it saved."""
    path = Path(request.parameters["path"])
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: stopped.append(number))
    path.with_suffix(".began").write_text(str(os.getpid()))
    while not stopped:
        time.sleep(0.01)
    path.write_text("saved")
    return TrialResult(kind="stopped", samples=5)


def linger(path: Path) -> str:
    """Answers; its process lives on for 20 s, and writes a file then."""

    def live_on() -> None:
        time.sleep(20)
        path.write_text("lived on")

    threading.Thread(target=live_on).start()
    return "answered"


def lingering(request: TrialRequest, slot: TrialSlot, judge: Judge) -> TrialResult:
    """Finishes; its process does not end."""
    linger(Path(request.parameters["path"]))
    return TrialResult(kind="finished", metrics={"score": 1.0}, samples=1)


def doubled(values: Sequence[int]) -> list[int]:
    """For `in_a_process`."""
    if not values:
        raise DoesNotFit("nothing to double", remedy="Give a number.")
    return [2 * value for value in values]

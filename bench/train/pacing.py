"""A contender trains when it is told to: slices of its own loop, counted and timed where it runs.

Every contender calls `Pacer.updated` after each of its updates, from wherever its trainer lets it. Between slices the
call does not return, so that the process rests.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

WARM_UP_UPDATES = 3
"""Updates before a contender says that it is ready; their losses are reported."""

WARM_UP_S = 1.0
"""It warms up for at least as long, so that compilers and allocators have settled [s]."""

SETTLING_MOST_S = 240.0
"""It may choose its settings by its first updates for so long; what it then runs is measured, settled or not [s]."""


class Pacer:
    """Runs slices as commands come in, one JSON document a line, and answers with what was done.

    Args:
        commands, answers: the ends of pipes to whoever drives.
        started: when this process was started, on the system's monotonic clock [s].
        leave: what ends the process once told to stop.
    """

    def __init__(
        self,
        commands: TextIO,
        answers: TextIO,
        started: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        leave: Callable[[int], Any] = os._exit,
    ) -> None:
        self._commands, self._answers, self._started, self._clock, self._leave = (
            commands,
            answers,
            started,
            clock,
            leave,
        )
        self._losses: list[float] = []
        self._first_update_s = 0.0
        self._is_ready = False
        self._begun, self._begun_cpu = clock(), 0.0
        self._samples = self._updates = 0
        self._slice_s, self._least_updates = 0.0, 1
        self.notes: dict[str, Any] = {}
        """What the contender wants said of it, such as its plan."""
        self.peak_bytes: Callable[[], int] = high_water_bytes
        """What tells the peak of memory; a contender on a GPU sets another."""
        self.keep_up: Callable[[], object] = lambda: None
        """Called after each update: keeps a device from falling far behind the loop that gives it work."""
        self.before_rest: Callable[[], object] = lambda: None
        """Called before the process rests: leaves the others what it does not need meanwhile."""
        self.settling_updates = 0
        """Updates after a rest that do not count: they take back what was left to others."""
        self._settling = 0
        self.is_choosing: Callable[[], bool] = lambda: False
        """Whether the contender still tries settings on its updates, which are then warming up."""

    def updated(self, num_samples: int, loss: Callable[[], float]) -> float:
        """Note an update; returns the seconds that were spent waiting. `loss` gives the update's mean loss."""
        self.keep_up()
        if self._settling:
            self._settling -= 1
            if not self._settling:
                loss()
                self._begun, self._begun_cpu = self._clock(), time.process_time()
            return 0.0
        self._samples += num_samples
        self._updates += 1
        if not self._is_ready:
            return self._warming_up(loss)
        if self._updates < self._least_updates or self._clock() - self._begun < self._slice_s:
            return 0.0
        loss()  # whatever still runs in the background is waited for
        took_s, took_cpu_s = self._clock() - self._begun, time.process_time() - self._begun_cpu
        self._say(samples=self._samples, updates=self._updates, wall_s=took_s, cpu_s=took_cpu_s)
        return self._wait()

    def _warming_up(self, loss: Callable[[], float]) -> float:
        if len(self._losses) < WARM_UP_UPDATES:
            self._losses.append(loss())
        if self._updates == 1:
            self._first_update_s = self._clock() - self._started
            self._begun = self._clock()
        warmed_s = self._clock() - self._begun
        if self._updates < WARM_UP_UPDATES or warmed_s < WARM_UP_S:
            return 0.0
        if self.is_choosing() and warmed_s < SETTLING_MOST_S:
            return 0.0
        self._is_ready = True
        loss()
        self._say(
            losses=self._losses,
            first_update_s=self._first_update_s,
            start_peak_bytes=self.peak_bytes(),
            notes=self.notes,
        )
        reset_high_water()
        return self._wait()

    def _wait(self) -> float:
        """Rest until told what to do."""
        self.before_rest()
        rested = self._clock()
        command = json.loads(self._commands.readline() or '{"stop": true}')
        if command.get("stop"):
            self._say(peak_bytes=self.peak_bytes(), notes=self.notes)
            self._leave(0)
        self._slice_s, self._least_updates = float(command["slice_s"]), int(command["least_updates"])
        self._samples, self._updates, self._settling = 0, 0, self.settling_updates
        self._begun, self._begun_cpu = self._clock(), time.process_time()
        return self._begun - rested

    def _say(self, **answer: Any) -> None:
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()


def high_water_bytes() -> int:
    """The most this process had of the machine's memory since it began, or since the mark was reset [bytes].

    Raises:
        OSError: this is not Linux.
    """
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))


def reset_high_water() -> None:
    """Count the most memory from now on; where the system forbids it the mark stays, and with it the start's peak."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:  # forbidden, or a sandbox that has no such file
        return

"""Slices of a run, for places that end jobs: train, save before the time is over, exit with 75.

The same command goes on, bit for bit as if it had not been stopped: a slice ends as a run that was asked to stop
(`stoker.training.signals`). The time counts from the start of the process, imports included, since the place counts so.
The last update is chosen so that what follows has room: the update after it, an evaluation that is due, the save by its
measured cost, the upload of a mirror, and the end of the process. Every slice makes at least one update, so that a
chain of slices ends.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from stoker.planning.model.slices import length_in_s, reserve_s, sliced
from stoker.records import Decision
from stoker.units import Duration

SLICE_OVER = "slice over"
"""The reason of a run that was left because its slice was over."""

SLICE_OVER_EXIT = 75
"""Exit code of a slice that was over before the run: go on with the same command. EX_TEMPFAIL of sysexits.h."""

_IMPORTED_AT = time.monotonic()
_MOST_UPLOAD_S = 120.0
"""Time for an upload that was not measured yet: a twentieth of the slice, at most this [s]; a judgement."""
_MOST_USELESS = 0.5
"""From this share of a slice on that was not training, its end says that a longer one would waste less."""


class _Process:
    has_had_slice = False


@dataclass
class Slice:
    """The time that this process may take.

    Attributes:
        length_s: of the slice [s].
        ends_at: its end [s, as `clock`], the same in all processes of a machine.
        save_s: the longest save so far, until it was durable [s]; a forecast until one was made.
        evaluate_s: the last evaluation of the run [s]; a forecast until one was made.
        upload_s: how long sending a checkpoint away takes [s].
        clock: the time [s], of any origin.
    """

    length_s: float
    ends_at: float
    save_s: float = 0.0
    evaluate_s: float = 0.0
    upload_s: Callable[[], float] = lambda: 0.0
    clock: Callable[[], float] = time.monotonic
    sends: bool = field(default=False, init=False)
    """Whether checkpoints are sent away."""
    began_samples: int | None = field(default=None, init=False)
    """Position at the first update of this slice [samples]."""
    _trained_from: float = field(default=math.nan, init=False)

    @classmethod
    def begin(cls, length: Duration | float | str | Slice) -> Slice:
        """The slice of this process, counted from its start; in a process that had one before, from now on.

        One that has begun already is taken as it is.

        Raises:
            BadJob: `length` is no time.
        """
        if isinstance(length, Slice):
            return length
        length_s = length_in_s(length)
        age_s = 0.0 if _Process.has_had_slice else process_age_s()
        _Process.has_had_slice = True
        return cls(length_s, time.monotonic() + length_s - age_s)

    @classmethod
    def parse(cls, text: str) -> Self:
        """The slice that another process of this machine has begun, as `str` wrote it."""
        length, _, end = text.partition("@")
        return cls(float(length), float(end))

    def for_workers(self) -> Slice:
        """The slice of workers of this process: where it sends checkpoints away, that has time left after them."""
        upload_s = max(self.upload_s(), min(0.05 * self.length_s, _MOST_UPLOAD_S)) if self.sends else 0.0
        return Slice(self.length_s, self.ends_at - upload_s)

    def __str__(self) -> str:
        """For processes of this machine: length and end."""
        return f"{self.length_s!r}@{self.ends_at!r}"

    def announced(self, decision: Decision) -> Decision:
        """The decision with a line on how many slices it takes; one of this age minus planning starts each."""
        starting_s = max(0.0, self.length_s - self.left_s - decision.took_s)
        return sliced(decision, self.length_s, starting_s)

    @property
    def left_s(self) -> float:
        """Time until its end [s]; below 0 after it."""
        return self.ends_at - self.clock()

    @property
    def has_trained(self) -> bool:
        """Whether this process made an update in it."""
        return not math.isnan(self._trained_from)

    def trained_from(self, samples: int) -> None:
        """Take in that this process has made its first update, from the position `samples` on."""
        if not self.has_trained:
            self.began_samples, self._trained_from = samples, self.clock()

    def expecting(self, *, save_s: float, evaluate_s: float) -> Self:
        """This slice, where a save and an evaluation are known or expected to take as long [s]."""
        self.saved(float(save_s))
        self.evaluate_s = float(evaluate_s)
        return self

    def saved(self, took_s: float) -> None:
        """Take in what a save took, until it was durable [s]."""
        self.save_s = max(self.save_s, took_s)

    def is_over(self, *, updates_s: float, evaluate_s: float = 0.0) -> bool:
        """Whether training has to save now: what would come before the next chance has no room left [s]."""
        reserve = reserve_s(save_s=self.save_s, updates_s=updates_s, evaluate_s=evaluate_s, upload_s=self.upload_s())
        return self.left_s < reserve

    def left_after(self, samples: int, total_samples: int) -> tuple[int | None, str]:
        """How many slices of this one's pace are left [None: unknown], and advice on their length, or "".

        One is left where only the last evaluation is.
        """
        done = 0 if self.began_samples is None else samples - self.began_samples
        slices = max(1, math.ceil((total_samples - samples) / done)) if done > 0 else None
        useful = (self.clock() - self._trained_from) / self.length_s if self.has_trained else 0.0
        if useful >= _MOST_USELESS:
            return slices, ""
        return slices, f"only {useful:.0%} of this slice was training: longer slices waste less"


def process_age_s() -> float:
    """Time since this process was started [s]; without Linux's /proc, since Stoker was imported."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)
    except (OSError, AttributeError, IndexError, ValueError):
        return time.monotonic() - _IMPORTED_AT

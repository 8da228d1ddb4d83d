"""What is measured while training: loss, rate, where the time goes, and an honest time to go.

Loss spikes: a loss far above what it was just before, by a measure that outliers do not move.

What: the mean loss of an interval between two progress events against the median of the last ones, in robust standard
deviations (1.4826 times the median absolute deviation). Use when: always; a spike is told, and nothing is done.
Costs: a sort of 32 numbers twice a second. Does not see: a loss that rises slowly.
Source: B. Iglewicz and D. Hoaglin, "How to Detect and Handle Outliers" (1993); there 3.5 marks an outlier, here 10: a
loss curve has a trend and heavy tails.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from stoker.records import Event, EventKind, Position
from stoker.records.codec import JSON

Sink = Callable[[Event], None]

_HALF_LIFE_S = 20.0
"""Half-life of what was seen, in the recent rate that the time to go rests on."""


def _ignore_part(_part: str) -> None:
    """Laps are booked here alone."""


class Telemetry:
    """Collects figures between progress events and sends events to `sink`.

    Args:
        sink: receives every event.
        total_samples, total_updates: of the whole run.
        evaluate_s, evaluations_left: forecast seconds of one evaluation, and how many are to come.
        wall_s: seconds trained by earlier processes of this run.
        interval_s: seconds between progress events.

    Attributes:
        num_laps: how often something was seen to go on; a watchdog in another thread looks at it.
        longest_s: the longest lap so far [s].
        samples_per_s: the rate of the last progress event, evaluation and checkpoints left out.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        total_samples: int,
        total_updates: int,
        evaluate_s: float,
        evaluations_left: int,
        wall_s: float = 0.0,
        interval_s: float = 0.5,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._sink, self._clock, self._interval_s = sink, clock, interval_s
        self.total_samples, self.total_updates = total_samples, total_updates
        self._evaluate_s, self._evaluations_left = evaluate_s, evaluations_left
        self._started = clock() - wall_s
        self._mark = self._last_progress = clock()
        self._update_s = 0.0
        self._split = {"data": 0.0, "update": 0.0, "evaluation": 0.0, "checkpoint": 0.0}
        self.num_laps, self.longest_s = 0, 0.0
        self.samples_per_s = 0.0
        self._samples = 0
        self._loss_sum: torch.Tensor | float = 0.0
        self._num_losses = 0
        self._recent_samples = self._recent_s = 0.0
        self.peak_bytes = 0
        self.on_lap: Callable[[str], None] = _ignore_part

    @property
    def wall_s(self) -> float:
        """Seconds since training began, over all processes of the run."""
        return self._clock() - self._started

    def emit(self, kind: EventKind, **fields: JSON) -> None:
        """Send an event now."""
        self._sink(Event(kind=kind, at=time.time(), fields=fields))

    def lap(self, part: str) -> float:
        """Book the time since the last lap under `part`; returns it [s]."""
        now = self._clock()
        took, self._mark = now - self._mark, now
        self._split[part] = self._split.get(part, 0.0) + took
        self.num_laps += 1
        self.longest_s = max(self.longest_s, took)
        self.on_lap(part)
        return took

    def beat(self) -> None:
        """Note that something goes on within a long lap."""
        self.num_laps += 1

    def updated(self, loss: torch.Tensor, num_samples: int) -> bool:
        """Note an update's loss; whether a progress event is due."""
        self._update_s = self.lap("update")
        # A GPU is not waited for; on a CPU a number costs nothing and, unlike a tensor, keeps no memory.
        self._loss_sum += loss.item() if loss.device.type == "cpu" else loss
        self._num_losses += 1
        self._samples += num_samples
        return self._mark - self._last_progress >= self._interval_s

    @property
    def is_nearly_due(self) -> bool:
        """Whether a progress event is to be expected after the update that begins now, as long as the last one."""
        return self._mark + self._update_s - self._last_progress >= self._interval_s

    def skipped(self) -> bool:
        """Note an update that was left out: its time counts, its samples and its loss do not.

        Whether a progress event is due.
        """
        self.lap("update")
        return self.has_news and self._mark - self._last_progress >= self._interval_s

    def progress(self, position: Position, lr: float, more: Mapping[str, JSON] | None = None) -> float:
        """Send a progress event with `more` fields; returns the mean loss since the last one."""
        loss = float(self._loss_sum) / self._num_losses
        self.lap("update")  # a GPU was waited for just now
        elapsed = self._clock() - self._last_progress
        busy = self._split["data"] + self._split["update"]
        rate = self._samples / busy if busy > 0 else 0.0
        # Samples and seconds fade apart, so that one slow update at the start weighs no more than the time it took.
        fading = 0.5 ** (elapsed / _HALF_LIFE_S)
        self._recent_samples = fading * self._recent_samples + self._samples
        self._recent_s = fading * self._recent_s + busy
        resident = resident_bytes()
        self.peak_bytes = max(self.peak_bytes, resident)
        self.samples_per_s = rate
        self.emit(
            "progress", samples=position.samples, total_samples=self.total_samples, updates=position.updates,
            epoch=position.epoch, loss=loss, lr=lr, samples_per_s=rate, eta_s=self._eta_s(position), wall_s=self.wall_s,
            split_s=dict(self._split), resident_bytes=resident, **(more or {}),
        )  # fmt: skip
        self._split = dict.fromkeys(self._split, 0.0)
        self._samples, self._loss_sum, self._num_losses, self._last_progress = 0, 0.0, 0, self._clock()
        return loss

    def evaluated(self, took_s: float) -> None:
        """Note how long an evaluation took: the next ones are expected to take as long."""
        self._evaluate_s = took_s
        self._evaluations_left = max(0, self._evaluations_left - 1)

    @property
    def has_news(self) -> bool:
        """Whether anything was trained since the last progress event."""
        return self._num_losses > 0

    def _eta_s(self, position: Position) -> float | None:
        if not self._recent_samples:
            return None
        left_s = (self.total_samples - position.samples) * self._recent_s / self._recent_samples
        return left_s + self._evaluations_left * self._evaluate_s


def resident_bytes() -> int:
    """Resident memory of this process now [bytes]; its peak where the system does not tell the present."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * resource.getpagesize()
    except OSError:
        return peak_resident_bytes()


def peak_resident_bytes() -> int:
    """Peak resident memory of this process so far [bytes]."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


_WINDOW = 32
_FEWEST = 8
_FAR = 10.0
_LEAST_SHARE = 0.02
"""A deviation is taken to be at least this share of the median: on a plateau it can be next to nothing."""


class SpikeDetector:
    """Told one loss after another, says which ones jump."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._is_up = False

    def look(self, loss: float) -> str | None:
        """What to tell of `loss`, the mean over an interval: None unless it begins a spike."""
        sentence = None
        if len(self._losses) >= _FEWEST:
            middle = statistics.median(self._losses)
            spread = 1.4826 * statistics.median(abs(one - middle) for one in self._losses)
            score = (loss - middle) / max(spread, _LEAST_SHARE * abs(middle), 1e-12)
            if score > _FAR and not self._is_up:
                sentence = (
                    f"the loss jumped to {loss:.4g} from a median of {middle:.4g} over the last {len(self._losses)} "
                    f"reports, {score:.0f} robust standard deviations; nothing was changed"
                )
            self._is_up = score > _FAR
        self._losses.append(loss)
        return sentence

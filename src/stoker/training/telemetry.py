"""Telemetry of training: progress events with loss, rate and time left, and warnings about loss spikes."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from stoker.devices.malloc import resident_bytes
from stoker.profiling.plan_trial import PeakMemory
from stoker.records import Event, EventKind, Position
from stoker.records.codec import JSON

Sink = Callable[[Event], None]


class Emit(Protocol):
    """Sends events."""

    def __call__(self, kind: EventKind, **fields: Any) -> None:
        """Send an event of this kind, which happened now."""
        ...


def emit_event(sinks: Sequence[Sink], kind: EventKind, **fields: Any) -> None:
    """Send an event that happened now."""
    event = Event(kind=kind, at=time.time(), fields=fields)
    for sink in sinks:
        sink(event)


_MOST_AT_FULL_RATE = 20_000
"""After so many intervals progress events come ever more rarely: a log is read as a whole, into memory."""
_HALF_LIFE_S = 20.0
"""Half-life of past samples and seconds in the rate that the time left is computed from [s]."""


class Telemetry:
    """Collects figures between progress events and sends events to `sink`.

    Args:
        sink: receives every event.
        total_samples, total_updates: of the whole run.
        evaluate_s, evaluations_left: forecast time of one evaluation [s], and the number still to come.
        device: where this process trains, by PyTorch's name; of a GPU, progress has its allocated memory too.
        wall_s: time trained by earlier processes of this run [s].
        interval_s: time between progress events [s]; in a long run a fixed share of its time so far.

    Attributes:
        num_laps: number of signs of life; a watchdog in another thread reads it.
        longest_s: the longest lap so far [s].
        samples_per_s: rate of the last progress event, without evaluation and checkpoints [samples/s].
    """

    def __init__(  # noqa: PLR0913 - what is known of the run
        self,
        sink: Sink,
        *,
        total_samples: int,
        total_updates: int,
        evaluate_s: float,
        evaluations_left: int,
        device: str = "cpu",
        wall_s: float = 0.0,
        interval_s: float = 0.5,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._sink, self._clock, self._interval_s = sink, clock, interval_s
        self.total_samples, self.total_updates = total_samples, total_updates
        self._evaluate_s, self._evaluations_left = evaluate_s, evaluations_left
        self._started = clock() - wall_s
        self._mark = self._last_progress = clock()
        self._update_s = self._data_s = 0.0
        self._split = {"data": 0.0, "update": 0.0, "evaluation": 0.0, "checkpoint": 0.0}
        self.num_laps, self.longest_s = 0, 0.0
        self.samples_per_s = 0.0
        self._samples = 0
        self._loss_sum: torch.Tensor | float = 0.0
        self._num_losses = 0
        self._recent_samples = self._recent_s = 0.0
        self._is_first, self._first_samples, self._first_s = True, 0, 0.0
        """Whether the next update is its plan's first; samples and time [s] of such updates since the last progress."""
        self._device, self._watching = device, contextlib.ExitStack()
        self._allocated: PeakMemory | None = None
        self.replanned()
        self.on_lap: Callable[[str], None] = lambda _part: None

    @property
    def wall_s(self) -> float:
        """Time since training began, over all processes of the run [s]."""
        return self._clock() - self._started

    def emit(self, kind: EventKind, **fields: JSON) -> None:
        """Send an event now."""
        self._sink(Event(kind=kind, at=time.time(), fields=fields))

    def lap(self, part: str) -> float:
        """Time since the last lap, booked under `part` [s]."""
        now = self._clock()
        took, self._mark = now - self._mark, now
        self._split[part] = self._split.get(part, 0.0) + took
        if part == "data":
            self._data_s = took
        self.num_laps += 1
        self.longest_s = max(self.longest_s, took)
        self.on_lap(part)
        return took

    def beat(self) -> None:
        """Give a sign of life within a long lap."""
        self.num_laps += 1

    def updated(self, loss: torch.Tensor, num_samples: int) -> bool:
        """Take in an update's loss; returns whether a progress event is due."""
        self._took(self.lap("update"), 1, num_samples)
        # Does not wait for a GPU; on a CPU a number costs nothing and, unlike a tensor, keeps no memory.
        self._loss_sum += loss.item() if loss.device.type == "cpu" else loss
        self._num_losses += 1
        return self._is_due(self._mark)

    def updated_together(self, losses: Sequence[float], num_samples: int) -> None:
        """Take in the losses of updates made in one call, `num_samples` each; never when `is_nearly_due`."""
        self._took(self.lap("update"), len(losses), len(losses) * num_samples)
        for loss in losses:
            self._loss_sum += loss
        self._num_losses += len(losses)

    def _took(self, took_s: float, num_updates: int, num_samples: int) -> None:
        """Take in the time of updates made in one call, which may be the first under their plan."""
        self._update_s = took_s / num_updates
        self._samples += num_samples
        if self._is_first:
            self._is_first = False
            self._first_samples += num_samples
            self._first_s += self._data_s + took_s

    @property
    def is_nearly_due(self) -> bool:
        """Whether a progress event will be due after an update as long as the last one."""
        return self._is_due(self._mark + self._update_s)

    def _is_due(self, time_s: float) -> bool:
        return time_s - self._last_progress >= max(self._interval_s, (time_s - self._started) / _MOST_AT_FULL_RATE)

    def skipped(self) -> bool:
        """Take in a skipped update, whose time counts, but not its samples; returns whether a progress event is due."""
        self.lap("update")
        return self.has_news and self._is_due(self._mark)

    def progress(self, position: Position, lr: float, more: Mapping[str, JSON] | None = None) -> float:
        """Mean loss since the last progress event [loss units]; sends the next event, with `more` fields."""
        loss = float(self._loss_sum) / self._num_losses
        self.lap("update")  # the line before waited for the GPU
        elapsed = self._clock() - self._last_progress
        busy = self._split["data"] + self._split["update"]
        rate = self._samples / busy if busy > 0 else 0.0
        # Samples and seconds fade separately, so that one slow update at the start weighs no more than its time.
        fading = 0.5 ** (elapsed / _HALF_LIFE_S)
        # A plan's first update also compiles, makes kernels, state and caches, or waits for the first batch.
        self._recent_samples = fading * self._recent_samples + self._samples - self._first_samples
        self._recent_s = fading * self._recent_s + busy - self._first_s
        self._first_samples, self._first_s = 0, 0.0
        allocated = {} if self._allocated is None else {"allocated_bytes": self._allocated.num_bytes}
        self.samples_per_s = rate
        eta_s = None
        if self._recent_samples:
            left_s = (self.total_samples - position.samples) * self._recent_s / self._recent_samples
            eta_s = left_s + self._evaluations_left * self._evaluate_s
        self.emit(
            "progress",
            samples=position.samples,
            total_samples=self.total_samples,
            updates=position.updates,
            epoch=position.epoch,
            loss=loss,
            lr=lr,
            samples_per_s=rate,
            eta_s=eta_s,
            wall_s=self.wall_s,
            split_s=dict(self._split),
            resident_bytes=resident_bytes(),
            **allocated,
            **(more or {}),
        )
        self._split = dict.fromkeys(self._split, 0.0)
        self._samples, self._loss_sum, self._num_losses, self._last_progress = 0, 0.0, 0, self._clock()
        return loss

    def evaluated(self, took_s: float) -> None:
        """Take in the time of an evaluation [s]; the next ones are expected to take as long."""
        self._evaluate_s = took_s
        self._evaluations_left = max(0, self._evaluations_left - 1)

    def replanned(self) -> None:
        """Another plan is in force: its first update says nothing of the time left, and its peak is not the last one's.

        A GPU's peak is not reset at progress events: repeating a captured pass allocates nothing, and it would be lost.
        """
        self._is_first = True
        self._watching.close()
        if self._device.startswith("cuda"):
            self._allocated = self._watching.enter_context(PeakMemory(self._device))

    def settled(self, evaluate_s: float) -> None:
        """Forget the rates of plans that were tried; an evaluation under the chosen one takes `evaluate_s` [s]."""
        self._recent_samples = self._recent_s = 0.0
        if self._evaluations_left:
            self._evaluate_s = evaluate_s

    @property
    def next_update_s(self) -> float:
        """Time that the next update is expected to take, with waiting for its data [s]: as the last."""
        return self._update_s + self._data_s

    @property
    def evaluate_s(self) -> float:
        """Time that the next evaluation is expected to take [s]."""
        return self._evaluate_s

    @property
    def has_news(self) -> bool:
        """Whether anything was trained since the last progress event."""
        return self._num_losses > 0


_WINDOW = 32
_FEWEST = 8
_FAR = 10.0
_LEAST_SHARE = 0.02
"""Least deviation, as a share of the median: on a plateau the measured one can be next to zero."""


class SpikeDetector:
    """Detects losses far above those just before, by a measure that outliers do not move.

    What: the mean loss between two progress events against the median of the last ones, in robust standard deviations
    (1.4826 times the median absolute deviation). Use when: always; a spike gives a warning and changes nothing.
    Costs: a sort of 32 numbers at each progress event. Does not see: a loss that rises slowly.
    Source: B. Iglewicz and D. Hoaglin, "How to Detect and Handle Outliers" (1993); there 3.5 marks an outlier, here 10:
    a loss curve has a trend and heavy tails.
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._is_up = False

    def look(self, loss: float) -> str | None:
        """The warning for `loss`, the mean over an interval; None unless it begins a spike."""
        sentence = None
        if len(self._losses) >= _FEWEST:
            middle = statistics.median(self._losses)
            spread = 1.4826 * statistics.median(abs(known - middle) for known in self._losses)
            score = (loss - middle) / max(spread, _LEAST_SHARE * abs(middle), 1e-12)
            if score > _FAR and not self._is_up:
                sentence = (
                    f"the loss jumped to {loss:.4g} from a median of {middle:.4g} over the last {len(self._losses)} "
                    f"reports, {score:.0f} robust standard deviations; nothing was changed"
                )
            self._is_up = score > _FAR
        self._losses.append(loss)
        return sentence

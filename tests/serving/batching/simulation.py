"""Requests that come, wait and are computed in simulated time: the scheduler under load, without threads."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from stoker.artifacts.dtypes import Arrays
from stoker.records import ServiceSettings
from stoker.serving.batching.batcher import warm_up_points
from stoker.serving.batching.queue import Shapes
from stoker.serving.batching.scheduler import RequestBatch, Scheduler, Wait
from stoker.serving.refusals import Refusal
from tests.serving.batching.models import TOKENS, token_inputs

Latency = Callable[[int, int], float]
"""Seconds of a batch by its rows and the (padded) positions of each."""


def transformer(rows: int, length: int) -> float:
    """About all-MiniLM-L6-v2 on one core: seconds linear in tokens, a little quadratic in length, 1 ms for anything."""
    return 1e-3 + rows * (length * 1.0e-4 + length * length * 1.0e-7)


@dataclass
class Outcome:
    """What became of a simulated load."""

    answered: int = 0
    in_time: int = 0
    late: int = 0
    passed: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    waits_s: list[float] = field(default_factory=list)
    batches: list[RequestBatch] = field(default_factory=list)
    most_rows: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Asking:
    """A request of a simulated client."""

    at: float
    length: int
    rows: int = 1
    within_s: float = math.inf
    priority: int = 0
    caller: str = ""


def warmed(settings: ServiceSettings, latency: Latency, instances: int = 1) -> Scheduler:
    """A scheduler of the token model that has measured its warm-up points."""
    shapes = Shapes(TOKENS, settings.buckets)
    scheduler = Scheduler(shapes, settings, instances)
    for rows, (length,) in warm_up_points(TOKENS, shapes, token_inputs(1, 8), scheduler.table.grid):
        scheduler.table.learn(rows, length, latency(rows, length), 0.0)
    return scheduler


def simulate(
    scheduler: Scheduler,
    askings: Iterable[Asking],
    latency: Latency,
    *,
    instances: int = 1,
    again: Callable[[Asking, float], Asking | None] = lambda _asking, _now: None,
    until: float = math.inf,
) -> Outcome:
    """Run a load to its end; `again` is what a client asks once it was answered (a closed loop)."""
    return _Simulation(scheduler, latency, instances, again, until).run(askings)


class _Simulation:
    def __init__(self, scheduler, latency, instances, again, until) -> None:
        self.scheduler, self.latency, self.again, self.until = scheduler, latency, again, until
        self.idle = set(range(instances))
        self.order = itertools.count()
        self.events: list[tuple[float, int, object]] = []
        self.outcome = Outcome()

    def run(self, askings: Iterable[Asking]) -> Outcome:
        for asking in askings:
            self._at(asking.at, asking)
        now = 0.0
        while self.events and now < self.until:
            now, _, event = heapq.heappop(self.events)
            if isinstance(event, Asking):
                self._arrive(event, now)
            elif isinstance(event, tuple):
                self._finish(*event, now)
            self._start(now)
        self.outcome.seconds = now
        return self.outcome

    def _at(self, when: float, event: object) -> None:
        heapq.heappush(self.events, (when, next(self.order), event))

    def _arrive(self, asking: Asking, now: float) -> None:
        inputs: Arrays = {name: np.empty((asking.rows, asking.length)) for name in ("input_ids", "attention_mask")}
        try:
            self.scheduler.admit(
                asking,
                inputs,
                now=now,
                deadline=now + asking.within_s,
                priority=asking.priority,
                caller=asking.caller,
                num_bytes=1,
            )
        except Refusal as refusal:
            self.outcome.refused[refusal.reason] = self.outcome.refused.get(refusal.reason, 0) + 1
        self.outcome.most_rows = max(self.outcome.most_rows, self.scheduler.queue.rows)

    def _start(self, now: float) -> None:
        for instance in sorted(self.idle):
            found = self.scheduler.take(instance, now)
            if isinstance(found, Wait):
                self._at(found.until, "wake")
            elif found is not None:
                self.outcome.passed += len(found.late)
                if found.parts:
                    self.idle.discard(instance)
                    self._at(now + self.latency(found.rows, found.elements), (instance, found))

    def _finish(self, instance: int, batch: RequestBatch, now: float) -> None:
        self.idle.add(instance)
        self.scheduler.learn(batch, now)
        self.outcome.batches.append(batch)
        for part in batch.parts:
            self.outcome.answered += 1
            self.outcome.in_time += now <= part.deadline
            self.outcome.late += now > part.deadline
            self.outcome.waits_s.append(now - part.arrived)
            following = self.again(part.owner, now)
            if following is not None:
                self._at(now, following)

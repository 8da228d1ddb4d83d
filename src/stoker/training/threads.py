"""The number of compute threads on a CPU, adapted to the load of other processes.

What: a thread that waits for a core holds up all the others: one neighbour on one of two cores leaves 0.3 of the rate
under two threads, and 0.55 under one. Where the rate has fallen and a neighbour holds a core, the run goes on with as
many threads as cores are left, and with all of them once the machine has been quiet for a while; never with more than
the cores granted. Each change is a change of plan: it is reported, stored in the run's schedule first, and replayed by
a resume. Updates after it are the same mathematics, but no longer bit-equal to an undisturbed run.
Use when: always. Costs: two reads of a kernel file every two seconds.
Does not combine with: `torch.use_deterministic_algorithms(True)` and compiled plans, whose code is for one number of
threads: both keep their threads, unless fewer cores are granted.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from stoker.devices.cpu import CpuSample, attached_cpu, free_cores, others_cores, sample_cpu
from stoker.records import Plan, Position
from stoker.training.plan_in_force import Replanned
from stoker.training.telemetry import Emit
from stoker.units import format_rate

WINDOW_S = 2.0
"""Time between two looks at the machine [s]."""

SLOWED = 0.75
"""Share of the usual rate below which threads are given up to a neighbour [0 to 1]."""

PATIENCE_S = 20.0
"""Quiet time before threads are taken back [s]; doubled after each time."""

MOST_CHANGES = 6
"""Changes by one process, after which it adapts no more."""

_HELD_WINDOWS = 2
_WINDOWS_TO_SETTLE = 2


@dataclass(frozen=True)
class Machine:
    """Access to the machine: CPU time used (None if unknown), cores granted, setting threads, and a clock [s]."""

    sample: Callable[[], CpuSample | None] = sample_cpu
    granted: Callable[[], int] = lambda: attached_cpu().cores
    set_threads: Callable[[int], None] = torch.set_num_threads
    clock: Callable[[], float] = time.monotonic


@dataclass(frozen=True)
class _Window:
    """A measurement: the run's rate [samples/s], the CPUs it may use, and the cores that others used of them."""

    samples_per_s: float
    cpus: float
    others: float


class ThreadKeeper:
    """Watches a run on a CPU and changes its number of threads.

    Args:
        plan: returns the plan in force.
        tell: sends events.
        most: returns the most threads: those of the plan before any were given up; None: those of the plan.
        changed: stores a change of plan before it takes effect.
        usual_samples_per_s: the rate that the plan was chosen for [samples/s].
        is_free: threads may be given up to neighbours, and not only to a smaller grant.
        others_share: share of the CPU that other processes used while the plan was chosen [0 to 1].
        machine: access to the machine.

    Attributes:
        threads: the present number.
    """

    def __init__(
        self,
        plan: Callable[[], Plan],
        tell: Emit,
        *,
        usual_samples_per_s: float,
        most: Callable[[], int] | None = None,
        changed: Callable[[Replanned], None] = lambda _change: None,
        is_free: bool = True,
        others_share: float = 0.0,
        machine: Machine | None = None,
    ) -> None:
        self._plan, self._tell, self._machine = plan, tell, machine or Machine()
        self._most, self._store = most or (lambda: plan().threads), changed
        self._usual, self._is_free, self._others_share = usual_samples_per_s, is_free, others_share
        self.threads = plan().threads
        self._before, self._began, self._rates = self._machine.sample(), self._machine.clock(), list[float]()
        self._held, self._quiet_s, self._patience_s, self._changes = 0, 0.0, PATIENCE_S, 0
        self._on_trial: tuple[int, float, int] | None = None
        """After a reduction: the threads before it, their rate [samples/s], and the windows until it is judged."""

    def start(self, position: Position) -> None:
        """Begin with the plan's threads, at most those granted and those that others left free during planning."""
        self._machine.set_threads(self.threads)
        self._keep_to_the_grant(position)
        granted = self._machine.granted()
        free = free_cores(granted, self._others_share * granted)
        if self._is_free and free < self.threads:
            self._change(free, f"other processes use {self._others_share:.0%} of the CPU", position)

    def follow(self, plan: Plan) -> None:
        """Go on with the threads of another plan, whose usual rate is not known yet."""
        if plan.threads != self.threads:
            self.threads, self._usual, self._held, self._on_trial = plan.threads, 0.0, 0, None
            self._machine.set_threads(plan.threads)
        self._is_free = self._is_free and not plan.compile

    def look(self, samples_per_s: float, position: Position) -> None:
        """Take in the rate just reported [samples/s]; every `WINDOW_S` seconds, look at the machine and decide."""
        self._rates.append(samples_per_s)
        now = self._machine.clock()
        elapsed = now - self._began
        if elapsed < WINDOW_S:
            return
        rate, after = sum(self._rates) / len(self._rates), self._machine.sample()
        before, self._before = self._before, after
        self._began, self._rates = now, []
        if self._keep_to_the_grant(position) or before is None or after is None:
            return
        cpus = (after.total_s - before.total_s) / elapsed
        self._decide(_Window(rate, cpus, others_cores(before, after, elapsed)), elapsed, position)

    def _keep_to_the_grant(self, position: Position) -> bool:
        """Reduce threads to the cores granted; returns whether there were more."""
        granted = self._machine.granted()
        if self.threads <= granted:
            return False
        self._on_trial = None
        self._change(granted, f"{self.threads} threads, and {_cores(granted)} granted", position)
        return True

    def _decide(self, seen: _Window, elapsed: float, position: Position) -> None:
        if self._on_trial is not None:
            self._judge(seen, position)
            return
        free = free_cores(seen.cpus, seen.others)
        planned = self._most()
        target = min(planned, self._machine.granted(), free)
        if not self._is_free or self._changes >= MOST_CHANGES:
            return
        self._quiet_s = self._quiet_s + elapsed if target > self.threads else 0.0
        is_slow = seen.samples_per_s < SLOWED * self._usual
        self._held = self._held + 1 if target < self.threads and is_slow else 0
        if target == self.threads == planned:
            self._usual = max(self._usual, seen.samples_per_s)
        if self._held >= _HELD_WINDOWS:
            self._on_trial = self.threads, seen.samples_per_s, _WINDOWS_TO_SETTLE
            why = f"other processes use {seen.others:.1f} of {seen.cpus:.0f} CPUs, and the rate fell"
            fell = f"from {format_rate(self._usual)} to {format_rate(seen.samples_per_s)}"
            self._change(target, f"{why} {fell}", position)
        elif self._quiet_s >= self._patience_s:
            self._patience_s *= 2
            self._change(
                target, f"other processes have left {_cores(target)} alone for {self._quiet_s:.0f} s", position
            )

    def _judge(self, seen: _Window, position: Position) -> None:
        """After a reduction has settled: take it back, for good, if it did not help."""
        assert self._on_trial is not None
        threads, rate, windows = self._on_trial
        if windows > 1:
            self._on_trial = threads, rate, windows - 1
            return
        self._on_trial = None
        if seen.samples_per_s < rate:
            self._is_free = False
            made = f"{_threads(self.threads)} made {format_rate(seen.samples_per_s)}"
            why = f"{made}, {threads} made {format_rate(rate)}"
            self._change(threads, why, position)

    def _change(self, threads: int, why: str, position: Position) -> None:
        old = self.threads
        change = Replanned(
            position=position,
            old=dataclasses.replace(self._plan(), threads=old),
            new=dataclasses.replace(self._plan(), threads=threads),
            why=f"{why}; from here on the same mathematics, not bit-equal to a run with {_threads(old)} throughout",
        )
        self._store(change)
        self.threads = threads
        self._machine.set_threads(threads)
        self._held, self._quiet_s, self._changes = 0, 0.0, self._changes + 1
        change.emit(self._tell, position.samples)


def _cores(count: int) -> str:
    return f"{count} core{'' if count == 1 else 's'}"


def _threads(count: int) -> str:
    return f"{count} thread{'' if count == 1 else 's'}"

"""Threads that make room for neighbours, on a machine that does what the test says."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.devices.cpu import CpuSample
from stoker.records import Plan, Position
from stoker.training.threads import MOST_CHANGES, PATIENCE_S, WINDOW_S, Machine, ThreadKeeper

PLAN = Plan(device="cpu", micro_batch=64, threads=2)


class Simulated:
    """Two CPUs: `others` of them are used by somebody else, and the run's rate follows from its threads."""

    def __init__(self, cpus: int = 2, plan: Plan = PLAN, **changes: Any) -> None:
        self.cpus, self.granted, self.others, self.now = cpus, cpus, 0.0, 0.0
        self.busy = self.own = self.stolen = 0.0
        self.threads, self.events = plan.threads, list[dict[str, Any]]()
        self.rates = {True: {1: 55.0, 2: 100.0}, False: {1: 52.0, 2: 30.0}}  # by quiet, then by threads
        self.keeper = ThreadKeeper(
            lambda: plan,
            self.tell,
            usual_samples_per_s=100.0,
            machine=Machine(self.sample, lambda: self.granted, self.set_threads, lambda: self.now),
            **changes,
        )

    def sample(self) -> CpuSample:
        return CpuSample(busy_s=self.busy, stolen_s=self.stolen, total_s=self.cpus * self.now, own_s=self.own)

    def set_threads(self, count: int) -> None:
        self.threads = count

    def tell(self, kind: str, **fields: Any) -> None:
        self.events.append({"kind": kind, **fields})

    def run(self, seconds: float, rate: float | None = None) -> None:
        """Train for so long, with a progress event each half second."""
        for _ in range(round(seconds / 0.5)):
            self.now += 0.5
            own = min(self.threads, self.cpus - self.others) * 0.5
            self.own += own
            self.busy += own + self.others * 0.5
            quiet = self.rates[self.others < 0.4]
            self.keeper.look(rate or quiet[min(self.threads, 2)], Position(samples=round(1000 * self.now)))


def test_a_quiet_machine_keeps_its_threads() -> None:
    """Nothing is reported, whatever the rate does by itself."""
    machine = Simulated()
    machine.run(60)
    machine.run(60, rate=10.0)
    assert (machine.threads, machine.events) == (2, [])


def test_a_neighbour_on_a_core_is_evaded_and_told() -> None:
    """After two windows of a fallen rate: with both plans, the reason in numbers, and what it means for equality."""
    machine = Simulated()
    machine.run(10)
    machine.others = 0.67
    machine.run(2 * WINDOW_S)
    assert machine.threads == 1
    (event,) = machine.events
    assert (event["kind"], event["old"]["threads"], event["new"]["threads"]) == ("replanned", 2, 1)
    assert event["old"] | {"threads": 1} == event["new"]
    assert "other processes use 0.7 of 2 CPUs, and the rate fell from 100 samples/s to 30 samples/s" in event["why"]
    assert "same mathematics, not bit-equal to a run with 2 threads throughout" in event["why"]
    assert event["samples"] == round(1000 * machine.now)
    machine.run(60)
    assert machine.threads == 1, "the neighbour is still there"


def test_a_neighbour_that_costs_nothing_is_left_alone() -> None:
    """A process of low priority fills what is idle: the rate stays, and so do the threads."""
    machine = Simulated()
    machine.others = 0.67
    machine.run(60, rate=97.0)
    assert machine.events == []


def test_one_bad_window_is_no_reason() -> None:
    """A neighbour that comes and goes within seconds is waited out."""
    machine = Simulated()
    for _ in range(5):
        machine.others = 0.67
        machine.run(WINDOW_S)
        machine.others = 0.0
        machine.run(WINDOW_S)
    assert machine.events == []


def test_threads_come_back_when_the_machine_has_been_quiet() -> None:
    """Not at once; and after the next time it takes twice as long."""
    machine = Simulated()
    machine.others = 1.0
    machine.run(10)
    for patience in (PATIENCE_S, 2 * PATIENCE_S):
        assert machine.threads == 1
        machine.others = 0.0
        machine.run(patience - WINDOW_S)
        assert machine.threads == 1
        machine.run(2 * WINDOW_S)
        assert machine.threads == 2
        assert f"have left 2 cores alone for {patience:.0f} s" in machine.events[-1]["why"]
        machine.others = 1.0
        machine.run(10)


def test_a_machine_without_rest_is_left_alone_in_the_end() -> None:
    """So many changes in one process, and no more."""
    machine = Simulated()
    for _ in range(MOST_CHANGES + 2):
        machine.others = 1.0
        machine.run(20)
        machine.others = 0.0
        machine.run(2**MOST_CHANGES * PATIENCE_S)
    assert len(machine.events) == MOST_CHANGES


def test_fewer_threads_that_do_not_help_are_taken_back_for_good() -> None:
    """A model that needs its threads more than it minds the neighbour."""
    machine = Simulated()
    machine.rates[False] = {1: 20.0, 2: 30.0}
    machine.others = 0.67
    machine.run(120)
    assert machine.threads == 2
    assert [event["new"]["threads"] for event in machine.events] == [1, 2]
    assert "1 thread made 20 samples/s, 2 made 30 samples/s" in machine.events[-1]["why"]


@pytest.mark.parametrize("is_free", [True, False])
def test_there_are_never_more_threads_than_cores_are_granted(is_free: bool) -> None:
    """At the start, and when a core is taken away later; even where threads are not given up to neighbours."""
    four = Plan(device="cpu", micro_batch=64, threads=4)
    machine = Simulated(cpus=4, plan=four, is_free=is_free)
    machine.granted = 2
    machine.keeper.start(Position())
    assert machine.threads == 2
    assert "4 threads, and 2 cores granted" in machine.events[-1]["why"]
    machine.granted = 1
    machine.run(WINDOW_S)
    assert machine.threads == 1
    assert "2 threads, and 1 core granted" in machine.events[-1]["why"]


def test_threads_that_are_not_free_stay_beside_a_neighbour() -> None:
    """Of a compiled plan, or a job that asks for deterministic algorithms."""
    machine = Simulated(is_free=False)
    machine.others = 1.0
    machine.run(60)
    assert (machine.threads, machine.events) == (2, [])


def test_cores_that_nobody_of_ours_could_use_are_no_loss() -> None:
    """Two threads on eight CPUs, of which others use five."""
    machine = Simulated(cpus=8)
    machine.granted, machine.others = 2, 5.0
    machine.run(60, rate=10.0)
    assert machine.events == []


def test_a_run_planned_among_others_begins_with_the_threads_they_left_and_takes_the_rest_later() -> None:
    """Where others used 91 % of two CPUs during planning, one thread begins at once; two compute once it is quiet."""
    machine = Simulated(others_share=0.91)
    machine.others = 1.8
    machine.keeper.start(Position())
    assert machine.threads == 1
    (event,) = machine.events
    assert "other processes use 91% of the CPU" in event["why"]
    machine.run(10)
    assert machine.threads == 1
    machine.others = 0.0
    machine.run(PATIENCE_S + 2 * WINDOW_S)
    assert machine.threads == 2


def test_a_run_that_must_be_bit_equal_begins_with_all_its_threads_among_others_too() -> None:
    """What may not be given up is not given up at the start either."""
    machine = Simulated(others_share=0.91, is_free=False)
    machine.keeper.start(Position())
    assert (machine.threads, machine.events) == (2, [])

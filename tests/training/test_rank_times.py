"""Where the time of updates goes on one process of several."""

from __future__ import annotations

import time
from dataclasses import replace
from statistics import median

import pytest
import torch

from stoker.errors import RunFailed
from stoker.loading.batches import BatchSource
from stoker.loading.datasets import datasets_of
from stoker.records import Layout, Plan, Position, RankTimes, dumps
from stoker.records.bottleneck import FIRST_IN_FULL, PARTS
from stoker.reporting.rank_section import merged
from stoker.stepping.step import Step
from stoker.stepping.world import World
from stoker.testing import FakeClock
from stoker.testing.ranks import on_ranks
from stoker.training.rank_times import MOST_SAMPLED, HostTimestamps, RankClock, rank_clock
from tests.stepping.driving import SEPARABLE
from tests.stepping.layouts.conformance import gpt_job

DELAY_S = 0.04
"""For which one process sleeps in each of its passes."""


class Driven:
    """A RankClock by a clock that the test moves, and updates made on it."""

    def __init__(self, **settings: object) -> None:
        self.clock = FakeClock(100.0)
        self.rank = RankClock(
            rank=0, size=2, worker=0, first_update=5, moments=HostTimestamps(self.clock), host="here", **settings
        )  # type: ignore[arg-type]

    def update(self, *, data: float = 0.0, compute: float, blocked: float = 0.0, optimiser: float = 0.0) -> None:
        """One update as a replicated layout makes it."""
        self.clock.advance(data)
        self.rank.lap("data")
        self.clock.advance(compute)
        self.rank.mark("computed")
        self.clock.advance(blocked)
        self.rank.mark("summing")
        self.rank.mark("agreed")
        self.clock.advance(optimiser)
        self.rank.lap("update")


def test_the_parts_of_an_update_are_told_apart() -> None:
    """Own work ends with the last gradient; what follows until all agree is blocked, the rest the optimiser's."""
    driven = Driven()
    with driven.rank.running():
        driven.update(data=1.0, compute=2.0, blocked=0.5, optimiser=0.25)
        driven.clock.advance(0.125)
        driven.rank.lap("update")  # a second one belongs to no update
        driven.clock.advance(3.0)
        driven.rank.lap("evaluation")
        driven.update(compute=4.0)
    found = driven.rank.times()
    assert found.parts_s == {
        "compute": 6.0,
        "blocked": 0.5,
        "optimiser": 0.25,
        "data": 1.0,
        "evaluation": 3.0,
        "checkpoint": 0.0,
        "other": 0.125,
    }
    assert found.updates == 2
    assert found.sample.update == (5, 6)
    assert found.sample.began_s == (101.0, 106.875)
    assert found.sample.data_s == (1.0, 0.0)


def test_waits_within_passes_are_no_compute() -> None:
    """What a layout waits for before and after its own work is done counts as blocked, once."""
    driven = Driven()
    with driven.rank.running():
        driven.rank.lap("data")
        driven.clock.advance(1.0)
        driven.rank.waits.total_s += 0.25
        driven.rank.mark("computed")
        driven.clock.advance(0.5)
        driven.rank.waits.total_s += 0.5  # by the same stretch of time
        driven.rank.mark("agreed")
        driven.clock.advance(0.5)
        driven.rank.waits.total_s += 0.125
        driven.rank.lap("update")
    found = driven.rank.times().parts_s
    assert (found["compute"], found["blocked"], found["optimiser"]) == (0.75, 0.875, 0.375)


def test_passes_that_are_not_seen_end_where_losses_are_summed() -> None:
    """A layout with backward passes of its own marks only that; without any mark all is compute."""
    driven = Driven()
    with driven.rank.running():
        driven.rank.lap("data")
        driven.clock.advance(1.0)
        driven.rank.mark("summing")
        driven.clock.advance(0.5)
        driven.rank.mark("agreed")
        driven.rank.lap("update")
        driven.rank.lap("data")
        driven.clock.advance(2.0)
        driven.rank.lap("update")
    found = driven.rank.times().parts_s
    assert (found["compute"], found["blocked"], found["optimiser"]) == (3.0, 0.5, 0.0)


@pytest.mark.slow
def test_a_long_run_is_sampled_alike_everywhere_and_stays_small() -> None:
    """All processes keep the same updates, the first ones among them, and a file stays below 1 MB."""
    one, other = Driven(), Driven()
    for driven, updates in ((one, 3 * MOST_SAMPLED), (other, 3 * MOST_SAMPLED - 7)):
        with driven.rank.running():
            for _ in range(updates):
                driven.update(data=0.1, compute=0.123457, blocked=0.03, optimiser=0.01)
    kept, others = one.rank.times().sample.update, other.rank.times().sample.update
    assert others == tuple(update for update in kept if update < 5 + 3 * MOST_SAMPLED - 7)
    assert kept[:FIRST_IN_FULL] == tuple(range(5, 5 + FIRST_IN_FULL))
    assert MOST_SAMPLED / 2 < len(kept) <= MOST_SAMPLED
    assert one.rank.times().updates == 3 * MOST_SAMPLED
    assert len(dumps(one.rank.times(), indent=None)) < 1_000_000


def test_what_is_known_is_written_at_the_end_also_of_an_error() -> None:
    """A process that fails leaves what it noted."""
    written: list[RankTimes] = []
    driven = Driven(write=written.append)

    def fail() -> None:
        with driven.rank.running():
            driven.update(compute=1.0)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert written[-1].updates == 1


def test_a_full_disk_does_not_end_the_training() -> None:
    """Times that cannot be written are reported as a problem, and not tried again."""
    tried: list[int] = []

    def write(times: RankTimes) -> None:
        tried.append(times.updates)
        raise RunFailed("the disk is full")

    driven = Driven(write=write)
    for _ in range(2):
        with driven.rank.running():
            driven.update(compute=1.0)
    assert (driven.rank.problem, tried) == ("the disk is full", [1])


def _noted(world: World, slow: int, updates: int) -> RankTimes:
    """Train a GPT in this process, with rank number `slow` held up in its last block; what it noted."""
    clock = rank_clock(world, worker=world.rank + 5, device=torch.device("cpu"))
    world = replace(world, mark=clock.mark)
    job = gpt_job()
    step = Step(job, Plan(device="cpu", micro_batch=8, layout=world.layout), SEPARABLE, world=world)
    if world.rank == slow:
        step.model.get_submodule("blocks.1").register_forward_pre_hook(lambda *_: time.sleep(DELAY_S))
    data = datasets_of(job)
    source = BatchSource(
        data.train,
        step.pipeline(data.train, augmented=True),
        data.extent(job),
        job.seed,
        step.plan,
        split=world.split(SEPARABLE),
    )
    with clock.running():
        for update, batch in enumerate(source.batches(Position(), updates)):
            clock.lap("data")
            step.update(batch, update, 0.0)
            clock.lap("update")
    return clock.times()


LAYOUTS = {
    "replicated": Layout(replicas=2),
    "sharded": Layout(shards=2),
    "tensor": Layout(tensor=2),
    "stages": Layout(stages=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_slow_one_of_two_processes_is_named(layout: str) -> None:
    """The delay of one process is the other's waiting, and not its compute."""
    updates = 9
    found = merged(on_ranks(LAYOUTS[layout], _noted, 1, updates))
    assert found is not None
    assert found.slowest.times.rank == 1
    waiting = [median(update.lanes[rank].waiting_s for update in found.updates) for rank in (0, 1)]
    assert waiting[0] > waiting[1]
    fast, slow = found.ranks
    assert slow.slowest_in > 0.5
    assert slow.parts_s["compute"] > updates * DELAY_S  # it slept in passes of its own, once an update at least
    assert set(fast.times.parts_s) == set(PARTS)
    assert (fast.times.worker, slow.times.worker) == (5, 6)
    assert fast.times.began_at == slow.times.began_at > 0

"""The scheduler as a whole, in simulated time."""

from __future__ import annotations

import math
import random

import pytest

from stoker.records import ServiceSettings
from stoker.serving.batching.queue import Shapes
from stoker.serving.batching.scheduler import RequestBatch, Scheduler, Wait
from tests.serving.batching.models import TOKENS, token_inputs
from tests.serving.batching.simulation import Asking, Outcome, simulate, transformer, warmed


def _ask(
    scheduler: Scheduler, rows: int = 1, *, now: float = 0.0, deadline: float = math.inf, num_bytes: int = 0
) -> None:
    scheduler.admit(
        "me", token_inputs(rows, 8), now=now, deadline=deadline, priority=0, caller="me", num_bytes=num_bytes
    )


def _scheduler(**settings: float) -> Scheduler:
    return Scheduler(Shapes(TOKENS), ServiceSettings(**settings), 1)


def test_an_idle_instance_takes_what_comes_at_once() -> None:
    """Without a delay set, one row goes alone."""
    scheduler = _scheduler()
    assert scheduler.take(0, 0.0) is None
    _ask(scheduler)
    batch = scheduler.take(0, 0.0)
    assert isinstance(batch, RequestBatch)
    assert (batch.rows, batch.reason, batch.sizes) == (1, "idle", (8,))


def test_with_a_delay_an_idle_instance_waits_for_a_batch_to_fill() -> None:
    """Until the first has waited so long, or the batch is full."""
    scheduler = _scheduler(max_delay_s=0.5, max_batch_rows=4)
    _after_company(scheduler, 3, now=0.9)
    _ask(scheduler, now=1.0)
    _ask(scheduler, now=1.2)
    assert scheduler.take(0, 1.2) == Wait(1.5)
    delayed = scheduler.take(0, 1.5)
    assert isinstance(delayed, RequestBatch)
    assert (delayed.rows, delayed.reason) == (2, "delay")
    _ask(scheduler, 4, now=2.0)
    full = scheduler.take(0, 2.0)
    assert isinstance(full, RequestBatch)
    assert full.rows == 4


def _after_company(scheduler: Scheduler, rows: int, now: float) -> None:
    """So many rows are asked for at once, and answered."""
    _ask(scheduler, rows, now=now)
    assert isinstance(scheduler.take(0, now), RequestBatch)
    assert scheduler.take(0, now) is None


def test_nobody_waits_for_more_than_asked_at_the_same_time_lately() -> None:
    """A lone caller goes at once whatever the delay; of three callers two wait, until the third has asked."""
    scheduler = _scheduler(max_delay_s=0.5, max_batch_rows=8)
    for now in (0.0, 0.1):
        _after_company(scheduler, 1, now)
    _after_company(scheduler, 3, now=1.0)
    _ask(scheduler, now=1.2)
    _ask(scheduler, now=1.2)
    assert scheduler.take(0, 1.2) == Wait(1.7)
    _ask(scheduler, now=1.3)
    batch = scheduler.take(0, 1.3)
    assert isinstance(batch, RequestBatch)
    assert (batch.rows, batch.reason) == (3, "idle")


def test_a_delay_ends_in_time_for_a_deadline() -> None:
    """Waiting for others makes no request late."""
    scheduler = _scheduler(max_delay_s=0.5, max_batch_rows=4)
    _after_company(scheduler, 2, now=0.0)
    scheduler.table.learn(4, 8, 0.1, 0.0)
    _ask(scheduler, deadline=0.3)
    assert scheduler.take(0, 0.0) == Wait(pytest.approx(0.2))


def test_a_large_request_goes_in_parts_that_share_its_bytes() -> None:
    """Rows beyond a batch are split, none lost; their bytes add up."""
    scheduler = _scheduler(max_batch_rows=4)
    _ask(scheduler, 10, num_bytes=101)
    parts = list(scheduler.queue.parts())
    assert [part.rows for part in parts] == [4, 4, 2]
    assert [part.index for part in parts] == [0, 1, 2]
    assert sum(part.num_bytes for part in parts) == scheduler.queue.num_bytes == 101


def test_what_waits_beyond_its_deadline_is_given_back_with_the_next_one() -> None:
    """So that a timer can be set, and those who wait get their error in time."""
    scheduler = _scheduler()
    for deadline in (3.0, 1.0, 2.0):
        _ask(scheduler, deadline=deadline)
    late, following = scheduler.expire(2.0)
    assert sorted(part.deadline for part in late) == [1.0, 2.0]
    assert following == 3.0
    assert scheduler.queue.rows == 1


def _overload(times: float, *, within: float) -> Outcome:
    """Five seconds of random requests, at so many times what one instance can do."""
    capacity = 1 / (sum(transformer(1, length) for length in range(8, 129)) / 121)
    draw, now, askings = random.Random(1), 0.0, []
    while now < 5.0:
        now += draw.expovariate(times * capacity)
        askings.append(Asking(now, draw.randint(8, 128), within_s=within))
    return simulate(warmed(ServiceSettings(), transformer), askings, transformer)


def test_twice_the_load_gives_no_less_good_answers() -> None:
    """Overloaded, the service refuses early and answers in time: at least nine tenths of its best, few too late."""
    full, twice = _overload(1.0, within=0.2), _overload(2.0, within=0.2)
    assert twice.in_time / twice.seconds >= 0.9 * full.in_time / full.seconds
    assert twice.late + twice.passed <= 0.02 * twice.answered
    assert twice.refused["would_be_late"] > 0


def test_every_simulated_request_ends_once_and_the_queue_is_empty_then() -> None:
    """Answered, refused or too late: they add up, and the accounts return to zero."""
    draw = random.Random(2)
    askings = [
        Asking(
            draw.uniform(0, 2),
            draw.randint(1, 128),
            rows=draw.choice([1, 1, 3, 40]),
            within_s=draw.choice([0.05, 0.5, math.inf]),
            priority=draw.randint(0, 4),
            caller=draw.choice("abc"),
        )
        for _ in range(300)
    ]
    scheduler = warmed(ServiceSettings(max_queue_rows=200, max_caller_share=0.5), transformer, instances=2)
    outcome = simulate(scheduler, askings, transformer, instances=2)
    parts = sum(len(batch.parts) for batch in outcome.batches)
    split = sum(-(-asking.rows // 32) - 1 for asking in askings)
    assert parts == outcome.answered
    assert len(askings) <= outcome.answered + outcome.passed + sum(outcome.refused.values()) <= len(askings) + split
    assert outcome.most_rows <= 200
    assert (scheduler.queue.rows, scheduler.queue.num_bytes, scheduler.queue.num_parts) == (0, 0, 0)
    assert not scheduler.queue.rows_of

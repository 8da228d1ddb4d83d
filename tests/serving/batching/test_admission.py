"""Who is let in, and the reason the others get."""

from __future__ import annotations

import math
import re

import pytest

from stoker.records import ServiceSettings
from stoker.serving.batching.queue import STALE_S, Margin, Shapes
from stoker.serving.batching.scheduler import RequestBatch, Scheduler
from stoker.serving.refusals import DeadlineUnreachable, QueueFull, TooLarge
from tests.serving.batching.models import FIXED, TOKENS, token_inputs


def _scheduler(*, row_s: float | None = 0.01, instances: int = 1, **settings: float) -> Scheduler:
    """A scheduler of batches of at most 4 rows, each of which takes `row_s`."""
    scheduler = Scheduler(Shapes(TOKENS), ServiceSettings(**({"max_batch_rows": 4} | settings)), instances)
    if row_s is not None:
        for rows in scheduler.table.grid:
            scheduler.table.learn(rows, 8, rows * row_s, 0.0)
    return scheduler


def _ask(scheduler: Scheduler, *, rows: int = 1, within: float = math.inf, caller: str = "", now: float = 0.0) -> None:
    scheduler.admit(
        None, token_inputs(rows, 8), now=now, deadline=now + within, priority=0, caller=caller, num_bytes=100
    )


def test_rows_beyond_the_queue_are_refused_with_the_time_until_it_is_empty() -> None:
    """429, both numbers, and when to come back."""
    scheduler = _scheduler(max_queue_rows=10)
    _ask(scheduler, rows=9)
    with pytest.raises(
        QueueFull, match=r"9 rows wait, and with this request's 2 .* max_queue_rows, 10; .* 90 ms"
    ) as it:
        _ask(scheduler, rows=2)
    assert it.value.http_status == 429
    assert it.value.retry_after_s == pytest.approx(0.09)
    _ask(scheduler, rows=1)


def test_bytes_beyond_the_queue_are_refused() -> None:
    """Few rows may be many bytes."""
    scheduler = _scheduler(max_queue_bytes=250)
    _ask(scheduler)
    _ask(scheduler)
    with pytest.raises(QueueFull, match=r"200 B wait, and with this request's 100 B .* max_queue_bytes, 250 B"):
        _ask(scheduler)


def test_what_could_never_wait_is_too_large() -> None:
    """A request larger than the whole queue gets that reason, whatever waits; coming again would not help."""
    with pytest.raises(TooLarge, match=r"11 rows, and the queue holds 10"):
        _ask(_scheduler(max_queue_rows=10), rows=11)
    with pytest.raises(TooLarge, match=r"100 B, and the queue holds 99 B"):
        _ask(_scheduler(max_queue_bytes=99))


def test_a_caller_cannot_take_more_than_its_share() -> None:
    """Others still get in; and those without a key are bounded by the queue alone."""
    scheduler = _scheduler(max_queue_rows=10, max_caller_share=0.5)
    _ask(scheduler, rows=4, caller="greedy")
    with pytest.raises(QueueFull, match=r"share of 'greedy' .* 6 rows .* may hold 5 rows"):
        _ask(scheduler, rows=2, caller="greedy")
    _ask(scheduler, rows=2, caller="other")
    _ask(scheduler, rows=4)


def test_an_answer_that_would_be_late_is_refused_at_once() -> None:
    """503: what waits and what runs count, with both times in the message and when it would do."""
    scheduler = _scheduler()
    _ask(scheduler, rows=8, within=1.0)
    assert isinstance(scheduler.take(0, 0.0), RequestBatch)
    with pytest.raises(
        DeadlineUnreachable, match=r"predicted in (\d+) ms \(4 rows wait\), and its deadline is in 50 ms"
    ) as it:
        _ask(scheduler, within=0.05)
    assert it.value.http_status == 503
    (predicted,) = re.findall(r"predicted in (\d+) ms", str(it.value))
    assert 90 <= int(predicted) <= 130  # 90 ms, and the margin
    assert it.value.retry_after_s == pytest.approx(int(predicted) / 1e3 - 0.05, abs=1e-3)
    _ask(scheduler, within=0.2)


def test_instances_share_what_waits() -> None:
    """Two engines are through in half the time."""
    one, two = _scheduler(), _scheduler(instances=2)
    for scheduler in (one, two):
        _ask(scheduler, rows=40, within=1.0)
    assert two._standing.seconds_to_empty(0.0) == pytest.approx(one._standing.seconds_to_empty(0.0) / 2)
    with pytest.raises(DeadlineUnreachable):
        _ask(one, within=0.3)
    _ask(two, within=0.3)
    two.lose(1)  # it died, and counts no more
    assert two._standing.seconds_to_empty(0.0) == pytest.approx(one._standing.seconds_to_empty(0.0), rel=0.1)


def test_before_anything_was_measured_nobody_is_refused_for_lateness() -> None:
    """What is not known is not held against anyone."""
    _ask(_scheduler(row_s=None), within=1e-6)


def test_a_refusal_rests_on_fresh_measurements() -> None:
    """One slow batch must not close the door for good: after a second without news, one request is let through."""
    scheduler = _scheduler(row_s=0.05)
    with pytest.raises(DeadlineUnreachable):
        _ask(scheduler, within=0.01, now=STALE_S)
    _ask(scheduler, within=0.01, now=STALE_S + 0.1)
    with pytest.raises(DeadlineUnreachable):
        _ask(scheduler, within=0.01, now=STALE_S + 0.1)


def test_slow_models_are_not_stale_while_they_compute() -> None:
    """A batch of seconds is news for ten times as long."""
    with pytest.raises(DeadlineUnreachable):
        _ask(_scheduler(row_s=2.0), within=1.0, now=19.0)


def test_the_margin_follows_how_far_predictions_were_off() -> None:
    """Answers that come later than predicted, and scatter, ask for more room; and it forgets."""
    margin = Margin()
    for index in range(100):
        margin.learn(1.0, 1.5 + index % 2)
    assert margin.allowed_s(1.0) == pytest.approx(2.0 + 2 * 0.5, abs=0.3)
    for _ in range(100):
        margin.learn(1.0, 1.0)
    assert margin.allowed_s(1.0) == pytest.approx(1.0, abs=0.05)


def test_one_stall_of_a_short_answer_does_not_close_the_door_to_others() -> None:
    """A millisecond that took a second says little about what may take a quarter of one."""
    margin = Margin()
    margin.learn(0.001, 1.0)
    assert margin.allowed_s(0.1) < 0.102


def test_an_idle_instance_takes_what_it_can_finish_in_time() -> None:
    """Whatever happened before, the margin refuses no request while nothing is to be done."""
    scheduler = _scheduler()
    for _ in range(20):
        scheduler.margin.learn(1.0, 3.0)
    _ask(scheduler, within=0.02)
    with pytest.raises(DeadlineUnreachable):
        _ask(scheduler, within=0.02)


def test_a_request_without_a_deadline_is_never_late() -> None:
    """It waits as long as the queue's bounds allow."""
    scheduler = Scheduler(Shapes(FIXED), ServiceSettings(), 1)
    scheduler.table.learn(1, 1, 1e6, 0.0)
    scheduler.admit(
        None, {"x": token_inputs(1, 4)["input_ids"]}, now=0.0, deadline=math.inf, priority=0, caller="", num_bytes=1
    )
    assert scheduler.queue.rows == 1

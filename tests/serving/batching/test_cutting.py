"""What goes into a batch, and why it ends there."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.records import ServiceSettings
from stoker.serving.batching import queue as shapes
from stoker.serving.batching import scheduler as cutting
from stoker.serving.batching.queue import LatencyTable, Queue, RequestPart, Shapes, urgency_of
from stoker.serving.batching.scheduler import BatchSelection, select_batch
from tests.serving.batching.models import TOKENS
from tests.serving.batching.simulation import Asking, Latency, simulate, transformer, warmed

SHAPES = Shapes(TOKENS)
LENGTHS = (8, 128)


def overhead(rows: int, length: int) -> float:
    """An accelerator: most of a small batch's time is the same for any."""
    return 10e-3 + rows * length * 1e-6


def _table(latency: Latency, max_rows: int = 32) -> LatencyTable:
    table = LatencyTable(max_rows)
    for length in (8, 16, 32, 64, 128):
        for rows in table.grid:
            table.learn(rows, length, latency(rows, length), 0.0)
    return table


def _queue(*lengths: int, rows: int = 1, deadline: float = math.inf) -> Queue:
    queue = Queue()
    for index, length in enumerate(lengths):
        shape = SHAPES.sample((), (length,))
        arrived = index * 1e-6
        queue.put(RequestPart(index, 0, {}, rows, 1, shape, "", arrived, deadline, urgency_of(0, arrived, deadline)))
    return queue


def _cut(queue: Queue, table: LatencyTable, *, max_rows: int = 32, now: float = 0.0) -> BatchSelection:
    found = select_batch(queue, table, max_rows, now)
    assert found is not None
    return found


def _lengths(found: BatchSelection) -> list[int]:
    return [part.shape.sizes[0] for part in found.parts]


def test_nothing_waits_nothing_goes() -> None:
    """An empty queue gives no batch."""
    assert select_batch(Queue(), LatencyTable(8), 8, 0.0) is None


def test_where_a_batch_costs_little_more_than_a_row_all_go_together() -> None:
    """Lengths do not matter to an engine that takes 10 ms for anything."""
    found = _cut(_queue(8, 128, 40, 9), _table(overhead))
    assert sorted(_lengths(found)) == [8, 9, 40, 128]
    assert found.reason == "idle"


def test_where_padding_costs_more_than_it_saves_lengths_go_apart() -> None:
    """The oldest always goes; long ones do not go with a short one, nor short ones with a long one."""
    table = _table(transformer)
    found = _cut(_queue(8, 128, 8, 128, 120), table)
    assert _lengths(found) == [8, 8]
    assert found.reason == "shape"
    assert set(_lengths(_cut(_queue(128, 8, 8, 8), table))) == {128}


def test_rows_that_are_slower_together_go_apart() -> None:
    """Where eight rows take longer than twice four, four go: what is measured decides, not the limit."""

    def cliff(rows: int, length: int) -> float:
        return length * 1e-4 * (1 + rows * (0.5 if rows <= 4 else 2.0))

    found = _cut(_queue(*[16] * 16), _table(cliff))
    assert len(found.parts) == 4
    assert found.reason == "pace"


def proportional(rows: int, length: int) -> float:
    """A CPU that takes twice as long for two as for one."""
    return rows * length * 1e-4


@pytest.mark.parametrize(
    ("waiting", "rows", "reason"), [(16, 8, "pace"), (32, 8, "pace"), (33, 32, "full"), (200, 32, "full")]
)
def test_where_rows_are_as_fast_apart_a_backlog_goes_in_full_batches(waiting: int, rows: int, reason: str) -> None:
    """With no more waiting than a batch holds, some stay behind, so that the next batch overlaps with the answers."""
    found = _cut(_queue(*[16] * waiting), _table(proportional))
    assert (len(found.parts), found.reason) == (rows, reason)


def test_a_full_batch_is_tried_whatever_the_table_says() -> None:
    """What was slow once is measured again, if there is enough for it, and else not."""
    table = LatencyTable(32)
    for rows in table.grid:
        table.learn(rows, 16, (5 if rows > 4 else 1) * proportional(rows, 16), 0.0)
    assert len(_cut(_queue(*[16] * 64), table).parts) == 4
    tried = select_batch(_queue(*[16] * 64), table, 32, 0.0, tries_full=True)
    assert tried is not None
    assert (len(tried.parts), tried.reason) == (32, "full")
    few = select_batch(_queue(*[16] * 31), table, 32, 0.0, tries_full=True)
    assert few is not None
    assert len(few.parts) == 4


def test_a_table_that_was_wrong_at_warm_up_is_found_out_under_load() -> None:
    """A machine that was busy then made full batches look three times as slow; after a while they are full again."""

    def busy(rows: int, length: int) -> float:
        return (3 if rows > 4 else 1) * proportional(rows, length)

    scheduler = warmed(ServiceSettings(max_batch_rows=32), busy)
    asked = [Asking(0.0, 16) for _ in range(128)]
    outcome = simulate(scheduler, asked, proportional, again=lambda _asked, now: Asking(now, 16), until=20.0)
    assert outcome.batches[1].rows == 4
    assert [batch.rows for batch in outcome.batches[-40:]] == [32] * 40


def test_a_batch_has_at_most_its_rows() -> None:
    """Rows count, not requests; what does not fit waits, what does may pass it."""
    queue = _queue(16, 16, 16, rows=3)
    found = _cut(queue, _table(overhead, 8), max_rows=8)
    assert sum(part.rows for part in found.parts) == 6
    assert (found.reason, queue.rows) == ("full", 3)


def test_before_anything_is_measured_equal_shapes_go_together() -> None:
    """Without a table there is no reason to pad, and none to hold back."""
    found = _cut(_queue(16, 100, 16, 16), LatencyTable(32))
    assert _lengths(found) == [16, 16, 16]


def test_those_whose_deadline_passed_do_not_go() -> None:
    """They are given back to be refused, the head among them."""
    queue = _queue(16, 16, deadline=1.0)
    for part in _queue(16, 16).parts():
        queue.put(part)
    found = _cut(queue, _table(overhead), now=1.0)
    assert (len(found.parts), len(found.late)) == (2, 2)
    assert queue.rows == 0


def test_a_batch_ends_where_one_of_its_requests_would_be_late() -> None:
    """With all 16, the first would miss its deadline, which it can keep among fewer."""
    queue = _queue(*[64] * 15)
    urgent = 8 * 64 * 1e-4
    shape = SHAPES.sample((), (64,))
    queue.put(RequestPart("urgent", 0, {}, 1, 1, shape, "", 0.0, urgent, urgency_of(0, 0.0, urgent)))

    def flat(rows: int, length: int) -> float:
        return 0.02 + rows * length * 1e-4

    found = _cut(queue, _table(flat))
    assert found.parts[0].owner == "urgent"
    assert found.reason == "deadline"
    assert flat(sum(part.rows for part in found.parts), 64) <= urgent
    assert queue.rows == 16 - len(found.parts) > 0


def test_a_deadline_that_cannot_be_kept_holds_nobody_back() -> None:
    """What will be late anyway is not computed, and does not shrink the batch of the others."""
    queue = _queue(*[64] * 8)
    lost = _queue(64, deadline=1e-3).head()
    assert lost is not None
    queue.put(lost)
    found = _cut(queue, _table(overhead))
    assert found.late == [lost]
    assert len(found.parts) == 8


@given(
    st.lists(st.tuples(st.integers(1, 128), st.integers(1, 8), st.floats(0.001, 2)), min_size=1, max_size=40),
    st.sampled_from([transformer, overhead]),
    st.integers(8, 32),
)
def test_every_part_goes_exactly_once_and_the_most_urgent_first(
    asked: list[tuple[int, int, float]], latency: Latency, max_rows: int
) -> None:
    """Batches never exceed their rows, hold the most urgent that can be in time, and nothing is lost or doubled."""
    queue, table, parts = Queue(), _table(latency, max_rows), []
    for length, rows, deadline in asked:
        shape = SHAPES.sample((), (length,))
        parts.append(RequestPart(None, 0, {}, rows, 1, shape, "", 0.0, deadline, urgency_of(0, 0.0, deadline)))
        queue.put(parts[-1])
    gone: list[RequestPart] = []
    while (head := queue.head()) is not None:
        found = _cut(queue, table, max_rows=max_rows)
        assert head in (*found.parts[:1], *found.late)
        assert sum(part.rows for part in found.parts) <= max_rows
        gone += found.parts + found.late
    assert sorted(map(id, gone)) == sorted(map(id, parts))
    assert queue.rows == 0


def _closed_loop(clients: int, latency: Latency, seconds: float) -> float:
    """Answers a second to clients that each ask again, with another length, once they were answered."""
    lengths = random.Random(0)
    outcome = simulate(
        warmed(ServiceSettings(), latency),
        [Asking(0.0, lengths.randint(*LENGTHS)) for _ in range(clients)],
        latency,
        again=lambda _asked, now: Asking(now, lengths.randint(*LENGTHS)),
        until=seconds,
    )
    return outcome.answered / outcome.seconds


def _without_an_eye_for_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """What others do: first come, first served, padded to the longest."""

    def everything(lane, head, table, max_rows):
        (shelf,) = lane.values()
        return cutting.BatchComposition(max_rows, (shelf,), 0.0, 0.0)

    monkeypatch.setattr(shapes, "round_up", lambda _size: LENGTHS[1])
    monkeypatch.setattr(cutting, "choose_composition", everything)


def test_mixed_lengths_gain_over_padding_all_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a transformer's latencies, 64 clients get half as many answers again as from one batch of all that waits."""
    ours = _closed_loop(64, transformer, 10.0)
    _without_an_eye_for_lengths(monkeypatch)
    assert ours >= 1.5 * _closed_loop(64, transformer, 10.0)


def test_on_an_accelerator_nothing_is_lost_by_choosing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a batch of 32 takes hardly longer than one row, batches are as full as those of who never chooses."""
    ours = _closed_loop(64, overhead, 5.0)
    _without_an_eye_for_lengths(monkeypatch)
    assert ours >= 0.98 * _closed_loop(64, overhead, 5.0)

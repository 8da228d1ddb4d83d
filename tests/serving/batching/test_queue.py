"""The order and the accounts of what waits."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from stoker.serving.batching.queue import AGEING_S, LAST_CLASS, Queue, RequestPart, SampleShape, urgency_of

SHAPES = [SampleShape((), (size,), (size,), size) for size in (8, 16)] + [SampleShape((3,), (8,), (8,), 24)]


def part(
    *,
    arrived: float = 0.0,
    deadline: float = math.inf,
    priority: int = 0,
    rows: int = 1,
    shape: int = 0,
    caller: str = "",
) -> RequestPart:
    """A part with bytes ten times its rows."""
    urgency = urgency_of(priority, arrived, deadline)
    return RequestPart(None, 0, {}, rows, 10 * rows, SHAPES[shape], caller, arrived, deadline, urgency)


def _drained(queue: Queue) -> list[RequestPart]:
    order = []
    while (head := queue.head()) is not None:
        assert queue.remove(head)
        order.append(head)
    return order


def test_equals_go_in_the_order_they_came() -> None:
    """Without deadlines and priorities, first come, first served: over all shapes."""
    queue, parts = Queue(), [part(shape=index % 3) for index in range(6)]
    for one in parts:
        queue.put(one)
    assert _drained(queue) == parts


def test_within_a_class_the_earliest_deadline_goes_first() -> None:
    """Among requests of one priority."""
    queue = Queue()
    late, early = part(deadline=0.5), part(arrived=0.1, deadline=0.2, shape=1)
    queue.put(late)
    queue.put(early)
    assert _drained(queue) == [early, late]


def test_a_higher_class_goes_before_an_earlier_deadline() -> None:
    """Priority 1 before the default, and that before priority 3."""
    queue = Queue()
    background, default, urgent = part(deadline=0.1, priority=3), part(deadline=0.1), part(deadline=0.9, priority=1)
    for one in (background, default, urgent):
        queue.put(one)
    assert _drained(queue) == [urgent, default, background]


def test_what_is_put_back_has_its_old_place() -> None:
    """A part that did not fit into a batch does not lose its turn."""
    queue, first, second = Queue(), part(), part()
    queue.put(first)
    queue.put(second)
    queue.remove(first)
    queue.put_back(first)
    assert _drained(queue) == [first, second]


@given(st.integers(0, 20), st.floats(0, 100), st.floats(0, 10), st.integers(0, 20), st.floats(0, 10))
def test_nothing_that_comes_later_than_the_ageing_is_ahead(
    priority: int, arrived: float, within: float, other: int, other_within: float
) -> None:
    """However urgent and frequent others are, they come behind what has waited for its class's share of ageing."""
    mine = urgency_of(priority, arrived, arrived + within)
    other_arrived = arrived + LAST_CLASS * AGEING_S
    assert mine <= urgency_of(other, other_arrived, other_arrived + other_within)


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["put", "remove", "head"]), st.integers(0, 5), st.floats(0, 5), st.integers(0, 2)),
    max_size=60,
)


@given(ACTIONS)
def test_accounts_are_those_of_what_is_there(actions: list[tuple[str, int, float, int]]) -> None:
    """After any puts and removals: rows, bytes, callers and shelves are those of the parts that wait."""
    queue, there = Queue(), []
    for action, number, deadline, shape in actions:
        if action == "put":
            one = part(deadline=deadline, rows=number + 1, shape=shape, caller="ab"[number % 2])
            queue.put(one)
            there.append(one)
        elif action == "remove" and there:
            one = there.pop(number % len(there))
            assert queue.remove(one)
            assert not queue.remove(one)
        elif (head := queue.head()) is not None:
            assert head.urgency == min(one.urgency for one in there)
        assert queue.num_parts == len(there)
        assert queue.rows == sum(one.rows for one in there)
        assert queue.num_bytes == sum(one.num_bytes for one in there)
        for caller in "ab":
            assert queue.rows_of[caller] == sum(one.rows for one in there if one.caller == caller)
        assert sorted(map(id, queue.parts())) == sorted(map(id, there))
        assert all(shelf.entries and shelf.rows for shelf in queue.shelves())
    for one in there:
        queue.remove(one)
    assert not queue.lanes
    assert (queue.rows, queue.num_bytes, queue.num_parts) == (0, 0, 0)
    assert not queue.rows_of
    assert not queue.bytes_of

"""What a run elsewhere costs, and when it has to stop."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from stoker.errors import BadJob
from stoker.launching.launcher import LaunchTarget, Offer, Request
from stoker.launching.meter import Meter, most_seconds, price_there, spent_of
from stoker.records import Event, LaunchState
from tests.launching.kinds.fake_place import FakePlace
from tests.reporting import story

TEN = 1_795_600_800.0


def state(phase: str, after_s: float) -> LaunchState:
    """A state, some seconds after ten o'clock."""
    at = datetime.fromtimestamp(TEN + after_s, UTC).isoformat()
    return LaunchState(phase=phase, why="", at=at)  # type: ignore[arg-type]


def event(kind: str, after_s: float) -> Event:
    """An event of the run."""
    return Event(kind=kind, at=TEN + after_s)  # type: ignore[arg-type]


def test_only_time_in_which_devices_are_held_costs() -> None:
    """The queue does not, nor does the wait after a preemption; the order of arrival does not matter."""
    seen = [
        state("queued", 0),
        state("starting", 100),
        event("started", 110),
        event("progress", 200),
        event("stopped", 210),
        state("preempted", 212),
        state("requeued", 230),
        event("started", 400),
        event("progress", 450),
        event("finished", 460),
        state("finished", 461),
    ]
    for order in (seen, seen[::-1], seen[::2] + seen[1::2]):
        meter = Meter(price_per_h=3600.0)
        for one in order:
            (meter.on_state if isinstance(one, LaunchState) else meter.on_event)(one)  # type: ignore[arg-type]
        assert meter.spent == pytest.approx(110 + 60)


def test_time_passes_between_signs_of_life() -> None:
    """A silent run goes on costing, by the clock here; an event puts the count right."""
    meter = Meter(price_per_h=3600.0)
    meter.on_event(event("started", 0))
    meter.on_wait(50)
    assert meter.spent == pytest.approx(50)
    meter.on_event(event("progress", 45))
    assert meter.spent == pytest.approx(45)


def test_a_run_that_goes_on_costs_more_than_when_it_was_last_followed() -> None:
    """What was recorded then is the least; the recorded cost of one that ended is its cost."""
    launch = story.launched(price_per_h=3600.0, spent=60.0, states=(state("running", 0),))
    assert spent_of(launch) == 60
    assert spent_of(launch, [event("progress", 100)]) == pytest.approx(100)
    assert spent_of(replace(launch, states=(*launch.states, state("stopped", 110)))) == 60


def test_a_run_that_went_on_the_next_day_did_not_hold_devices_over_night() -> None:
    """A process that was killed has said nothing of its end."""
    meter = Meter(price_per_h=3600.0)
    for one in (event("started", 0), event("progress", 100), event("started", 80_000), event("finished", 80_050)):
        meter.on_event(one)
    assert meter.spent == pytest.approx(150)


def test_without_a_price_nothing_is_counted_or_stopped() -> None:
    """And free places stop no run, whatever the limit."""
    for price in (None, 0.0):
        meter = Meter(price_per_h=price, max_cost=0.01)
        meter.on_event(event("started", 0))
        meter.on_wait(1e6)
        assert meter.over_limit() is None
        assert most_seconds(1.0, price) is None


def test_a_price_comes_from_the_offer_or_from_the_user() -> None:
    """Of several offers the one of the same word; the user's word counts most."""
    place, target = FakePlace(), LaunchTarget(text="fake:box/4xl4", kind="fake", address="box")
    place.offered = (
        Offer(text="fake:box/l4", num_nodes=1, devices_each=1, device="l4", price_per_h=1.0),
        Offer(text="fake:box/4xl4", num_nodes=1, devices_each=4, device="l4", price_per_h=4.0, price_source="list"),
    )
    assert price_there(target, Request(target=target), place) == (4.0, "USD", "list")
    given = Request(target=target, options={"price": "2.5"})
    assert price_there(target, given, place) == (2.5, "USD", "--place-option price")
    place.offered = ()
    assert price_there(target, Request(target=target), place)[0] is None
    for bad in ("-1", "nan", "two"):
        with pytest.raises(BadJob, match=f"price={bad}"):
            price_there(target, Request(target=target, options={"price": bad}), place)


def test_a_long_log_is_counted_by_a_mark_a_minute() -> None:
    """A week of progress costs no more to add up each second than an hour's."""
    meter = Meter(price_per_h=1.0)
    for number in range(20_000):
        meter.on_event(Event(kind="progress", at=1000.0 + 0.5 * number, fields={}))
    meter.on_event(Event(kind="stopped", at=11_000.0, fields={}))
    assert meter.held_s == 10_000.0
    assert len(meter._held) < 400

"""Which direct links are measured, by whom, and what counts of them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import PlaceUnreachable
from stoker.pool import events as on
from stoker.pool import watch
from stoker.pool.events import Refused
from stoker.pool.link_probe import SIZES
from stoker.pool.pair_links import (
    ASKED_S,
    FRESH_S,
    GROUP,
    MOST_A_DAY,
    NO_PATH_S,
    LinkSchedule,
    StatedLink,
    direct_link,
    direct_links,
    groups_of,
    measured_path,
    next_measurements,
)
from stoker.testing import FakeClock
from tests.pool.book import Book, offer


def stated(up: float, down: float, delay_s: float = 0.1, at_s: float = 0.0) -> StatedLink:
    """A statement."""
    return StatedLink(upload_bytes_per_s=up, download_bytes_per_s=down, delay_s=delay_s, at_s=at_s)


RATES = st.floats(0, 1e12)


@given(RATES, RATES, RATES, RATES)
def test_of_a_pair_the_lower_statement_counts(up: float, down: float, other_up: float, other_down: float) -> None:
    """What one end claims never makes the link faster than the other end says."""
    links = {("a", "b"): stated(up, down, 0.1), ("b", "a"): stated(other_up, other_down, 0.3)}
    there, back = direct_link(links, "a", "b", 1.0), direct_link(links, "b", "a", 1.0)
    if min(up, down, other_up, other_down) >= 1:
        assert there is not None
        assert back is not None
        assert (there.bytes_per_s, back.bytes_per_s) == (min(up, other_down), min(down, other_up))
        assert there.delay_s == back.delay_s == 0.3
    if min(up, other_down) < 1:
        assert there is None


def test_a_statement_of_one_end_or_of_yesterday_says_nothing() -> None:
    """Both have to say it, and not long ago; that there is no path is asked again sooner."""
    links = {("a", "b"): stated(1.0, 2.0)}
    assert direct_link(links, "a", "b", 1.0) is None
    links["b", "a"] = stated(3.0, 4.0)
    assert set(direct_links(links, 1.0, {"a", "b", "c"})) == {("a", "b"), ("b", "a")}
    assert direct_links(links, 1.0, {"a", "c"}) == {}
    assert direct_link(links, "a", "b", FRESH_S) is None
    assert not stated(0.0, 5.0).is_fresh(NO_PATH_S)


def test_agents_behind_one_address_measure_their_links_first_of_all() -> None:
    """A group is of one class; those of one address are in one group; who states no class is in none."""
    agents = {f"{number:02}": ("class", "home" if number % 2 else f"host-{number:02}") for number in range(20)}
    groups = groups_of({**agents, "x": ("", "home"), "y": ("other", "home")})
    assert max(map(len, groups)) == GROUP
    assert not {"x", "y"} & set(itertools.chain(*groups))
    assert any({f"{number:02}" for number in range(1, 16, 2)} == set(group) for group in groups)


def test_all_links_of_a_group_are_measured_once_one_at_a_time() -> None:
    """No agent has part in two measurements at once, so that they do not share its line."""
    known, rounds = dict[tuple[str, str], StatedLink](), 0
    while pairs := next_measurements([["a", "b", "c", "d"]], known, set(), 1.0):
        busy = [*itertools.chain(*pairs)]
        assert len(busy) == len(set(busy))
        known |= {pair: stated(1.0, 1.0) for pair in pairs}
        rounds += 1
    assert set(known) == set(itertools.permutations("abcd", 2))
    assert rounds <= 12
    assert next_measurements([["a", "b"]], known, set(), FRESH_S) == [("a", "b")]


def test_an_agent_that_states_nothing_keeps_nobody_else_from_it() -> None:
    """It is asked again after some hours; the other one measures its other links, and states its own of this one."""
    schedule, known = LinkSchedule(), dict[tuple[str, str], StatedLink]()
    names = iter("1234567890")
    agents = dict.fromkeys("ab", ("class", "home"))
    assert schedule.look(agents, known, 0.0, lambda: next(names)) == ["a"]
    assert schedule.asks("a", "b", known)
    assert not schedule.asks("b", "a", known)
    assert schedule.look(agents, known, ASKED_S - 1, lambda: next(names)) == []
    assert schedule.look(agents, known, ASKED_S, lambda: next(names)) == []
    more = {**agents, "c": ("class", "home")}
    assert schedule.look(more, known, ASKED_S + 1, lambda: next(names)) == ["b"]
    assert schedule.asks("b", "c", known)
    known["b", "c"] = stated(1.0, 1.0, at_s=ASKED_S + 2)
    assert not schedule.asks("b", "c", known), "it has stated it"
    assert schedule.look(more, known, ASKED_S + 3, lambda: next(names)) == ["c"]
    known["c", "b"] = stated(1.0, 1.0, at_s=ASKED_S + 4)
    assert schedule.look(more, known, ASKED_S + NO_PATH_S, lambda: next(names)) == ["a"]


def test_agents_that_come_and_go_cost_another_one_a_bounded_number_of_measurements() -> None:
    """Each new one would measure its link; after a day it goes on."""
    schedule, known = LinkSchedule(), dict[tuple[str, str], StatedLink]()
    now_s = 0.0
    for number in range(2 * MOST_A_DAY):
        agents = dict.fromkeys(("a", f"new {number}"), ("class", "home"))
        now_s += 1.0
        for agent in schedule.look(agents, known, now_s, lambda: "name"):
            other = schedule.asked[agent][0]
            known[agent, other] = stated(0.0, 0.0, at_s=now_s + 0.5)
    assert sum("a" in pair for pair in known) == MOST_A_DAY
    agents = dict.fromkeys(("a", "b"), ("class", "home"))
    assert not schedule.look(agents, known, now_s + 1, lambda: "name")
    assert schedule.look(agents, known, now_s + FRESH_S, lambda: "name") == ["a"]


class Line:
    """A path with a rate and a delay, in which `clock` goes on; it breaks after `most` transfers."""

    def __init__(self, up: float, down: float, delay_s: float, most: int = 100) -> None:
        self.clock, self.moved = FakeClock(), list[int]()
        self._up, self._down, self._delay_s, self._most = up, down, delay_s, most

    def send(self, num_bytes: int) -> None:
        self._move(num_bytes, self._up)

    def fetch(self, num_bytes: int) -> None:
        self._move(num_bytes, self._down)

    def _move(self, num_bytes: int, rate: float) -> None:
        self.moved.append(num_bytes)
        if len(self.moved) > self._most:
            raise PlaceUnreachable("it broke")
        self.clock.advance(self._delay_s + num_bytes / rate)


def measured(line: Line) -> StatedLink:
    """What is measured of it."""
    return measured_path(line, line.clock)


def test_a_path_is_measured_without_its_delay() -> None:
    """Rates are those of the line; on a slow one the larger file is left out; one that breaks is none."""
    link = measured(Line(5e6, 2e7, 0.2))
    assert link.upload_bytes_per_s == pytest.approx(5e6)
    assert link.download_bytes_per_s == pytest.approx(2e7)
    assert link.delay_s == pytest.approx(0.2)
    slow = Line(2e4, 1e6, 0.0)
    assert measured(slow).upload_bytes_per_s == pytest.approx(2e4)
    assert slow.moved == [0, 0, 0, SIZES[0], *SIZES]
    assert measured(Line(1e6, 1e6, 0.0, most=4)) == stated(0.0, 0.0, 0.0)


def test_links_are_between_agents() -> None:
    """Both have an offer, and none is one to itself; what is a week old goes with the next root."""
    book = Book()
    link = on.Linked(other=book.other.public, upload_bytes_per_s=1e6, download_bytes_per_s=1e6)
    book.post(book.agent, on.Offered(offer=offer(now_s=book.now_s)))
    with pytest.raises(Refused, match="has no offer"):
        book.post(book.agent, link)
    book.post(book.other, on.Offered(offer=offer("second", now_s=book.now_s)))
    with pytest.raises(Refused, match="to another agent"):
        book.post(book.agent, replace(link, other=book.agent.public))
    book.post(book.agent, link)
    assert direct_link(book.state.links, book.agent.public, book.other.public, book.now_s) is None
    book.post(book.other, replace(link, other=book.agent.public, download_bytes_per_s=5e5))
    there = direct_link(book.state.links, book.agent.public, book.other.public, book.now_s)
    assert there is not None
    assert there.bytes_per_s == 5e5
    for days, num_kept in ((2, 2), (7, 0)):
        book.pass_time(days * 24 * 3600)
        book.post(book.operator, on.Deposited(account=book.third.public, amount=0))
        book.post(book.operator, next(one for one in due(book) if isinstance(one, on.Anchored)))
        assert len(book.state.links) == num_kept


def due(book: Book) -> list[on.Body]:
    """What the control plane signs now."""
    return watch.due(book.state, book.now_s, key=book.operator, up_since_s=0.0, present={})

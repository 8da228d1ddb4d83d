"""One device that is offered twice: what follows from the times of probes, by the log alone."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from stoker.errors import BadSetting
from stoker.pool import events as on
from stoker.pool.events import Refused
from stoker.pool.joint_probe import (
    clashes,
    is_never_in_time,
    is_slower_than_claimed,
    limit_s,
    probed_devices,
    suspects,
    to_screen,
)
from stoker.pool.keys import Key
from tests.pool.book import Book, offer, opened

AGENT, OTHER = "a" * 64, "b" * 64


def times(
    name: str, agent: str, alone: tuple[float, ...], together: tuple[float, ...], claimed: float = 1.0
) -> on.ProbeTimes:
    """Times of one offer."""
    return on.ProbeTimes(offer_id=name, agent=agent, claimed_s=claimed, alone_s=alone, together_s=together)


def pair(one: tuple[float, ...], other: tuple[float, ...], **more: Any) -> on.Probed:
    """A probe of two offers that take a second alone."""
    agents = {"box": AGENT, "twin": OTHER} | more
    return on.Probed(
        offers=(
            times("box", agents["box"], (1.0, 1.1, 1.0), one),
            times("twin", agents["twin"], (1.2, 1.0, 1.0), other),
        )
    )


@pytest.mark.parametrize(
    ("one", "other", "late"),
    [
        ((2.0, 2.1, 1.9), (2.0, 2.0, 2.2), "both"),
        ((1.1, 1.0, 1.2), (1.0, 1.1, 1.0), ""),
        ((1.1, 1.0, 1.2), (0.0, 0.0, 0.0), "twin"),  # no memory for the second product
        ((0.0, 1.0, 0.0), (1.0, 0.0, 1.0), "box"),
        ((9.0, 9.0, 1.2), (1.0, 1.0, 1.0), ""),  # a neighbour was loud twice
        ((9.0, 1.0, 1.0), (1.0, 9.0, 1.0), ""),
        ((2.0, 2.0, 2.0), (1.0, 1.0, 1.0), "box"),  # late on purpose: it stops itself alone
    ],
)
def test_a_pair_clashes_if_no_round_had_both_in_time(one, other, late) -> None:
    """Of who was late in most rounds; one round in which both are in time is enough for both."""
    found = clashes(pair(one, other))
    assert found[AGENT, OTHER] is (late in ("box", "both"))
    assert found[OTHER, AGENT] is (late in ("twin", "both"))


def test_what_answered_wrong_alone_decides_nothing() -> None:
    """Nor do two rounds, nor three offers."""
    late = (3.0, 3.0, 3.0)
    assert (
        clashes(on.Probed(offers=(times("a", AGENT, (1.0, 0.0, 1.0), late), times("b", OTHER, (1.0,) * 3, late)))) == {}
    )
    assert (
        clashes(on.Probed(offers=(times("a", AGENT, (1.0,) * 2, late[:2]), times("b", OTHER, (1.0,) * 2, late[:2]))))
        == {}
    )
    three = tuple(times(name, AGENT, (1.0,) * 3, late) for name in "abc")
    assert clashes(on.Probed(offers=three)) == {}


def test_who_slows_down_alone_to_hide_is_slower_than_it_claims() -> None:
    """The product of both limits is below two, the time of two programs on one device."""
    assert is_slower_than_claimed(times("a", AGENT, (1.34,), (2.0,)))
    assert not is_slower_than_claimed(times("a", AGENT, (1.2,), (2.0,)))
    assert limit_s(times("a", AGENT, (1.2,), (2.0,))) < 2.0


def test_who_is_never_in_time_is_told_from_one_that_is_late_together() -> None:
    """Alone or together, no answer near the claim; of a screen nothing is said."""
    assert is_never_in_time(times("a", AGENT, (89.0, 89.0, 89.0), (89.0, 0.0, 89.0)))
    assert is_never_in_time(times("a", AGENT, (0.0,) * 3, (0.0,) * 3))
    assert not is_never_in_time(times("a", AGENT, (1.0, 9.0, 9.0), (2.0, 2.0, 2.0)))
    assert not is_never_in_time(times("a", AGENT, (), (2.0,)))


def test_a_screen_names_the_pairs_that_are_looked_at() -> None:
    """Those that were late with each other first, then each of them with the others."""
    screen = on.Probed(offers=tuple(times(name, AGENT, (), (2.0 if name in "bd" else 1.0,)) for name in "abcd"))
    assert suspects(screen) == [("b", "d"), ("b", "a"), ("b", "c"), ("d", "a"), ("d", "c")]


def test_offers_of_one_address_are_asked_at_one_moment() -> None:
    """First those alike, then those screened longest ago; of one kind of device."""
    book = Book()
    keys = [Key.made() for _ in range(5)]
    for number, key in enumerate(keys):
        book.post(book.operator, on.Deposited(account=key.public, amount=0))
        kind = "h100" if number == 4 else "cpu"
        book.post(key, on.Offered(offer=offer(f"o{number}", book.now_s, device=on.OfferedDevice(kind=kind))))
    offers = [*book.state.offers.values()]
    networks = {keys[0].public: "192.0.2.1", keys[2].public: "192.0.2.1"}
    seen = {"o0": 1.0, "o1": 5.0, "o2": 7.0, "o3": 6.0}
    found = [one.offer.offer_id for one in to_screen(offers, networks, seen, random.Random(0))]
    assert set(found[:2]) == {"o0", "o2"}
    assert found[2:] == ["o1", "o3"]
    assert to_screen(offers[:1], {}, {}, random.Random(0)) == []


def test_a_screen_is_of_so_many_devices_at_most() -> None:
    """A stranger's offers of 16 devices each are screened in twos: all answers come at one moment."""
    book = Book()
    for number in range(6):
        eight = on.OfferedDevice(kind="cpu", count=(16, 64, 16, 8, 8, 1)[number])
        book.post(book.agent, on.Offered(offer=offer(f"o{number}", book.now_s, device=eight)))
    offers, chance = [*book.state.offers.values()], random.Random(0)
    screens = [to_screen(offers, {}, dict.fromkeys(("o0", "o1"), float(number)), chance) for number in range(20)]
    assert {sum(map(probed_devices, screen)) <= 32 and len(screen) >= 2 for screen in screens} == {True}
    assert len(to_screen(offers[:2], {}, {}, chance)) == 2


def standing(book: Book) -> tuple[on.Probed, on.Probed]:
    """Two offers of two agents; a probe in which both are late, and one in which none is."""
    book.post(book.agent, on.Offered(offer=offer("box", book.now_s)))
    book.post(book.other, on.Offered(offer=offer("twin", book.now_s)))
    agents = {"box": book.agent.public, "twin": book.other.public}
    return pair((2.0,) * 3, (2.0,) * 3, **agents), pair((1.0,) * 3, (1.0,) * 3, **agents)


def test_two_clashes_in_a_row_stop_both_while_both_stand() -> None:
    """One probe is not enough; an offer that is withdrawn frees the other, and comes back marked."""
    book = Book()
    late, _ = standing(book)
    state = book.state
    book.post(book.operator, late)
    assert state.is_free(state.offers["box"], book.now_s)
    book.post(book.operator, late)
    assert not state.is_free(state.offers["box"], book.now_s)
    with pytest.raises(Refused, match="box and twin did not meet their times at one moment"):
        book.post(book.renter, opened())
    book.post(book.other, on.Withdrawn(offer_id="twin"))
    assert state.is_free(state.offers["box"], book.now_s)
    book.post(book.other, on.Offered(offer=offer("twin-2", book.now_s)))
    assert not state.is_free(state.offers["box"], book.now_s), "another name is the same device"
    book.post(book.other, on.Withdrawn(offer_id="twin-2"))
    book.post(book.renter, opened())
    book.post(book.other, on.Offered(offer=offer("twin", book.now_s)))
    assert not state.is_free(state.offers["twin"], book.now_s), "its device is leased as the other one"


def test_a_probe_in_time_takes_the_clash_back() -> None:
    """And both have then met their times together, which the list of offers shows."""
    book = Book()
    late, fine = standing(book)
    for probe in (late, fine, late):
        book.post(book.operator, probe)
        assert book.state.is_free(book.state.offers["box"], book.now_s)
    for probe in (late, fine):
        book.post(book.operator, probe)
    assert book.state.clashes == {}
    assert book.state.offers["box"].probed_s == book.now_s
    book.post(book.agent, on.Offered(offer=offer("box", book.now_s)))
    assert book.state.offers["box"].probed_s == book.now_s
    more = on.OfferedDevice(kind="cpu", count=2)
    book.post(book.agent, on.Offered(offer=offer("box", book.now_s, device=more)))
    assert book.state.offers["box"].probed_s == 0, "another device was not probed"


def test_other_offers_of_the_same_agents_free_none_while_those_that_clashed_stand() -> None:
    """They may be real devices; they count once one of those that clashed is withdrawn."""
    book = Book()
    late, fine = standing(book)
    for key, name in ((book.agent, "box-2"), (book.other, "twin-2")):
        book.post(key, on.Offered(offer=offer(name, book.now_s)))
    others = [
        on.Probed(offers=tuple(replace(one, offer_id=f"{one.offer_id}-2") for one in probe.offers))
        for probe in (late, fine)
    ]

    def is_free(name: str) -> bool:
        return book.state.is_free(book.state.offers[name], book.now_s)

    for probe in (late, others[1], late, others[1], others[0], others[1]):
        book.post(book.operator, probe)
    assert not is_free("box")
    book.post(book.operator, fine)
    assert is_free("box")
    for probe in (late, late):
        book.post(book.operator, probe)
    book.post(book.other, on.Withdrawn(offer_id="twin"))
    assert not is_free("box-2")
    book.post(book.operator, others[1])
    assert is_free("box-2")
    assert book.state.clashes == {}


def test_a_probe_does_not_count_for_a_higher_claim() -> None:
    """What was shown stands for the speed that was claimed then, or less."""
    book = Book()
    _, fine = standing(book)

    def claim(flop_per_s: float) -> float:
        measured = on.Measured(fp32_flop_per_s=flop_per_s)
        book.post(book.agent, on.Offered(offer=offer("box", book.now_s, measured=measured)))
        return book.state.offers["box"].probed_s

    claim(1e12)
    book.post(book.operator, fine)
    assert claim(1e12) == claim(5e11) == book.now_s
    assert claim(1e12) == 0


def test_an_agent_that_is_late_on_purpose_stops_no_one_else() -> None:
    """Only its own offer is marked, as often as it likes."""
    book = Book()
    standing(book)
    agents = {"box": book.agent.public, "twin": book.other.public}
    for _ in range(5):
        book.post(book.operator, pair((1.0, 1.0, 1.0), (9.0, 0.0, 9.0), **agents))
    assert book.state.is_free(book.state.offers["box"], book.now_s)
    assert not book.state.is_free(book.state.offers["twin"], book.now_s)


def test_probes_are_the_pools_to_sign_and_name_offers_that_are_there() -> None:
    """An agent cannot mark another one."""
    book = Book()
    late, _ = standing(book)
    with pytest.raises(Refused, match="own key"):
        book.post(book.agent, late)
    with pytest.raises(Refused, match="no offer 'box'"):
        book.post(book.operator, pair((2.0,) * 3, (2.0,) * 3, twin=book.other.public))
    with pytest.raises(BadSetting, match="2 to 16"):
        on.Probed(offers=late.offers[:1])
    uneven = on.Probed(offers=(late.offers[0], times("twin", book.other.public, (), (1.0,))))
    with pytest.raises(Refused, match="as many rounds"):
        book.post(book.operator, uneven)

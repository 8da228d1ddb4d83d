from __future__ import annotations

import pytest

from stoker.pool import events as on
from stoker.pool.events import CREDIT, OfferedDevice, Refused, sha256
from stoker.pool.keys import Key
from stoker.pool.watch import due
from tests.pool.book import Book, offer, opened


def shop(num_offers: int, **rules: int) -> Book:
    """A pool with offers box0, box1, …, and money for everybody."""
    book = Book()
    for number in range(num_offers):
        book.post(book.agent, on.Offered(offer=offer(f"box{number}", book.now_s)))
    return book


def take(book: Book, key: Key, number: int) -> None:
    """Take an offer, and start."""
    book.post(key, opened(f"job{number}", offer_id=f"box{number}", deposit=CREDIT, bond=0))
    book.post(book.agent, on.Accepted(lease_id=f"job{number}"))


def wait(book: Book, key: Key, *kinds: str, name: str = "r") -> None:
    """Wait for a device."""
    book.post(key, on.Waiting(request_id=name, kinds=kinds, until_s=book.now_s + 300))


def test_a_quota_is_kept() -> None:
    """A team that has as many devices as it may have gets no more, until one is free."""
    book = shop(3)
    book.post(book.operator, on.TeamMade(team="a", members=(book.renter.public, book.other.public), most_devices=2))
    take(book, book.renter, 0)
    take(book, book.other, 1)
    with pytest.raises(Refused, match="team a has 2 devices, and its quota is 2"):
        take(book, book.renter, 2)
    book.post(book.renter, on.Closed(lease_id="job0", reason="done"))
    take(book, book.other, 2)


def test_who_has_less_comes_first() -> None:
    """While a team without devices waits, one that has some does not take the last; when it no longer waits, it may."""
    book = shop(2)
    take(book, book.renter, 0)
    wait(book, book.other)
    with pytest.raises(Refused, match="1 who wait come before"):
        take(book, book.renter, 1)
    take(book, book.other, 1)
    assert not book.state.waiting


def test_many_requests_are_one_turn() -> None:
    """A key that posts a request over and over keeps one place, and not all offers."""
    book = shop(3)
    take(book, book.renter, 0)
    for number in range(16):
        wait(book, book.other, name=f"r{number}")
    take(book, book.renter, 1)
    with pytest.raises(Refused, match="1 who wait come before"):
        take(book, book.renter, 2)


def test_waiting_ends_and_only_for_what_was_asked() -> None:
    """A request that lapsed, or for another kind, holds no other up; nor does one where there is enough for all."""
    book = shop(4)
    take(book, book.renter, 0)
    wait(book, book.other, "h100")
    take(book, book.renter, 1)
    wait(book, book.third, "cpu")
    take(book, book.renter, 2)  # another one is left
    with pytest.raises(Refused, match="come before"):
        take(book, book.renter, 3)
    book.pass_time(301)
    take(book, book.renter, 3)


def test_weights_are_shares() -> None:
    """A team of weight 3 with two devices has less than its due against a team of weight 1 with one."""
    book = shop(4)
    book.post(book.operator, on.TeamMade(team="large", members=(book.renter.public,), weight=3.0))
    take(book, book.renter, 0)
    take(book, book.renter, 1)
    take(book, book.other, 2)
    wait(book, book.renter)
    with pytest.raises(Refused, match="large"):
        take(book, book.other, 3)
    take(book, book.renter, 3)


def test_a_share_is_of_the_scarcest_kind() -> None:
    """One of one H100 is more than one of four CPUs: the dominant share decides."""
    book = shop(4)
    device = OfferedDevice(kind="h100")
    book.post(book.agent, on.Offered(offer=offer("box9", book.now_s, device=device)))
    take(book, book.renter, 9)
    take(book, book.other, 0)
    take(book, book.other, 1)
    wait(book, book.other)
    wait(book, book.third)
    with pytest.raises(Refused, match="2 free offers of cpu, and 2 who wait"):
        take(book, book.renter, 2)


def test_a_higher_priority_has_a_lease_preempted() -> None:
    """Only after a committed checkpoint, with the notice of the offer; then the device is free for who waits."""
    book = shop(1)
    book.post(book.operator, on.TeamMade(team="urgent", members=(book.other.public,), priority=5))
    take(book, book.renter, 0)
    wait(book, book.other)

    def settle() -> list[str]:
        bodies = due(book.state, book.now_s, key=book.operator, up_since_s=0.0, present={})
        for body in bodies:
            book.post(book.operator, body)
        return [on.kind_of(body) for body in bodies]

    assert settle() == []
    state = sha256(b"0")
    book.post(book.agent, on.Committed(lease_id="job0", block=0, update=1, state=state, blob=state))
    with pytest.raises(Refused, match="has a notice of 120 s"):
        book.post(book.operator, on.Preempting(lease_id="job0", by_s=book.now_s + 100))
    assert settle() == ["preempting"]
    assert settle() == []
    for index in range(14):
        book.pass_time(10)
        book.post(book.agent, on.Beat(lease_id="job0", index=index, running_s=10 * (index + 1)))
        if index % 10 == 0:
            wait(book, book.other)
    assert settle() == ["closed"]
    assert book.state.leases["job0"].reason == "reclaimed for a higher priority"
    record = book.state.record_of(book.agent.public)
    assert (record.lost, record.reclaimed, record.left) == (0, 0, 0)
    take_again = opened("job9", offer_id="box0", deposit=CREDIT, bond=0)
    with pytest.raises(Refused, match="urgent"):
        book.post(book.renter, take_again)
    book.post(book.other, take_again)


def test_nobody_is_preempted_for_an_equal() -> None:
    """Nor for a lower priority; nor may the operator do so without cause."""
    book = shop(1)
    take(book, book.renter, 0)
    state = sha256(b"0")
    book.post(book.agent, on.Committed(lease_id="job0", block=0, update=1, state=state, blob=state))
    wait(book, book.other)
    assert due(book.state, book.now_s, key=book.operator, up_since_s=0.0, present={}) == []
    with pytest.raises(Refused, match="no lease of a higher priority"):
        book.post(book.operator, on.Preempting(lease_id="job0", by_s=book.now_s + 500))


def test_teams_and_requests_are_checked() -> None:
    """A key is in one team, and waits for so much, for so long."""
    book = shop(0)
    book.post(book.operator, on.TeamMade(team="a", members=(book.renter.public,)))
    book.post(book.operator, on.TeamMade(team="a", members=(book.renter.public, book.other.public)))
    with pytest.raises(Refused, match="is in team a already"):
        book.post(book.operator, on.TeamMade(team="b", members=(book.renter.public,)))
    with pytest.raises(Refused, match="only the pool's own key"):
        book.post(book.renter, on.TeamMade(team="c", members=(book.renter.public,), priority=9))
    with pytest.raises(ValueError, match="weight 0"):
        on.TeamMade(team="a", weight=0.0)
    with pytest.raises(Refused, match="600 s at most"):
        book.post(book.renter, on.Waiting(request_id="r", until_s=book.now_s + 601))
    for number in range(16):
        wait(book, book.renter, name=f"r{number}")
    with pytest.raises(Refused, match="16 devices at most"):
        wait(book, book.renter, name="r16")
